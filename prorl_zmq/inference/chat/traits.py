"""How a chat template writes turns of the policy, tools' answers and reasoning; found by `probes`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..tool_calls.call import MalformedCall, ToolCall, ToolCallFormat
    from .template import Message

BLOCKS = "content blocks"
"""The reasoning key of templates that take reasoning as a block of the content."""
FALLBACK = (
    "the template writes tool calls in a form that is not read here; the model is asked for fenced blocks instead, "
    "which it may not write. Set tool_calls if one of the forms fits, or parser_url for harnesses"
)
UNSHOWN = (
    "the template writes no tool calls; the model is asked for fenced blocks, which it may not write. Set tool_calls "
    "if the model was trained on one of the forms"
)
_SHORT_ID = re.compile(r"[0-9A-Za-z]{9}")
"""A call id that all templates accept."""
_NAMED_ID = re.compile(r"functions\.[\w.:-]{1,256}:\d{1,6}")
"""A call id that names the tool."""


class WrittenCall(NamedTuple):
    """A tool call as a template gets it."""

    name: str
    arguments: dict[str, Any]
    call_id: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How a template writes reasoning."""

    key: str = ""
    """The key of reasoning in a turn's message; empty: the template does not separate it from the text."""
    marks: tuple[str, str] = ("<think>", "</think>")
    opened: bool = False
    """Whether the opening of a turn opens its reasoning too."""


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """The ends of turns in rendered text."""

    texts: tuple[str, ...] = ()
    """Tokens; the first of them after a turn ends it."""
    opening_next: frozenset[str] = frozenset()
    """Those that belong to the following message: the template writes them there, whatever ended the turn."""

    def find(self, text: str) -> tuple[int, int]:
        """Return where the first token that ends a turn begins and ends; (-1, -1) if there is none."""
        if not self.texts:
            return 0, 0
        found = re.search("|".join(map(re.escape, self.texts)), text)
        return found.span() if found else (-1, -1)


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    ends: TurnEnds
    user_header: str
    """The text before a user's message."""
    takes_system: bool
    """It has a place for a system message."""
    form: ToolCallFormat
    """How the policy writes tool calls."""
    shows_tools: bool
    """Whether it describes the tools, and how to call them in this form; otherwise a message has to."""
    writes_calls: bool
    """Whether it writes the calls of earlier turns in this form; otherwise they stay in the turn's text."""
    unread_calls: bool
    """Whether it writes calls in an unknown form."""
    unread_marks: tuple[str, ...]
    """The tokens of that form: a turn that holds one calls a tool, or tries to."""
    arguments_as_text: bool
    """Whether it needs a call's arguments as JSON text."""
    silent: str | None
    """The content of a turn that only calls tools."""
    end_is_read: bool
    """Whether the token that ends a turn with calls is part of their form."""
    named_ids: bool
    """Whether a call's id names its tool and identifies the tool's answer."""
    counts_calls: bool
    """Whether its text around tools' answers depends on the number of calls in earlier turns."""
    takes_results: bool
    """Whether it has a place for tools' answers; otherwise they are one message of the user."""
    reasoning: Reasoning
    frame: tuple[str, str]
    """The template's text before and after a turn's text, such as the name of a channel."""

    @property
    def warning(self) -> str:
        """A limitation that users must know before they train with this form; empty: none."""
        if self.form.name != "fenced":
            return ""
        return FALLBACK if self.unread_calls else UNSHOWN

    def turn(self, content: str, reasoning: str | None, calls: Sequence[WrittenCall]) -> Message:
        """Return a turn of the policy as a message."""
        message: Message = {"role": "assistant", "content": content}
        if calls and not content:
            message["content"] = self.silent
        key = self.reasoning.key
        if reasoning is not None and key == BLOCKS:
            said = [{"type": "text", "text": content}] if content else []
            message["content"] = [{"type": "thinking", "thinking": reasoning}, *said]
        elif reasoning is not None and key:
            message[key] = reasoning
        elif reasoning is not None:
            before, after = self.reasoning.marks
            message["content"] = f"{before}\n{reasoning}\n{after}\n\n{content}"
        if calls:
            message["tool_calls"] = [call_entry(call, self.arguments_as_text) for call in calls]
        return message

    def results(self, contents: Sequence[str], calls: Sequence[WrittenCall]) -> list[Message]:
        """Return tools' answers as messages."""
        if not self.takes_results:
            return [{"role": "user", "content": "\n\n".join(contents)}] if contents else []
        return [
            {"role": "tool", "name": call.name, "tool_call_id": call.call_id, "content": content}
            for content, call in zip(contents, calls, strict=True)
        ]

    def call_id(self, number: int, name: str, own: str = "") -> str:
        """Return an id of a call that the template accepts: the policy's own, or else a generated one.

        Args:
            number: of the call in its conversation, from 1.
            name: of the tool.
            own: the policy's id.
        """
        if self.named_ids:
            return own if _NAMED_ID.fullmatch(own) else f"functions.{name}:{number - 1}"
        return own if _SHORT_ID.fullmatch(own) else f"call{number % 100_000:05d}"

    def split(self, text: str) -> tuple[str | None, str]:
        """Return a turn's reasoning (None: none) and the rest; linear in the text.

        Reasoning stands at a turn's beginning: a later mark is part of the policy's text.
        """
        if (parts := self.form.split(text)) is not None:
            return parts
        before, after = self.reasoning.marks
        begun = text.lstrip()
        if before and begun.startswith(before):
            text = begun[len(before) :]
        elif not self.reasoning.opened:
            return None, text
        reasoning, closed, rest = text.partition(after)
        if not closed:  # the first call ends it
            reasoning = self.form.before_calls(text)
            rest = text[len(reasoning) :]
        return reasoning, rest

    def calls(self, text: str, end: str, tools: Sequence[dict[str, Any]]) -> list[ToolCall | MalformedCall]:
        """Return the tool calls in the rest of a turn after its reasoning; `end` is the token that ended the turn."""
        calls = self.form.parse(text + end if self.end_is_read else text, tools)
        mark = next((mark for mark in self.unread_marks if mark in text), None) if not calls else None
        return [self.form.malformed(f"what {mark} begins is not read here")] if mark else calls

    def said(self, text: str) -> str:
        """Return a turn's text up to its calls, without the template's frame, given the rest after its reasoning."""
        before, after = self.frame
        begun = text.lstrip()
        if before and begun.startswith(before):
            text = begun[len(before) :]
        return text.partition(after)[0] if after else text

    def before_calls(self, text: str) -> str:
        """Return the text of a turn before its first call, given the rest after its reasoning."""
        return self.said(self.form.before_calls(text))


def call_entry(call: WrittenCall, arguments_as_text: bool) -> dict[str, Any]:
    """Return a call as part of a message."""
    arguments: Any = msgspec.json.encode(call.arguments).decode() if arguments_as_text else call.arguments
    return {"type": "function", "id": call.call_id, "function": {"name": call.name, "arguments": arguments}}


def text_of(message: Message) -> str:
    """Return the text of a message, with its reasoning where that is part of its content."""
    content = message["content"]
    if isinstance(content, list):
        return "\n\n".join(block.get("text") or block.get("thinking") or "" for block in content)
    return content or ""
