"""Forms of tool calls that tag each argument, with a value that is not quoted.

    <tool_call>                                         of `XmlParametersFormat`
    <function=bash>
    <parameter=command>
    ls
    </parameter>
    </function>
    </tool_call>

    <minimax:tool_call>                                 of `InvokeFormat`
    <invoke name="bash">
    <parameter name="command">ls</parameter>
    </invoke>
    </minimax:tool_call>

    <tool_call>bash                                     of `GlmFormat`
    <arg_key>command</arg_key>
    <arg_value>ls</arg_value>
    </tool_call>

    <|open|>tools<|sep|><|open|>call tool="bash" index="1"<|sep|>           of `KimiK3Format`, on one line
    <|open|>argument key="command" type="string"<|sep|>ls<|close|>argument<|sep|><|close|>call<|sep|>
    <|close|>tools<|sep|>

The tool's schema types the values, unless an attribute does. The marks around the calls, and the last one that closes a
value, may be missing.
"""

from __future__ import annotations

import html
import re
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from .argument_types import kind_of, typed
from .call import MarkedFormat, ToolCall, read_json_at, value_text
from .messages import TurnMessage, said_before_calls, without_thoughts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .call import MalformedCall
    from .messages import Kind
    from .turn import Turn


class TaggedFormat(MarkedFormat):
    """Reads a call's header, its arguments, and what closes it, one behind the other."""

    header: ClassVar[re.Pattern[str]]
    """Begins a call; group 1 is its name. It is matched at a mark, or behind one that ends in `>`."""
    argument: ClassVar[re.Pattern[str]]
    """Begins an argument; group 1 is its key."""
    closes: ClassVar[re.Pattern[str]]
    """Behind the last argument."""
    marks: ClassVar[re.Pattern[str]]
    """See `Turn.end_of_value`; its group `closed` is of a mark that belongs to the value that it ends."""
    problems: ClassVar[tuple[str, str, str]]
    """In errors: that no header follows a mark, that a key's value is not closed, and that the call is not."""

    def read(self, turn: Turn, found: re.Match[str]) -> tuple[Sequence[ToolCall | MalformedCall], int]:
        """Read a call at its mark."""
        text = turn.text
        header = self.header.match(text, found.end() if found[0].endswith(">") else found.start())
        if header is None:
            return [self.malformed(self.problems[0].format(found[0]))], found.end()
        name, position = self.text_of(header[1]).strip(), header.end()
        arguments: dict[str, Any] = {}
        alone = self.has_no_arguments(header)
        while not alone and (argument := self.argument.match(text, position)) is not None:
            key, start = self.text_of(argument[1]), argument.end()
            end = turn.end_of_value(start, self.marks, partial(self.ends, turn, name, argument, arguments))
            if end is None:
                return [self.malformed(self.problems[1].format(key), name)], len(text)
            arguments[key] = self.value(turn, name, argument, text[start : end.start()])
            position = end.end() if end["closed"] else end.start()
        closed = self.closes.match(text, position)
        if closed is None and not alone:
            return [self.malformed(self.problems[2], name)], position
        return [ToolCall(name, arguments)], position if closed is None else closed.end()

    def has_no_arguments(self, header: re.Match[str]) -> bool:  # noqa: ARG002 - of one form
        """Return whether the header is the whole call."""
        return False

    def text_of(self, written: str) -> str:
        """Return a name or a key."""
        return written

    def ends(
        self,
        turn: Turn,  # noqa: ARG002 - for forms that need it
        name: str,  # noqa: ARG002
        argument: re.Match[str],  # noqa: ARG002
        arguments: Mapping[str, Any],  # noqa: ARG002
        mark: re.Match[str],
    ) -> bool:
        """Return whether a mark ends the value of an argument; `arguments` are those before it."""
        return bool(mark["closed"]) or mark["last"] is not None

    def value(self, turn: Turn, name: str, argument: re.Match[str], text: str) -> Any:
        """Return the value of an argument."""
        return turn.types.typed(name, argument[1], text)


class XmlParametersFormat(TaggedFormat):
    """Parameters of a function.

    The class's parameters:
        name: of the form.
        tag: around a call.
        lines: a value stands on lines of its own.
    """

    header = re.compile(r"\s*<function=([^<>\n]{1,256})>")
    argument = re.compile(r"\s*<parameter=([^<>\n]{1,256})>")
    problems: ClassVar = (
        "<function=NAME> does not follow {}",
        "parameter {} is not closed with </parameter>",
        "it is not closed with </function>",
    )
    tag: ClassVar[str]
    lines: ClassVar[bool]

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

    def ends(
        self, turn: Turn, name: str, argument: re.Match[str], arguments: Mapping[str, Any], mark: re.Match[str]
    ) -> bool:
        """Return whether a mark ends the value; the next parameter does too, if the tool has one of that name."""
        key = mark["next"]
        new = key is not None and key not in arguments and key != argument[1]
        return super().ends(turn, name, argument, arguments, mark) or (new and key in (turn.types.keys(name) or ()))

    def value(self, turn: Turn, name: str, argument: re.Match[str], text: str) -> Any:
        """Return the value of a parameter."""
        lines = self.lines and text.startswith("\n")
        return super().value(turn, name, argument, text[1:].removesuffix("\n") if lines else text)

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


_CDATA, _CDATA_END = "<![CDATA[", "]]>"


class InvokeFormat(TaggedFormat):
    """Parameters that are named in an attribute.

    An attribute `string="true"` or `string="false"` says whether a value is text or JSON. A value may stand in a CDATA
    section.

    The class's parameters:
        name: of the form.
        tags: of a call and of a parameter, as regular expressions.
        around: the tag around the calls of a turn, as a regular expression; empty if there is none.
        written: the call, the parameter and the tag around them, as they are written; the parameter ends in what
            follows its name.
    """

    problems: ClassVar = ("no call follows {}", "parameter {} is not closed", "it is not closed")
    written: ClassVar[tuple[str, str, str]]
    says_strings: ClassVar[bool]

    def __init_subclass__(
        cls, *, name: str, tags: tuple[str, str], around: str, written: tuple[str, str, str], says_strings: bool = False
    ) -> None:
        cls.name, cls.written, cls.says_strings = name, written, says_strings
        call, parameter = tags
        attribute = r'\s+name="([^"<>\n]{1,256})"'
        cls.header = re.compile(rf"\s*<{call}{attribute}\s*(/?)>")
        cls.argument = re.compile(rf'\s*<{parameter}{attribute}(?:\s+string="(true|false)")?\s*>')
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

    def has_no_arguments(self, header: re.Match[str]) -> bool:
        """Return whether the tag closes itself."""
        return bool(header[2])

    def ends(
        self, turn: Turn, name: str, argument: re.Match[str], arguments: Mapping[str, Any], mark: re.Match[str]
    ) -> bool:
        """Return whether a mark ends the value; within a CDATA section none does."""
        quoted = turn.text.startswith(_CDATA, argument.end())
        closed = not quoted or turn.text.endswith(_CDATA_END, 0, mark.start())
        return closed and super().ends(turn, name, argument, arguments, mark)

    def value(self, turn: Turn, name: str, argument: re.Match[str], text: str) -> Any:
        """Return the value of a parameter, by its attribute or the tool's schema."""
        if text.startswith(_CDATA):
            text = text[len(_CDATA) : -len(_CDATA_END)]
        if argument[2] == "true":
            return text
        if argument[2] == "false":
            try:
                read, end = read_json_at(text, len(text) - len(text.lstrip()))
                return text if text[end:].strip() else read
            except ValueError:
                pass
        return super().value(turn, name, argument, text)

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


class MiniCpmFormat(
    InvokeFormat, name="minicpm5", tags=("function", "param"), around="", written=("function", "param", "")
):
    """Of MiniCPM 5."""


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


_S = r"(?::\w{1,32})?"
"""A suffix that all tags of a turn may have, as in `<tool_call:opensource>`."""


class GlmFormat(TaggedFormat):
    """Of GLM 4.5 and later, Laguna, Ling 3 and Hy3."""

    name: ClassVar = "glm"
    example: ClassVar = "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>"
    problems: ClassVar = (
        "no name follows {}",
        "the value of {} is not closed with </arg_value>",
        "it is not closed with </tool_call>",
    )
    begins = re.compile(rf"(?:<tool_calls{_S}>\s*)?<tool_call{_S}>")
    header = re.compile(rf"\s*+([^\s<>{{}}\"]{{1,256}})\s*+(?:<tool_sep{_S}>\s*+)?(?=<)")
    argument = re.compile(rf"\s*<arg_key{_S}>([^<>]{{1,256}})</arg_key{_S}>\s*<arg_value{_S}>")
    closes = re.compile(rf"\s*</tool_call{_S}>")
    marks = re.compile(
        rf"(?P<enters><tool_call{_S}>)"
        rf"|(?P<leaves></tool_call{_S}>)(?P<last>(?=\s*(?:<tool_call{_S}>|</tool_calls{_S}>|\Z)))?"
        rf"|(?P<closed></arg_value{_S}>)(?=\s*(?:<arg_key{_S}>|</tool_call{_S}>|\Z))"
    )

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call."""
        written = "".join(
            f"<arg_key>{key}</arg_key><arg_value>{value_text(value)}</arg_value>" for key, value in arguments.items()
        )
        return f"<tool_call>{name}{written}</tool_call>"


_OPEN = r'<\|open\|>call tool="([^"<>\n]{1,512})"[^"<>\n]{0,64}(?:"[^"<>\n]{0,64}"[^"<>\n]{0,64})?<\|sep\|>'
_THOUGHT, _THOUGHT_END = "<|open|>think<|sep|>", "<|close|>think<|sep|>"
_SAID, _SAID_END, _TURN_END = "<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"


class KimiK3Format(TaggedFormat):
    """Of Kimi K3: its attributes are escaped as in XML."""

    name: ClassVar = "kimi_k3"
    example: ClassVar = (
        '<|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|><|open|>argument key="KEY" type="string"<|sep|>'
        "VALUE<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
    )
    problems: ClassVar = (
        "no call follows {}",
        "argument {} is not closed",
        "it is not closed with <|close|>call<|sep|>",
    )
    begins = re.compile(r'<\|open\|>tools<\|sep\|>|<\|open\|>call(?= tool=")')
    header = re.compile(r"\s*" + _OPEN)
    argument = re.compile(r'\s*<\|open\|>argument key="([^"<>\n]{1,512})"(?: type="(\w{1,16})")?<\|sep\|>')
    closes = re.compile(r"\s*<\|close\|>call<\|sep\|>(?:\s*<\|close\|>tools<\|sep\|>)?")
    marks = re.compile(
        rf"(?P<enters>{_OPEN})|(?P<leaves><\|close\|>call<\|sep\|>)(?P<last>(?!))?"
        r"|(?P<closed><\|close\|>argument<\|sep\|>)(?=\s*(?:<\|open\|>argument |<\|close\|>call<\|sep\|>|\Z))"
    )

    def text_of(self, written: str) -> str:
        """Return a name or a key."""
        return html.unescape(written)

    def value(self, turn: Turn, name: str, argument: re.Match[str], text: str) -> Any:
        """Return the value of an argument, by its attribute or the tool's schema."""
        kind = argument[2]
        return typed({"type": kind}, text) if kind else turn.types.typed(name, self.text_of(argument[1]), text)

    def before_calls(self, text: str) -> str:
        """Return what a turn says before its first call, without the marks of a response."""
        return super().before_calls(text).removesuffix(_TURN_END).removeprefix(_SAID).removesuffix(_SAID_END)

    def split(self, text: str) -> tuple[str | None, str] | None:
        """Return the reasoning, if it was closed."""
        before, closed, after = text.partition(_THOUGHT_END)
        if closed and _SAID not in before:
            return before.removeprefix(_THOUGHT), after
        return (None, text) if _SAID in text or _SAID_END in text else None

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call."""
        written = "".join(
            f'<|open|>argument key="{html.escape(key)}" type="{kind_of(value)}"<|sep|>{value_text(value)}'
            "<|close|>argument<|sep|>"
            for key, value in arguments.items()
        )
        call = f'<|open|>call tool="{html.escape(name)}" index="1"<|sep|>{written}<|close|>call<|sep|>'
        return f"<|open|>tools<|sep|>{call}<|close|>tools<|sep|>"
