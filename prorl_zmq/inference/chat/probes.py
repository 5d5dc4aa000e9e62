"""Finds a chat template's traits by rendering small conversations of markers, once, when it is loaded.

A template is arbitrary code: it may reject roles, omit messages, and write reasoning and tool calls in its own forms.
Nothing here depends on a model's family.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import ConfigError
from ..tool_calls.call import ToolCall
from ..tool_calls.formats import FOREIGN, FORMS, format_named
from .template import TemplateRefused, marker, marker_tool
from .traits import BLOCKS, Reasoning, TemplateTraits, TurnEnds, WrittenCall, call_entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ..tool_calls.call import ToolCallFormat
    from .template import ChatTemplate, Message

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|inner_prefix|>", "<|inner_suffix|>"))
"""Marks of reasoning to try if a template does not separate reasoning; the first is the default."""
_KEYS = ("reasoning_content", "reasoning", "thinking", BLOCKS)
"""Keys under which templates look for a turn's reasoning."""
_USER, _SPOKEN, _THOUGHT, _AGAIN = (marker(name) for name in ("user", "spoken", "thought", "again"))
_RESULTS = (marker("resultone"), marker("resulttwo"))
_PLAIN: Message = {"role": "user", "content": _USER}
_ANSWER: Message = {"role": "assistant", "content": _SPOKEN}
_MORE: Message = {"role": "user", "content": _AGAIN}


class AddedTokens:
    """The added tokens of a tokenizer, and which of them end a text."""

    def __init__(self, tokens: Iterable[tuple[str, bool]], stops: Iterable[str] = ()) -> None:
        known = [(text, special) for text, special in tokens if text.strip()]
        self._kinds = [
            re.compile(pattern)
            for texts in (
                list(stops),
                [text for text, special in known if special],
                [text for text, special in known if not special],
            )
            if (pattern := _any_of(texts))
        ]
        self._all = re.compile(_any_of([text for text, _ in known if not text.strip().isalnum()]) or "(?!)")

    def first(self, text: str) -> str:
        """Return the first token in a text: one that ends texts, else a special one, else any other; or nothing."""
        return next((found[0] for kind in self._kinds if (found := kind.search(text))), "")

    def all_in(self, text: str) -> set[str]:
        """Return the tokens in a text, without words and spaces."""
        return set(self._all.findall(text))


class _Calls(NamedTuple):
    """A turn that calls tools, as a template writes it."""

    calls: tuple[WrittenCall, ...]
    as_text: bool
    silent: str | None
    text: str
    """Rendered, with the tools' answers and the opening of the next turn."""
    turn: str
    """The part that the policy writes, and the end token."""

    def message(self, **more: Any) -> Message:
        entries = [call_entry(call, self.as_text) for call in self.calls]
        return {"role": "assistant", "content": self.silent, "tool_calls": entries, **more}

    def answers(self) -> list[Message]:
        return [
            {"role": "tool", "name": call.name, "tool_call_id": call.call_id, "content": result}
            for call, result in zip(self.calls, _RESULTS, strict=False)
        ]

    def after(self, text: str) -> str:
        """Return the text after the last call."""
        return text.rpartition(marker(f"value{len(self.calls)}"))[2]


def find_traits(
    template: ChatTemplate, tokens: AddedTokens, wanted_form: str, *, foreign: bool = False
) -> TemplateTraits:
    """Find a template's traits.

    Args:
        template: the template to examine.
        tokens: of its tokenizer.
        wanted_form: of tool calls; empty: as the template writes them.
        foreign: another program parses calls, so an unknown form is taken as the template writes it.

    Raises:
        ConfigError: it cannot hold a plain conversation.
    """
    try:
        opening, history = template.render([_PLAIN], opened=True), template.render([_PLAIN, _ANSWER])
    except TemplateRefused as error:
        raise ConfigError(f"the chat template fails on a plain conversation: {error}", key="chat.template") from error
    if _USER not in opening or _SPOKEN not in history:
        message = "the chat template leaves out what was said in a plain conversation; is it one for text?"
        raise ConfigError(message, key="chat.template")
    tools = [marker_tool()] if marker("tool") in template.render_or_not([_PLAIN], [marker_tool()]) else []
    candidates = list(_written_calls(template, tools))
    written = candidates[0] if candidates else None
    ends = _find_ends(template, tokens, history, written)
    reasoning, frame = _reasoning(template, tokens, ends, opening, written)
    form, chosen, end_is_read = _read_form(candidates, ends, reasoning)
    unread = written is not None and form is None
    if chosen is None and foreign and tools:
        form, chosen = (FOREIGN, written) if unread else (None, None)
    plain = form is not None and form.write(marker("tool"), {}).startswith("{")
    described = _described_form(template) if tools and (plain or not candidates) else None
    form = None if described else form  # such as Phi's, whose history has the calls without their mark
    named = FORMS[wanted_form] if wanted_form else form or described or format_named("fenced")
    writes_calls = form is not None and form.name == named.name
    fallback = unread and named.name == "fenced"
    older = template.render_or_not([_PLAIN, _ANSWER, _MORE])
    rest = _between(older, _SPOKEN, _AGAIN)
    answered = template.render_or_not([_PLAIN, _ANSWER, {"role": "tool", "name": "t", "content": _AGAIN}])
    return TemplateTraits(
        ends=ends,
        user_header=rest[max(_start_of_next(ends, rest), 0) :].lstrip(),
        takes_system=_AGAIN in template.render_or_not([{"role": "system", "content": _AGAIN}, _PLAIN]),
        form=named,
        # If the template writes no calls at all, a form that the settings name is assumed to be the template's.
        shows_tools=bool(tools) and (writes_calls or (form is None and bool(wanted_form or described))),
        writes_calls=writes_calls,
        unread_calls=unread,
        unread_marks=tuple(sorted(_own_marks(tokens, written, history))) if written and fallback else (),
        arguments_as_text=chosen is not None and chosen.as_text,
        silent=chosen.silent if chosen else "",
        end_is_read=writes_calls and end_is_read,
        named_ids=writes_calls and chosen is not None and _names_tools_by_id(chosen),
        counts_calls=writes_calls and chosen is not None and _counts_calls(template, chosen),
        takes_results=writes_calls or _AGAIN in answered,
        reasoning=reasoning,
        frame=frame,
    )


def _own_marks(tokens: AddedTokens, written: _Calls, history: str) -> set[str]:
    """Return the tokens that a template writes only in turns that call tools."""
    return tokens.all_in(written.turn) - tokens.all_in(history) - tokens.all_in(written.after(written.turn))


def _written_calls(template: ChatTemplate, tools: Sequence[Any]) -> Iterator[_Calls]:
    """Yield the ways in which a template writes calls; nothing if it omits them."""
    opening = template.render_or_not([_PLAIN], tools, opened=True)
    for count in (2, 1):
        found = False
        for as_text in (False, True):
            for named in (False, True):
                calls = tuple(_probe_call(number, named=named) for number in range(1, count + 1))
                tried = [_Calls(calls, as_text, silent, "", "") for silent in ("", None)]
                texts = [
                    template.render_or_not([_PLAIN, one.message(), *one.answers()], tools, opened=True) for one in tried
                ]
                whole = [one for one in zip(tried, texts, strict=True) if _holds(one[1], one[0])]
                if not whole:
                    continue
                # Some write an empty turn after the calls, unless the content is None.
                one, text = min(whole, key=lambda pair: len(pair[1]))
                turn = text[common(text, opening) :].partition(_RESULTS[0])[0]
                found = True
                yield one._replace(text=text, turn=turn)
                if marker("tool") in turn.rpartition(marker(f"value{count}"))[0]:
                    break  # ids that name the tool are for templates that show it nowhere else
        if found:
            return


def _probe_call(number: int, *, named: bool) -> WrittenCall:
    name = marker("tool")
    arguments: dict[str, Any] = {marker("number"): number, marker("key"): marker(f"value{number}")}
    # All templates accept the short one, except those that show no other name of the tool.
    return WrittenCall(name, arguments, f"functions.{name}:{number - 1}" if named else probe_id(number))


def probe_id(number: int) -> str:
    """Return a call id of nine letters and digits: some templates reject others."""
    return f"probe{number:04d}"


def _holds(text: str, one: _Calls) -> bool:
    """Return whether a text contains all of a turn's calls and their answers, in this order."""
    values = [text.rfind(marker(f"value{number}")) for number in range(1, len(one.calls) + 1)]
    results = [text.find(result) for result in _RESULTS[: len(one.calls)]]
    return min(values) >= 0 and max(values) < min(results) and text.count(marker("key")) >= len(one.calls)


def _names_tools_by_id(written: _Calls) -> bool:
    return f"functions.{marker('tool')}:0" in written.turn


def _counts_calls(template: ChatTemplate, written: _Calls) -> bool:
    renamed = [call._replace(call_id=probe_id(number)) for number, call in enumerate(written.calls, 8)]
    later = written._replace(calls=tuple(renamed))
    turns = [written.message(), *written.answers(), later.message(), *later.answers()]
    text = template.render_or_not([_PLAIN, *turns], [marker_tool()], opened=True)
    after = written.after(text)
    for one, other in zip(written.calls, later.calls, strict=True):
        after = after.replace(other.call_id, one.call_id)
    return bool(text) and after != written.after(written.text)


def _find_ends(template: ChatTemplate, tokens: AddedTokens, history: str, written: _Calls | None) -> TurnEnds:
    """Find what ends a turn, from the text after an answering turn and after a calling turn, by what follows it."""
    tool: Message = {"role": "tool", "name": "t", "tool_call_id": probe_id(1), "content": _AGAIN}
    tails = [
        tuple(
            _between(template.render_or_not([_PLAIN, _ANSWER, one], opened=True), _SPOKEN, _AGAIN)
            for one in (_MORE, tool)
        )
    ]
    bare = history.rpartition(_SPOKEN)[2]
    if written:
        called = template.render_or_not([_PLAIN, written.message(), _MORE], opened=True)
        last = marker(f"value{len(written.calls)}")
        tails.append((written.after(written.text).partition(_RESULTS[0])[0], _between(called, last, _AGAIN)))
    ends: dict[str, None] = {}
    opening_next: set[str] = set()
    for pair in tails:
        found = [tokens.first(tail) for tail in pair]
        if pair is tails[0] and not found[0]:
            found[0] = tokens.first(bare)
        ends |= dict.fromkeys(end for end in found[: 1 if pair is tails[0] else 2] if end)
        one, other = found
        if one and other and one not in pair[1] and other not in pair[0]:
            ends |= dict.fromkeys(found)
            opening_next |= {end for end in found if end not in bare}
    if written and len(written.calls) > 1:
        # One that stands before each answer, and not after the last.
        between, rest = written.text.rpartition(_RESULTS[0])[2].split(_RESULTS[1])
        opening_next |= {end for end in ends if end in between and end not in rest}
    return TurnEnds(tuple(ends), frozenset(opening_next))


def _start_of_next(ends: TurnEnds, text: str) -> int:
    start, end = ends.find(text)
    return start if text[start:end] in ends.opening_next else end


def _between(text: str, before: str, after: str) -> str:
    """Return the text between two markers; nothing if one is missing."""
    rest = text.rpartition(before)[2] if before in text else ""
    return rest.partition(after)[0] if after in rest else ""


def inside_turns(template: ChatTemplate, tokens: AddedTokens, traits: TemplateTraits) -> tuple[set[str], set[str]]:
    """Find the tokens that a template writes as a frame: of all messages, and within turns of the policy only."""
    tools = [marker_tool()]
    calls = [_probe_call(number, named=traits.named_ids) for number in (1, 2)]
    asked: list[Message] = [_PLAIN]
    written, inside = "", ""
    for turn in (
        traits.turn(_SPOKEN, _THOUGHT, []),
        traits.turn(_SPOKEN, None, []),
        traits.turn("", _THOUGHT, calls),
        traits.turn("", _THOUGHT, calls[:1]),
    ):
        answers = traits.results(_RESULTS, calls)[: len(turn.get("tool_calls", ()))]
        system: list[Message] = [{"role": "system", "content": marker("system")}] if traits.takes_system else []
        for offered in (tools, []):
            for more in ([*answers], [*answers, _MORE]):
                text = template.render_or_not([*system, *asked, turn, *more], offered, opened=True)
                said = text.rpartition(_USER)[2]
                written += text if not offered else said
                last = max(said.rfind(word) for word in (_SPOKEN, marker("value1"), marker("value2")))
                if last >= 0:
                    begun = template.render_or_not(asked, offered, opened=True).rpartition(_USER)[2]
                    inside += said[common(said, begun) : last]
    return tokens.all_in(written), tokens.all_in(inside)


def _reasoning(
    template: ChatTemplate, tokens: AddedTokens, ends: TurnEnds, opening: str, written: _Calls | None
) -> tuple[Reasoning, tuple[str, str]]:
    """Find how a template writes reasoning, and what it writes around a turn's text."""
    plain = template.render_or_not([_PLAIN, _ANSWER, _MORE])
    plain = plain if _SPOKEN in plain else template.render_or_not([_PLAIN, _ANSWER])
    start = common(plain, opening)
    before_said = plain[start : plain.index(_SPOKEN)] if _SPOKEN in plain[start:] else ""
    after_said = plain.rpartition(_SPOKEN)[2]
    after_said = after_said[: max(ends.find(after_said)[0], 0)].strip()
    for key in _KEYS:
        spoken = template.render_or_not([_PLAIN, _with_reasoning(_ANSWER, key)])
        called = _called(template, written, key) if written else ""
        found = next((text for text in (spoken, called) if _THOUGHT in text), "")
        if not found or (key == BLOCKS and re.search("['\"]thinking['\"]", found)):
            continue
        begun = opening if found is spoken else template.render_or_not([_PLAIN], [marker_tool()], opened=True)
        before = found[: found.index(_THOUGHT)]
        one, other = (text.partition(_THOUGHT)[2] for text in (spoken, called))
        after, before_said = _after_reasoning(one, other, opening, before_said, tokens)
        if not after and written:
            after = _inserted_after(called, _called(template, written, ""))
        if not after:
            continue
        shared = begun.startswith(before.rstrip())
        opened = shared and after not in begun[len(before.rstrip()) :]
        mark = _last_tag(before) if shared else before[common(before, begun) :].strip()
        frame = _frame_part(before_said.replace(mark + after, ""), tokens), _frame_part(after_said, tokens)
        return Reasoning(key, (mark, after), opened), frame
    frame = (_frame_part(before_said, tokens), _frame_part(after_said, tokens))
    marks = next(
        (pair for pair in MARKS if tokens.all_in("".join(pair)) == set(pair)),
        MARKS[0],
    )
    for before, after in MARKS:
        spoken = template.render_or_not(
            [_PLAIN, {"role": "assistant", "content": f"{before}\n{_THOUGHT}\n{after}\n\n{_SPOKEN}"}, _MORE]
        )
        if _SPOKEN in spoken and _THOUGHT not in spoken:
            marks = (before, after)
            break
    return Reasoning("", marks, opening.rstrip().endswith(marks[0])), frame


def _with_reasoning(message: Message, key: str) -> Message:
    if key == BLOCKS:
        said = [{"type": "text", "text": message["content"]}] if message["content"] else []
        return {**message, "content": [{"type": "thinking", "thinking": _THOUGHT}, *said]}
    return {**message, key: _THOUGHT} if key else message


def _called(template: ChatTemplate, written: _Calls, key: str) -> str:
    message = _with_reasoning(written.message(), key)
    return template.render_or_not([_PLAIN, message, *written.answers()], [marker_tool()], opened=True)


def _after_reasoning(one: str, other: str, opening: str, before_said: str, tokens: AddedTokens) -> tuple[str, str]:
    """Divide the text between reasoning and a turn's text into the end of the one and the opening of the other.

    Args:
        one: the text after reasoning in a turn with text.
        other: the text after it in a turn that calls tools.
        opening: of a turn.
        before_said: the opening of a turn's text without reasoning.
        tokens: of the tokenizer.
    """
    if _SPOKEN not in one:
        return "", before_said
    one = one.partition(_SPOKEN)[0]
    # If a turn's text is a separate message, its opening is repeated.
    for start in range(max(0, len(opening) - len(one)), len(opening)):
        tail = opening[start:]
        if tail in one and tokens.all_in(tail):
            end = one.index(tail) + len(tail)
            return one[:end].strip(), one[end:]
    end = common(one, other) if other else len(one)
    end = end if one[:end].strip() else len(one)
    return one[:end].strip(), one[end:]


def _inserted_after(called: str, plain: str) -> str:
    """Return the end of the reasoning of a turn that only calls, by comparison with the same turn without reasoning."""
    rest = called.partition(_THOUGHT)[2]
    end = len(rest) - common(rest[::-1], plain[::-1], whole=False)
    while 0 < end < len(rest) and rest[end - 1] not in ">]":
        end += 1
    if not rest[:end].strip():  # it stands there without reasoning too
        found = re.match(r"\s*(<[^<>]+>|\[[^\[\]]+\])", rest)
        end = found.end() if found else 0
    return rest[:end].strip()


def _frame_part(text: str, tokens: AddedTokens) -> str:
    return text.strip() if tokens.all_in(text) else ""


def _last_tag(text: str) -> str:
    found = re.search(r"(<[^<>\s]+>\w*|\[[^\[\]\s]+\])\s*\Z", text)
    return found[1] if found else ""


def _read_form(
    candidates: Sequence[_Calls], ends: TurnEnds, reasoning: Reasoning
) -> tuple[ToolCallFormat | None, _Calls | None, bool]:
    """Find the form in which a template writes calls, if it is known, and whether it holds the token that ends them."""
    for one in candidates:
        last = one.turn.rfind(marker(f"value{len(one.calls)}"))
        start, end = ends.find(one.turn[last:])
        if start < 0:
            continue
        for with_end, length in ((False, last + start), (True, last + end)):
            text = one.turn[:length]
            rest = text.partition(reasoning.marks[1])[2] if text.lstrip().startswith(reasoning.marks[0]) else text
            for form in FORMS.values():
                found = form.parse(rest, [marker_tool()])
                if len(found) == len(one.calls) and all(map(_same, found, one.calls)):
                    return form, one, with_end
    return None, None, False


def _described_form(template: ChatTemplate) -> ToolCallFormat | None:
    """Find the form whose mark a template writes in its description of the tools, if it writes no calls."""
    text = template.render_or_not([_PLAIN], [marker_tool()], opened=True)
    return next((form for form in FORMS.values() if _mark(form) and _mark(form) in text), None)


def _mark(form: ToolCallFormat) -> str:
    """Return the beginning of a form's calls, before all JSON."""
    mark = re.split(r"[\[{\n]", form.write(marker("tool"), {}).lstrip())[0]
    return "" if marker("tool") in mark else mark


def _same(found: Any, call: WrittenCall) -> bool:
    return isinstance(found, ToolCall) and (found.name, found.arguments) == (call.name, call.arguments)


def common(text: str, other: str, *, whole: bool = True) -> int:
    """Return the length of two texts' common beginning; words and marks count as wholes: none of `<a>` and `<b>`."""
    pairs = enumerate(zip(text, other, strict=False))
    end = next((i for i, (a, b) in pairs if a != b), min(len(text), len(other)))
    while whole and 0 < end < len(text) and not _divides(text, end):
        end -= 1
    return end


def _divides(text: str, at: int) -> bool:
    return text[at - 1].isspace() or text[at - 1] in ">]" or (text[at - 1].isalnum() and text[at] in "<[ \n")


def _any_of(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
