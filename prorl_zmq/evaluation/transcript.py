"""`Transcript`: a trajectory as text: its turns, its tool calls and the text of each token.

It is written when a result arrives, so reading it needs no tokenizer. A token's text is what it adds to the text before
it: a token that is part of a character has none, and the token that completes the character has it. Texts of models and
tools are not cleaned here: clean them where they are shown.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from ..data.conversations import labels_of
from ..data.trajectory import Role, Trajectory
from ..errors import EngineFailed
from ..inference.tool_calls.call import MalformedCall
from ..inference.tool_calls.formats import format_named

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..data.trajectory import TokenArrays
    from ..inference.chat import ChatFormat
    from ..inference.tool_calls.call import ToolCallFormat
    from ..wire.messages.chat import ChatSettings

REPLACEMENT = "\ufffd"
"""What decoders return for a part of a character."""
RUN_LIMIT = 64
"""Longest run of tokens without text of their own that is read token by token: it takes the square of that."""
ROUNDED = 4
"""Decimals of a log-prob in a transcript; the arrays have all."""
_REASONING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool call, or a failed attempt at one."""

    name: str = ""
    """Empty: the call could not be parsed."""
    arguments: str = ""
    """JSON; or the feedback to the model on a call that could not be parsed."""


class TurnText(msgspec.Struct, frozen=True, omit_defaults=True):
    role: Literal["system", "user", "assistant", "tool"]
    start: int
    end: int
    """The token after its last."""
    text: str | None = None
    """Of the policy's turns, what it generated; of others, all. None: there was no tokenizer."""
    calls: tuple[Call, ...] = ()
    conversation: str = ""
    """The name of its conversation; empty: `main`."""
    reward: float | None = None
    """Its own reward, if it has one."""


class Transcript(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A trajectory of T tokens: `trajectories/JOB.json`."""

    job_id: str
    model: str = ""
    turns: tuple[TurnText, ...] = ()
    tokens: tuple[str, ...] | None = None
    """The text of each token [T]. None: there was no tokenizer."""
    token_ids: tuple[int, ...] = ()
    """[T]"""
    mask: tuple[int, ...] = ()
    """1 where the policy generated the token [T]."""
    logprobs: tuple[float | None, ...] = ()
    """Of each token that the policy generated, rounded; null for the others [T]."""
    versions: tuple[int, ...] = ()
    """The weight version that generated it; -1 for the others [T]."""


class TextReader:
    """Reads the texts of one model's tokens, and caches the text of each id."""

    def __init__(self, chat: ChatFormat, settings: ChatSettings, model: str = "") -> None:
        self.model = model
        self._chat = chat
        self._calls_format: ToolCallFormat = _calls_format(chat, settings)
        self._known: dict[int, str] = {}

    def text(self, token_ids: NDArray[np.int32]) -> str:
        return self._chat.decode(token_ids) if len(token_ids) else ""

    def texts(self, token_ids: NDArray[np.int32]) -> tuple[str, ...]:
        """Return the text of each id; that of a character in several tokens is at the one that completes it."""
        ids: list[int] = token_ids.tolist()
        texts = [self._one(token_id) for token_id in ids]
        start = 0
        for partial, run in itertools.groupby(REPLACEMENT in text for text in texts):
            end = start + sum(1 for _ in run)
            if partial and end - start > 1:
                texts[start:end] = self._parts(token_ids[start:end])
            start = end
        return tuple(texts)

    def _parts(self, token_ids: NDArray[np.int32]) -> list[str]:
        """Return the texts of tokens none of which is text by itself; of a long run of such, all at its last."""
        count, begins = len(token_ids), 0
        texts = [""] * count
        for index in range(0 if count <= RUN_LIMIT else count - 1, count):
            together = self.text(token_ids[begins : index + 1])
            if index == count - 1 or not together.endswith(REPLACEMENT):
                texts[index], begins = together, index + 1
        return texts

    def calls(self, text: str) -> tuple[Call, ...]:
        """Return the tool calls of a policy's turn, none of them from its reasoning."""
        return tuple(
            Call(arguments=call.feedback)
            if isinstance(call, MalformedCall)
            else Call(call.name, json.dumps(call.arguments, ensure_ascii=False))
            for call in self._calls_format.parse(_REASONING.sub("", text))
        )

    def before_calls(self, text: str) -> str:
        """Return what a policy's turn says before its first call, its reasoning included."""
        reasoning = found.end() if (found := _REASONING.match(text)) is not None else 0
        return text[:reasoning] + self._calls_format.before_calls(text[reasoning:])

    def _one(self, token_id: int) -> str:
        """Return the text that a token adds after another: many decoders strip a blank at the beginning."""
        known = self._known.get(token_id)
        if known is None:
            alone = self.text(np.array([token_id], np.int32))
            twice = self.text(np.array([token_id, token_id], np.int32))
            known = twice.removeprefix(alone) if twice.startswith(alone) else alone
            self._known[token_id] = known
        return known


def make_transcript(job_id: str, arrays: TokenArrays | Trajectory, reader: TextReader | None) -> Transcript:
    """Return the transcript of a trajectory; without a reader, or if it does not know the ids, without texts."""
    try:
        return _transcript(job_id, arrays, reader)
    except EngineFailed:  # another model's tokens: there are their ids
        return _transcript(job_id, arrays, None)


def _transcript(job_id: str, arrays: TokenArrays | Trajectory, reader: TextReader | None) -> Transcript:
    mask = arrays.loss_mask
    logprobs: list[float] = np.round(arrays.logprobs.astype(np.float64), ROUNDED).tolist()
    return Transcript(
        job_id=job_id,
        model=reader.model if reader is not None else "",
        turns=_turns(arrays, reader),
        tokens=reader.texts(arrays.token_ids) if reader is not None else None,
        token_ids=tuple(arrays.token_ids.tolist()),
        mask=tuple(mask.astype(int).tolist()),
        logprobs=tuple(
            logprob if generated and np.isfinite(logprob) else None
            for logprob, generated in zip(logprobs, mask.tolist(), strict=True)
        ),
        versions=tuple(arrays.weight_versions.tolist()),
    )


def _turns(arrays: TokenArrays | Trajectory, reader: TextReader | None) -> tuple[TurnText, ...]:
    turns = [_turn(arrays, start, end, role, reader) for start, end, role in arrays.turns.tolist()]
    if isinstance(arrays, Trajectory):
        for index, (name, reward) in labels_of(arrays.result, arrays.turns).items():
            turns[index] = msgspec.structs.replace(turns[index], conversation=name, reward=reward)
    return tuple(turns)


def _turn(arrays: TokenArrays | Trajectory, start: int, end: int, role: int, reader: TextReader | None) -> TurnText:
    name: Any = Role(role).name.lower()
    if reader is None:
        return TurnText(name, start, end)
    ids = arrays.token_ids[start:end]
    if role != Role.ASSISTANT:
        return TurnText(name, start, end, reader.text(ids))
    text = reader.text(ids[arrays.loss_mask[start:end]])
    return TurnText(name, start, end, text, reader.calls(text))


def _calls_format(chat: ChatFormat, settings: ChatSettings) -> ToolCallFormat:
    if settings.tool_calls:
        return format_named(settings.tool_calls)
    from ..inference.chat.transformers_chat import TransformersChatFormat

    return chat.traits.form if isinstance(chat, TransformersChatFormat) else format_named("hermes")
