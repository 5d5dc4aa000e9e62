"""A model's tokenizer for a chat format: only the template's own text becomes tokens of a frame.

A tool's output that spells `<|im_end|>` must not end a turn, and one that spells `<｜User｜>` must not begin another.
So contents are guarded before they are rendered: a cut, a word that occurs in no content, is inserted into each spelled
token that is special, ends a text, or is written by the template around messages, reasoning, calls or answers. The
rendered text is split at the cuts, and no part holds the whole token. A text without such spellings is rendered and
tokenised unchanged. A normalizer may turn another spelling (`＜|im_end|＞`) into a guarded token: it is split too.

The policy's own turns keep the marks of its reasoning and its calls. Other added tokens stay tokens in contents too:
many are plain text (runs of spaces), and the model has never seen other ids for them.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import EngineFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from tokenizers import Encoding, Tokenizer

_CHOSEN = frozenset({"role", "type"})
"""Keys of values that templates compare and do not write."""
_NAMES = frozenset(
    {*_CHOSEN, "content", "name", "id", "tool_calls", "tool_call_id", "function", "arguments", "parameters"}
    | {"description", "properties", "required", "reasoning", "reasoning_content", "thinking", "text"}
)
"""Names that templates compare: they stay whole."""


class ChatTokenizer:
    def __init__(
        self, backend: Tokenizer, frame: Iterable[str], own: Iterable[str] = (), written: Iterable[str] = ()
    ) -> None:
        """Guard the tokens of a frame and all special ones.

        Args:
            backend: the tokenizer.
            frame: texts of tokens that a template writes, or that end a text.
            own: those that it writes within turns of the policy.
            written: literal texts of the template, which may complete a token together with adjacent text.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder().values()
        self._added = re.compile(_any_of(token.content for token in added))
        special = {token.content for token in added if token.special}
        # A token of one character cannot be cut; no known vocabulary has one.
        guarded = special | set(frame)
        self._guarded = re.compile(_any_of(text for text in guarded if len(text) > 1))
        kept = set(own) - special
        self._guarded_in_turns = re.compile(_any_of(text for text in guarded - kept if len(text) > 1))
        self._rests: dict[str, set[str]] = {}
        """The possible rests of each beginning of a guarded token."""
        for text in guarded:
            for length in range(1, len(text)):
                self._rests.setdefault(text[:length], set()).add(text[length:])
        self._longest = max(map(len, guarded), default=1)
        heads = {
            text[:length] for text in (*written, *guarded) for length in range(1, min(len(text), self._longest) + 1)
        }
        tails = {
            text[-length:] for text in (*written, *guarded) for length in range(1, min(len(text), self._longest) + 1)
        }
        self._continued = {text[:at] for text in guarded for at in range(1, len(text)) if text[at:] in heads}
        """Beginnings of guarded tokens that the template may complete after a text."""
        self._begun = {text[at:] for text in guarded for at in range(1, len(text)) if text[:at] in tails}
        """Ends of guarded tokens that the template may have begun before a text."""
        self._framed = {
            text[start:end]
            for text in guarded
            for start in range(1, len(text))
            if text[:start] in tails
            for end in range(start + 1, len(text))
            if text[end:] in heads
        }
        """Texts that, between two literals of the template, make a guarded token."""
        ids = {backend.token_to_id(text): text for text in guarded}
        self._guarded_ids = {token_id: text for token_id, text in ids.items() if token_id is not None}
        known = np.array(sorted(self.vocabulary().values()))
        self._in_vocabulary = np.zeros(known[-1] + 1, bool)
        self._in_vocabulary[known] = True
        self._lead = self._find_lead(special)

    def vocabulary(self) -> dict[str, int]:
        """Return all tokens, special ones included, with their ids."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def _find_lead(self, special: set[str]) -> str:
        """Return a lead for a part from the middle of a text, so that it is not encoded as the beginning of a text.

        SentencePiece's tokenizers put a space before a text; byte-level ones tokenise it the same everywhere.
        """
        for text in sorted(special):
            if len(self._ids(text)) == 1 and self._ids(f"{text}a")[1:] != self._ids("a"):
                return text
        return ""

    def _ids(self, text: str) -> list[int]:
        return self._encode(text).ids

    def _encode(self, text: str) -> Encoding:
        # The backend rejects lone surrogates: each becomes "?".
        return self._backend.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False)

    def without_tokens(self, text: str) -> str:
        return self._added.sub("", text)

    def guard(self, value: Any) -> tuple[Any, str]:
        """Cut spellings of guarded tokens in all texts of a value made of dicts and lists.

        Returns:
            The value, and the cut for `encode`; empty if the value is unchanged.
        """
        texts = list(_texts(value))
        joining = self._joining(texts)
        if not joining and not any(self._guarded.search(text) or any(self._at_edges(text)) for text in texts):
            return value, ""
        # Random, so no content can contain it.
        cut = f"xQ{secrets.token_hex(16)}Qx"
        return self._cut(value, self._guarded, cut, joining), cut

    def _joining(self, texts: Sequence[str]) -> set[str]:
        """Return the beginnings of guarded tokens that one text ends with and another continues.

        A template may write them next to each other.
        """
        ends = {end for text in texts for end in self._ends_of(text)}
        if not ends:
            return set()
        heads = [text.lstrip()[: self._longest] for text in texts]
        beginnings = {head[:length] for head in heads for length in range(1, len(head) + 1)}
        wholes = {text.strip() for text in texts if len(text) < 2 * self._longest} - {""}
        return {
            end
            for end in ends
            if any(
                rest in beginnings or any(rest[:length] in wholes for length in range(1, len(rest)))
                for rest in self._rests[end]
            )
        }

    def _at_edges(self, text: str) -> tuple[bool, bool]:
        """Return whether the template may make a guarded token of a text's beginning, and of its end."""
        inner = text.strip()
        head, tail = inner[: self._longest], inner[-self._longest :]
        begun = bool(self._begun) and any(head[:length] in self._begun for length in range(1, len(head) + 1))
        continued = bool(self._continued) and any(tail[start:] in self._continued for start in range(len(tail)))
        return begun, continued or inner in self._framed

    def _ends_of(self, text: str) -> list[str]:
        tail = text.rstrip()[-self._longest :]
        return [tail[start:] for start in range(len(tail)) if tail[start:] in self._rests]

    def _cut(self, value: Any, guarded: re.Pattern[str], cut: str, joining: set[str]) -> Any:
        if isinstance(value, str):
            return self._cut_text(value, guarded, cut, joining)
        if isinstance(value, dict):
            inner = self._guarded_in_turns if value.get("role") == "assistant" else guarded
            return {
                self._cut(key, inner, cut, joining): self._cut(item, inner, cut, joining)
                if key not in _CHOSEN
                else item
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._cut(item, guarded, cut, joining) for item in value]
        return value

    def _cut_text(self, text: str, guarded: re.Pattern[str], cut: str, joining: set[str]) -> str:
        parts: list[str] = []
        position = 0
        while found := guarded.search(text, position):
            # Advance one character, since a token may contain another's beginning.
            parts.append(text[position : found.start() + 1])
            position = found.start() + 1
        length = len(text.rstrip())
        for end in self._ends_of(text):
            if end in joining and length - len(end) >= position:
                parts.append(text[position : length - len(end) + 1])
                position = length - len(end) + 1
        begun, continued = self._at_edges(text) if text not in _NAMES else (False, False)
        if continued and length > position:
            parts.append(text[position:length])
            position = length
        parts.append(text[position:])
        if begun:
            blank = len(text) - len(text.lstrip())
            parts[:1] = [text[:blank], parts[0][blank:]]
        return cut.join(parts)

    def encode(
        self, text: str, boundaries: Sequence[int] = (), cut: str = "", after: str = "", *, inside: bool = False
    ) -> list[NDArray[np.int32]]:
        """Return the ids of rendered text, divided at boundaries; a token across one belongs to the part before it.

        Returns:
            int32 arrays, one more than there are boundaries.
        """
        ids: list[int] = []
        splits: list[int] = []
        waiting = list(boundaries)[::-1]
        start = 0
        after = after or (self._lead if inside else "")
        parts = [(part, len(cut)) for part in (text.split(cut) if cut else [text])][::-1]
        while parts:
            part, gap = parts.pop()
            encoding, lead, skipped = self._encode_after(part, after)
            if apart := self._taken_apart(part, encoding, lead, skipped):
                parts += [(apart[-1], gap), *((one, 0) for one in apart[-2::-1])]
                continue
            end = start + len(part)
            while waiting and waiting[-1] <= end:
                first = _first_token(encoding, max(0, waiting.pop() - start) + lead, lead + len(part))
                splits.append(len(ids) + max(0, first - skipped))
            ids += encoding.ids[skipped:]
            start = end + gap
            after = self._lead
        return np.split(np.array(ids, np.int32), splits + [len(ids)] * len(waiting))

    def _taken_apart(self, part: str, encoding: Encoding, lead: int, skipped: int) -> list[str]:
        """Divide a part so that nothing in it is normalized to a guarded token; empty if nothing is."""
        ids = encoding.ids
        if self._guarded_ids.keys().isdisjoint(ids):
            return []
        apart: list[str] = []
        position = 0
        for index in (i for i, token_id in enumerate(ids) if i >= skipped and token_id in self._guarded_ids):
            start, end = encoding.token_to_chars(index) or (0, 0)
            start, end = max(0, start - lead), end - lead
            # What the template wrote is spelled as the token is; no text spells it still.
            if end <= start or self._guarded_ids[ids[index]] in part[start:end]:
                continue
            if end - start == 1:
                apart += [part[position:start], "?"]
                position = end
            else:
                middle = (start + end) // 2
                apart.append(part[position:middle])
                position = middle
        return [*apart, part[position:]] if apart else []

    def _encode_after(self, text: str, after: str) -> tuple[Encoding, int, int]:
        """Encode a text that follows a token; also return that token's characters and tokens, to be skipped."""
        return self._encode(after + text), len(after), 1 if after else 0

    def plain(self, text: str) -> NDArray[np.int32]:
        """Return the ids of a text as the tokenizer itself makes them, int32 [N]: nothing in it is guarded."""
        return np.array(self._backend.encode(text).ids, np.int32)

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        """Return the text of ids, special tokens included.

        Raises:
            EngineFailed: an id is not in the vocabulary.
        """
        table = self._in_vocabulary
        if len(token_ids) and not (
            token_ids.min() >= 0 and token_ids.max() < len(table) and bool(table[token_ids].all())
        ):
            unknown = next(i for i in token_ids.tolist() if not (0 <= i < len(table) and table[i]))
            raise EngineFailed(
                f"the engine gave the token id {unknown}, which is not in the tokenizer's vocabulary; "
                "does it serve another model than its tokenizer's?"
            )
        return self._backend.decode(token_ids.tolist(), skip_special_tokens=False)


def _any_of(texts: Iterable[str]) -> str:
    # An alternation takes its first match, so the longest comes first; (?!) matches nothing.
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _first_token(encoding: Encoding, position: int, length: int) -> int:
    """Return the first token that begins at or after a position."""
    while position < length:
        token = encoding.char_to_token(position)
        if token is not None:
            covered = encoding.token_to_chars(token)
            return token if covered is not None and covered[0] >= position else token + 1
        position += 1  # of a space that belongs to no token
    return len(encoding.ids)
