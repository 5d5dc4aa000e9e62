"""What rendering small conversations shows about a chat template. Nothing here knows a model's family.

A template is code of the model's maker: it may refuse roles, leave out what it has no place for, and write reasoning
and tool calls in forms of its own. What it does with each is found once, when it is loaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..errors import ConfigError
from .chat_template import TemplateRefused, marker, marker_tool
from .tool_calls.call import ToolCall
from .tool_calls.foreign import ForeignFormat
from .tool_calls.formats import FORMS, format_named

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .chat_template import ChatTemplate, Message
    from .tool_calls.call import ToolCallFormat

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Marks of reasoning that are tried where a template takes none apart; the first where it drops none either."""
PROBE_ID = "probe0000"
"""Nine letters or digits: some templates refuse others."""

_USER, _SPOKEN, _THOUGHT, _RESULT = (marker(name) for name in ("user", "spoken", "thought", "result"))


class WrittenCall(NamedTuple):
    """A tool call as a template is given it."""

    name: str
    arguments: dict[str, Any]
    call_id: str


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a template does."""

    end_of_turn: str
    """The token that ends a turn of the policy; empty if it writes none."""
    user_header: str
    """What comes before a user's message."""
    takes_system: bool
    """It has a place for a system message."""
    form: ToolCallFormat
    """How the policy writes tool calls."""
    shows_tools: bool
    """It tells of the tools, and of how to call them in this form; otherwise a message has to."""
    writes_calls: bool
    """It writes the calls of earlier turns, in this form; otherwise they stay in the turn's text."""
    arguments_as_text: bool
    """It wants a call's arguments as JSON text."""
    takes_results: bool
    """It has a place for tools' answers; otherwise they are one message of the user."""
    takes_reasoning: bool
    """It takes a turn's reasoning apart from its text."""
    reasoning_marks: tuple[str, str]
    """What stands before and after reasoning."""
    opens_reasoning: bool
    """What opens a turn opens its reasoning too."""

    def turn(self, content: str, reasoning: str | None, calls: Sequence[WrittenCall]) -> Message:
        """Return a turn of the policy as a message."""
        message: Message = {"role": "assistant", "content": content}
        if reasoning is not None and self.takes_reasoning:
            message["reasoning_content"] = reasoning
        elif reasoning is not None:
            before, after = self.reasoning_marks
            message["content"] = f"{before}\n{reasoning}\n{after}\n\n{content}"
        if calls:
            message["tool_calls"] = [_call_entry(call, self.arguments_as_text) for call in calls]
        return message

    def results(self, contents: Sequence[str], calls: Sequence[WrittenCall]) -> list[Message]:
        """Return tools' answers as messages."""
        if not self.takes_results:
            return [{"role": "user", "content": "\n\n".join(contents)}] if contents else []
        return [
            {"role": "tool", "name": call.name, "tool_call_id": call.call_id, "content": content}
            for content, call in zip(contents, calls, strict=True)
        ]

    def split(self, text: str) -> tuple[str | None, str]:
        """Return a turn's reasoning, None if it has none, and what follows it; linear in the text.

        Reasoning stands at a turn's beginning: a mark further on is something that the policy writes about.
        """
        if (parts := self.form.split(text)) is not None:
            return parts
        before, after = self.reasoning_marks
        begun = text.lstrip()
        if begun.startswith(before):
            text = begun[len(before) :]
        elif not self.opens_reasoning:
            return None, text
        reasoning, closed, rest = text.partition(after)
        if not closed:  # the first call ends it
            reasoning = self.form.before_calls(text)
            rest = text[len(reasoning) :]
        return reasoning, rest


def find_traits(
    template: ChatTemplate, added_tokens: Iterable[tuple[str, bool]], wanted_form: str, *, foreign: bool = False
) -> TemplateTraits:
    """Find out what a template does.

    Args:
        template: what is looked at.
        added_tokens: of its tokenizer, each with whether it is special.
        wanted_form: of tool calls; empty: as the template writes them.
        foreign: something else reads calls, so that a form that we do not know is taken as the template writes it.

    Raises:
        ConfigError: it cannot hold a plain conversation.
    """
    user, spoken = {"role": "user", "content": _USER}, {"role": "assistant", "content": _SPOKEN}
    try:
        opening, history = template.render([user], opened=True), template.render([user, spoken])
    except TemplateRefused as error:
        raise ConfigError(f"the chat template fails on a plain conversation: {error}", key="chat.template") from error
    if _USER not in opening or _SPOKEN not in history:
        message = "the chat template leaves out what was said in a plain conversation; is it one for text?"
        raise ConfigError(message, key="chat.template")
    end_of_turn = _first_token(history.rpartition(_SPOKEN)[2], added_tokens)
    older = template.render_or_not([user, spoken, {"role": "user", "content": _RESULT}])
    system = template.render_or_not([{"role": "system", "content": _RESULT}, user])
    tools = [marker_tool()] if marker("tool") in template.render_or_not([user], [marker_tool()]) else []
    written, as_text = _written_call(template, user, tools, end_of_turn, foreign=foreign)
    form = FORMS[wanted_form] if wanted_form else written or format_named("fenced")
    writes_calls = written is not None and written.name == form.name
    answered = template.render_or_not([user, spoken, {"role": "tool", "name": "t", "content": _RESULT}])
    takes_reasoning, marks = _reasoning(template, user, older)
    return TemplateTraits(
        end_of_turn=end_of_turn,
        user_header=older.rpartition(_SPOKEN)[2].partition(end_of_turn or _RESULT)[2].partition(_RESULT)[0].lstrip(),
        takes_system=_RESULT in system,
        form=form,
        # Where the template writes no calls at all, whoever names a form is trusted that the tools are told in it.
        shows_tools=bool(tools) and (writes_calls or (written is None and bool(wanted_form))),
        writes_calls=writes_calls,
        arguments_as_text=as_text,
        takes_results=writes_calls or _RESULT in answered,
        takes_reasoning=takes_reasoning,
        reasoning_marks=marks,
        opens_reasoning=opening.rstrip().endswith(marks[0]),
    )


def _first_token(text: str, added_tokens: Iterable[tuple[str, bool]]) -> str:
    """Return the first special token in a text, or else the first other added one; empty if there is none."""
    added = [(token, special) for token, special in added_tokens if token.strip()]
    for wanted in (True, False):
        texts = sorted((token for token, special in added if special == wanted), key=len, reverse=True)
        if texts and (found := re.search("|".join(map(re.escape, texts)), text)):
            return found[0]
    return ""


def _written_call(
    template: ChatTemplate, user: Message, tools: Sequence[Any], end_of_turn: str, *, foreign: bool
) -> tuple[ToolCallFormat | None, bool]:
    """Find the form in which a template writes calls, None if in none that we read; and how it wants arguments."""
    call = WrittenCall(marker("tool"), {marker("key"): marker("value")}, PROBE_ID)
    answer = {"role": "tool", "name": call.name, "tool_call_id": PROBE_ID, "content": _RESULT}
    opening = template.render_or_not([user], tools, opened=True)
    unknown: list[bool] = []
    for as_text in (False, True):
        turn = {"role": "assistant", "content": "", "tool_calls": [_call_entry(call, as_text)]}
        text = template.render_or_not([user, turn, answer], tools)
        start = _common(text, opening)
        end = text.find(end_of_turn, start) if end_of_turn else -1
        if 0 <= end < text.find(_RESULT):
            for form in FORMS.values():
                found = form.parse(text[start:end])
                if len(found) == 1 and _same(found[0], call):
                    return form, as_text
            if all(part in text[start:end] for part in (marker("tool"), marker("key"), marker("value"))):
                unknown.append(as_text)
    return (ForeignFormat(), unknown[0]) if foreign and tools and unknown else (None, False)


def _common(text: str, other: str) -> int:
    """Return how many characters two texts begin with in common, words and marks as wholes: none of `<a>` and `<b>`."""
    pairs = enumerate(zip(text, other, strict=False))
    end = next((i for i, (a, b) in pairs if a != b), min(len(text), len(other)))
    while 0 < end < len(text) and not (text[end - 1].isspace() or text[end - 1] in ">]"):
        end -= 1
    return end


def _same(found: Any, call: WrittenCall) -> bool:
    return isinstance(found, ToolCall) and (found.name, found.arguments) == (call.name, call.arguments)


def _reasoning(template: ChatTemplate, user: Message, older: str) -> tuple[bool, tuple[str, str]]:
    """Find whether a template takes reasoning apart from text, and its marks."""
    text = template.render_or_not([user, {"role": "assistant", "content": _SPOKEN, "reasoning_content": _THOUGHT}])
    if _THOUGHT in text:
        start = _common(text, older.partition(_SPOKEN)[0])
        before = text[start : text.index(_THOUGHT)].strip()
        after = text.partition(_THOUGHT)[2].partition(_SPOKEN)[0].strip()
        return True, (before, after) if before and after else MARKS[0]
    for before, after in MARKS:
        spoken = {"role": "assistant", "content": f"{before}\n{_THOUGHT}\n{after}\n\n{_SPOKEN}"}
        text = template.render_or_not([user, spoken, user])
        if _SPOKEN in text and _THOUGHT not in text:
            return False, (before, after)
    return False, MARKS[0]


def _call_entry(call: WrittenCall, arguments_as_text: bool) -> dict[str, Any]:
    arguments: Any = msgspec.json.encode(call.arguments).decode() if arguments_as_text else call.arguments
    return {"type": "function", "id": call.call_id, "function": {"name": call.name, "arguments": arguments}}
