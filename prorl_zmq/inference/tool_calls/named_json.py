"""Forms of tool calls that write a name between marks, and behind it the arguments as JSON.

    <|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>{"command": "ls"}<|tool_call_end|>

The JSON is decoded where it begins, so that a mark within a string belongs to the string. What closes a call may be
missing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from .call import NAME, MarkedFormat, ToolCall, json_text, read_arguments, read_json_at
from .marked_json import read_calls
from .messages import TurnMessage, said_before_calls, without_thoughts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .call import MalformedCall
    from .messages import Kind
    from .turn import Turn


class NamedJsonFormat(MarkedFormat):
    """A name and arguments.

    The class's parameters:
        name: of the form.
        section: what stands before the calls of a turn; a turn with it and without a call is malformed.
        begins: what begins a call.
        header: what follows that, up to the arguments, as a regular expression with a group `name`, and `id` if it has.
        written: a call, with `NAME` and `ARGUMENTS` in their places.
    """

    section: ClassVar[str]
    header: ClassVar[re.Pattern[str]]
    written: ClassVar[str]

    def __init_subclass__(cls, *, name: str, section: str = "", begins: str, header: str, written: str) -> None:
        cls.name, cls.section, cls.written = name, section, written
        cls.begins = re.compile(re.escape(begins))
        cls.header = re.compile(header)
        cls.example = written.replace("ARGUMENTS", "{…}")

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> list[ToolCall | MalformedCall]:
        """Return the tool calls of one turn, in order. Never raises."""
        calls = super().parse(text, tools)
        if not calls and self.section and self.section in text:
            return [self.malformed(f"no call follows {self.section}")]
        return calls

    def before_calls(self, text: str) -> str:
        """Return what a turn says before its first call."""
        before = super().before_calls(text)
        return before.partition(self.section)[0] if self.section else before

    def read(self, turn: Turn, found: re.Match[str]) -> tuple[Sequence[ToolCall | MalformedCall], int]:
        """Read the name and the arguments behind a mark."""
        text = turn.text
        header = self.header.match(text, found.end())
        if header is None:
            return [self.malformed(f"no name and arguments follow {found[0]}")], found.end()
        groups = header.groupdict()
        try:
            arguments, end = read_json_at(text, header.end())
            return [ToolCall(header["name"], read_arguments(arguments), groups.get("id") or "")], end
        except ValueError as error:
            written = text[header.end() :].strip()
            return [self.malformed(str(error), header["name"], written)], len(text)

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call."""
        return self.written.replace("NAME", name, 1).replace("ARGUMENTS", json_text(arguments), 1)


class MistralFormat(
    NamedJsonFormat,
    name="mistral",
    begins="[TOOL_CALLS]",
    header=rf"\s*(?P<name>{NAME})(?:\[CALL_ID\](?P<id>\w{{1,64}}))?(?:\[ARGS\])?\s*(?=\{{)",
    written="[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
):
    """Of Mistral's models; those up to Nemo write a list of objects."""

    def read(self, turn: Turn, found: re.Match[str]) -> tuple[Sequence[ToolCall | MalformedCall], int]:
        """Read a list of calls, or one with its name."""
        if turn.text[found.end() : found.end() + 64].lstrip().startswith("["):
            return read_calls(self, turn.text, found.end())
        return super().read(turn, found)


class KimiFormat(
    NamedJsonFormat,
    name="kimi_k2",
    section="<|tool_calls_section_begin|>",
    begins="<|tool_call_begin|>",
    header=r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<:]{1,256})(?::\d{1,9})?)\s*<\|tool_call_argument_begin\|>\s*",
    written="<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS"
    "<|tool_call_end|><|tool_calls_section_end|>",
):
    """Of Kimi K2, K2 Thinking and K2.5; a call's id is kept, since tools' answers name it."""


class DeepSeekFormat(
    NamedJsonFormat,
    name="deepseek_v3",
    section="<｜tool▁calls▁begin｜>",
    begins="<｜tool▁call▁begin｜>",
    header=rf"function<｜tool▁sep｜>\s*(?P<name>{NAME})\s*```json\s*",
    written="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
):
    """Of DeepSeek V3 and R1."""


class DeepSeek31Format(
    NamedJsonFormat,
    name="deepseek_v31",
    section="<｜tool▁calls▁begin｜>",
    begins="<｜tool▁call▁begin｜>",
    header=rf"\s*(?P<name>{NAME})\s*<｜tool▁sep｜>\s*",
    written="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
):
    """Of DeepSeek V3.1."""


class SolarFormat(
    NamedJsonFormat,
    name="solar_open",
    section="<|tool_calls|>",
    begins="<|tool_call:begin|>",
    header=rf"(?P<id>[^\s<|]{{1,256}})?\s*<\|tool_call:name\|>\s*(?P<name>{NAME})\s*<\|tool_call:args\|>\s*",
    written="<|tool_calls|><|tool_call:begin|>call0<|tool_call:name|>NAME<|tool_call:args|>ARGUMENTS<|tool_call:end|>"
    "<|calls|>",
):
    """Of Solar Open, whose turns are messages."""

    def before_calls(self, text: str) -> str:
        """Return what a turn says before its first call, without its frames."""
        before = super().before_calls(text)
        return said_before_calls(before, _messages(before))

    def split(self, text: str) -> tuple[str | None, str] | None:
        """Return the messages of reasoning, and the others."""
        return without_thoughts(text, _messages(text))


_MESSAGE = re.compile(
    r"(?:<\|begin\|>assistant)?<\|(think|content|tool_calls)\|>(.*?)(?:<\|(?:end|calls|flush)\|>|\Z)", re.DOTALL
)
_KINDS: dict[str, Kind] = {"think": "thought", "content": "said", "tool_calls": "call"}


def _messages(text: str) -> Iterator[TurnMessage]:
    for found in _MESSAGE.finditer(text):
        yield TurnMessage(_KINDS[found[1]], found.start(), found.end(), found[2])
