"""The form of tool calls that tags keys and values, which are not quoted.

    <tool_call>bash
    <arg_key>command</arg_key>
    <arg_value>ls</arg_value>
    </tool_call>

The lines may be missing, and so may the last `</arg_value>`. All tags may end in a suffix, as in
`<tool_call:opensource>`. The tool's schema types the values.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from .call import MarkedFormat, ToolCall, value_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .call import MalformedCall
    from .turn import Turn

_S = r"(?::\w{1,32})?"
_HEADER = re.compile(rf"\s*+([^\s<>{{}}\"]{{1,256}})\s*+(?:<tool_sep{_S}>\s*+)?(?=<)")
_KEY = re.compile(rf"\s*<arg_key{_S}>([^<>]{{1,256}})</arg_key{_S}>\s*<arg_value{_S}>")
_CLOSES = re.compile(rf"\s*</tool_call{_S}>")
_MARKS = re.compile(
    rf"(?P<enters><tool_call{_S}>)"
    rf"|(?P<leaves></tool_call{_S}>)(?P<last>(?=\s*(?:<tool_call{_S}>|</tool_calls{_S}>|\Z)))?"
    rf"|(?P<closed></arg_value{_S}>)(?=\s*(?:<arg_key{_S}>|</tool_call{_S}>|\Z))"
)


class GlmFormat(MarkedFormat):
    """Of GLM 4.5 and later, Laguna, Ling 3 and Hy3."""

    name: ClassVar = "glm"
    example: ClassVar = "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>"
    begins = re.compile(rf"(?:<tool_calls{_S}>\s*)?<tool_call{_S}>")

    def read(self, turn: Turn, found: re.Match[str]) -> tuple[Sequence[ToolCall | MalformedCall], int]:
        """Read a call behind its mark."""
        text = turn.text
        header = _HEADER.match(text, found.end())
        if header is None:
            return [self.malformed(f"no name follows {found[0]}")], found.end()
        name, position = header[1], header.end()
        arguments: dict[str, Any] = {}
        while (key := _KEY.match(text, position)) is not None:
            end = turn.end_of_value(key.end(), _MARKS, lambda mark: bool(mark["closed"] or mark["last"] is not None))
            if end is None:
                return [self.malformed(f"the value of {key[1]} is not closed with </arg_value>", name)], len(text)
            arguments[key[1]] = turn.types.typed(name, key[1], text[key.end() : end.start()])
            position = end.end() if end["closed"] else end.start()
        closed = _CLOSES.match(text, position)
        if closed is None:
            return [self.malformed("it is not closed with </tool_call>", name)], position
        return [ToolCall(name, arguments)], closed.end()

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call."""
        written = "".join(
            f"<arg_key>{key}</arg_key><arg_value>{value_text(value)}</arg_value>" for key, value in arguments.items()
        )
        return f"<tool_call>{name}{written}</tool_call>"
