"""Forms of tool calls that name each parameter in an attribute, with a value that is not quoted.

    <minimax:tool_call>
    <invoke name="bash">
    <parameter name="command">ls</parameter>
    </invoke>
    </minimax:tool_call>

An attribute `string="true"` or `string="false"` says whether a value is text or JSON; otherwise the tool's schema does.
The marks around the calls may be missing.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from .call import MarkedFormat, ToolCall, read_json_at, value_text
from .messages import TurnMessage, said_before_calls, without_thoughts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .call import MalformedCall
    from .messages import Kind
    from .turn import Turn

_CDATA, _CDATA_END = "<![CDATA[", "]]>"


class InvokeFormat(MarkedFormat):
    """Named parameters.

    The class's parameters:
        name: of the form.
        tags: of a call and of a parameter, as regular expressions.
        around: the tag around the calls of a turn, as a regular expression; empty if there is none.
        written: the call, the parameter and the tag around them, as they are written; the parameter ends in what
            follows its name.
    """

    tags: ClassVar[tuple[str, str]]
    written: ClassVar[tuple[str, str, str]]
    opened: ClassVar[re.Pattern[str]]
    parameter: ClassVar[re.Pattern[str]]
    closes: ClassVar[re.Pattern[str]]
    marks: ClassVar[re.Pattern[str]]
    says_strings: ClassVar[bool]

    def __init_subclass__(
        cls, *, name: str, tags: tuple[str, str], around: str, written: tuple[str, str, str], says_strings: bool = False
    ) -> None:
        cls.name, cls.tags, cls.written, cls.says_strings = name, tags, written, says_strings
        call, parameter = tags
        attribute = r'\s+name="([^"<>\n]{1,256})"'
        cls.opened = re.compile(rf"\s*<{call}{attribute}\s*(/?)>")
        cls.parameter = re.compile(rf'\s*<{parameter}{attribute}(?:\s+string="(true|false)")?\s*>')
        cls.begins = re.compile(
            (f"<(?:{around})>|" if around else "") + rf'<{call}(?=\s+name="[^"<>\n]{{1,256}}"\s*/?>)'
        )
        cls.closes = re.compile(rf"\s*</{call}>" + (rf"(?:\s*</(?:{around})>)?" if around else ""))
        follows = rf"\s*(?:</?(?:{around})>|<{call}\s|\Z)" if around else ""
        cls.marks = re.compile(
            rf'(?P<enters><{call}\s+name="[^"<>\n]{{1,256}}"\s*>)'
            rf"|(?P<leaves></{call}>)(?P<last>(?={follows or chr(92) + 'Z'}))?"
            rf"|(?P<closed></{parameter}>)(?=\s*(?:<{parameter}\s|</{call}>{follows}|\Z))"
        )
        cls.example = cls._written("NAME", {"PARAMETER": "VALUE"})

    def read(self, turn: Turn, found: re.Match[str]) -> tuple[Sequence[ToolCall | MalformedCall], int]:
        """Read a call behind its mark."""
        text = turn.text
        opened = self.opened.match(text, found.end() if found[0].endswith(">") else found.start())
        if opened is None:
            return [self.malformed(f"no call follows {found[0]}")], found.end()
        name, position = opened[1], opened.end()
        arguments: dict[str, Any] = {}
        while not opened[2] and (parameter := self.parameter.match(text, position)) is not None:
            key, start = parameter[1], parameter.end()
            quoted = text.startswith(_CDATA, start)
            end = turn.end_of_value(start, self.marks, partial(_ends, text, quoted))
            if end is None:
                return [self.malformed(f"parameter {key} is not closed", name)], len(text)
            value = text[start : end.start()]
            value = value[len(_CDATA) : -len(_CDATA_END)] if quoted else value
            arguments[key] = self._typed(turn, name, key, value, parameter[2])
            position = end.end() if end["closed"] else end.start()
        closed = self.closes.match(text, position)
        if closed is None and not opened[2]:
            return [self.malformed("it is not closed", name)], position
        return [ToolCall(name, arguments)], position if closed is None else closed.end()

    def _typed(self, turn: Turn, name: str, key: str, value: str, string: str | None) -> Any:
        if string == "true":
            return value
        if string == "false":
            try:
                read, end = read_json_at(value, len(value) - len(value.lstrip()))
                return value if value[end:].strip() else read
            except ValueError:
                pass
        return turn.types.typed(name, key, value)

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call."""
        return self._written(name, arguments)

    @classmethod
    def _written(cls, name: str, arguments: dict[str, Any]) -> str:
        call, parameter, around = cls.written
        lines = []
        for key, value in arguments.items():
            string = f' string="{str(isinstance(value, str)).lower()}"' if cls.says_strings else ""
            lines.append(f'<{parameter} name="{key}"{string}>{value_text(value)}</{parameter}>\n')
        content = f'<{call} name="{name}">\n{"".join(lines)}</{call}>'
        return f"<{around}>\n{content}\n</{around}>" if around else content


def _ends(text: str, quoted: bool, mark: re.Match[str]) -> bool:
    closes = bool(mark["closed"]) or mark["last"] is not None
    return closes and (not quoted or text.endswith(_CDATA_END, 0, mark.start()))


class MiniMaxFormat(
    InvokeFormat,
    name="minimax_m2",
    tags=("invoke", "parameter"),
    around="minimax:tool_call",
    written=("invoke", "parameter", "minimax:tool_call"),
):
    """Of MiniMax M2."""


class DsmlFormat(
    InvokeFormat,
    name="dsml",
    tags=("｜DSML｜ ?invoke", "｜DSML｜ ?parameter"),
    around="｜DSML｜ ?(?:function_calls|tool_calls|calls)",
    written=("｜DSML｜invoke", "｜DSML｜parameter", "｜DSML｜tool_calls"),
    says_strings=True,
):
    """Of DeepSeek V3.2, V4 and V4.1."""


class MuseFormat(
    InvokeFormat,
    name="muse",
    tags=("atem:invoke", "atem:parameter"),
    around="atem:function_calls",
    written=("atem:invoke", "atem:parameter", "atem:function_calls"),
):
    """Of Muse Glimmer, whose turns are messages: `to=self` is reasoning, `to=user` is said."""

    def before_calls(self, text: str) -> str:
        """Return what a turn says before its first call, without its frames."""
        before = super().before_calls(text)
        return said_before_calls(before, _messages(before))

    def split(self, text: str) -> tuple[str | None, str] | None:
        """Return the messages to itself, and the others."""
        return without_thoughts(text, _messages(text))


_MESSAGE = re.compile(
    r"(?:<\|start\|>assistant)? to=([^\s<]{1,256})<\|message\|>(.*?)(?:<\|eom\|>|<\|eot\|>|\Z)", re.DOTALL
)
_KINDS: dict[str, Kind] = {"self": "thought", "user": "said"}


def _messages(text: str) -> Iterator[TurnMessage]:
    for found in _MESSAGE.finditer(text):
        yield TurnMessage(_KINDS.get(found[1], "call"), found.start(), found.end(), found[2], found[1])


class MiniCpmFormat(
    InvokeFormat, name="minicpm5", tags=("function", "param"), around="", written=("function", "param", "")
):
    """Of MiniCPM 5; a value may stand in a CDATA section."""
