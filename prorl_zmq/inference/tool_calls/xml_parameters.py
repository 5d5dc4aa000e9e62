"""Forms of tool calls that tag each parameter, with a value that is not quoted.

    <tool_call>
    <function=bash>
    <parameter=command>
    ls
    </parameter>
    </function>
    </tool_call>

The tool's schema types the values. The marks around the function, and the one that closes a parameter, may be missing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from .call import MarkedFormat, ToolCall, value_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .call import MalformedCall
    from .turn import Turn

_FUNCTION = re.compile(r"\s*<function=([^<>\n]{1,256})>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,256})>")


class XmlParametersFormat(MarkedFormat):
    """Tagged parameters.

    The class's parameters:
        name: of the form.
        tag: around a call.
        lines: a value stands on lines of its own.
    """

    tag: ClassVar[str]
    lines: ClassVar[bool]
    marks: ClassVar[re.Pattern[str]]
    closes: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls, *, name: str, tag: str, lines: bool) -> None:
        cls.name, cls.tag, cls.lines = name, tag, lines
        cls.example = cls._written("NAME", {"PARAMETER": "VALUE"})
        cls.begins = re.compile(rf"<{tag}>|^<function=(?=[^<>\n]{{1,256}}>)", re.MULTILINE)
        cls.closes = re.compile(rf"\s*(?:</function>(?:\s*</{tag}>)?|</{tag}>)")
        follows = rf"\s*(?:</?{tag}>|<function=|\Z)"
        cls.marks = re.compile(
            r"(?P<enters>(?<=\n)<function=[^<>\n]{1,256}>)"
            rf"|(?P<leaves></function>)(?P<last>(?=\s*</{tag}>{follows}))?"
            rf"|(?P<closed></parameter>)(?=\s*(?:<parameter=|</function>{follows}|</{tag}>|\Z))"
            r"|(?<=\n)<parameter=(?P<next>[^<>\n]{1,256})>"
        )

    def read(self, turn: Turn, found: re.Match[str]) -> tuple[Sequence[ToolCall | MalformedCall], int]:
        """Read a call behind its mark."""
        text = turn.text
        function = _FUNCTION.match(text, found.end() if found[0].endswith(">") else found.start())
        if function is None:
            return [self.malformed(f"<function=NAME> does not follow {found[0]}")], found.end()
        name, position = function[1].strip(), function.end()
        arguments: dict[str, Any] = {}

        def ends(mark: re.Match[str]) -> bool:
            new = mark["next"] is not None and mark["next"] not in arguments and mark["next"] != key
            return bool(mark["closed"] or mark["last"] is not None or (new and mark["next"] in (keys or ())))

        keys = turn.types.keys(name)
        while (parameter := _PARAMETER.match(text, position)) is not None:
            key, start = parameter[1], parameter.end()
            end = turn.end_of_value(start, self.marks, ends)
            if end is None:
                return [self.malformed(f"parameter {key} is not closed with </parameter>", name)], len(text)
            arguments[key] = turn.types.typed(name, key, self._value(text[start : end.start()]))
            position = end.end() if end["closed"] else end.start()
        closed = self.closes.match(text, position)
        if closed is None:
            return [self.malformed("it is not closed with </function>", name)], position
        return [ToolCall(name, arguments)], closed.end()

    def _value(self, written: str) -> str:
        if self.lines and written.startswith("\n"):
            return written[1:].removesuffix("\n")
        return written

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call."""
        return self._written(name, arguments)

    @classmethod
    def _written(cls, name: str, arguments: dict[str, Any]) -> str:
        line = "\n" * cls.lines
        parameters = "".join(
            f"<parameter={key}>{line}{value_text(value)}{line}</parameter>\n" for key, value in arguments.items()
        )
        return f"<{cls.tag}>\n<function={name}>\n{parameters}</function>\n</{cls.tag}>"


class QwenCoderFormat(XmlParametersFormat, name="qwen3_coder", tag="tool_call", lines=True):
    """Of Qwen3-Coder, Qwen 3.5 and later, Nemotron 3 and Step 3.5."""


class SeedFormat(XmlParametersFormat, name="seed_oss", tag="seed:tool_call", lines=False):
    """Of Seed-OSS."""
