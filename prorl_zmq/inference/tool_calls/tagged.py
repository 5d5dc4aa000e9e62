"""Forms of tool calls that tag each argument, with a value that is not quoted.

    <tool_call>                                         `xml_parameters`
    <function=bash>
    <parameter=command>
    ls
    </parameter>
    </function>
    </tool_call>

    <minimax:tool_call>                                 `invoke`
    <invoke name="bash">
    <parameter name="command">ls</parameter>
    </invoke>
    </minimax:tool_call>

    <tool_call>bash                                     `arg_keys`
    <arg_key>command</arg_key>
    <arg_value>ls</arg_value>
    </tool_call>

    <|open|>tools<|sep|><|open|>call tool="bash" index="1"<|sep|>           `KimiK3Format`, on one line
    <|open|>argument key="command" type="string"<|sep|>ls<|close|>argument<|sep|><|close|>call<|sep|>
    <|close|>tools<|sep|>

The tool's schema types the values, unless an attribute does. The marks around the calls, and the last one that closes a
value, may be missing.
"""

from __future__ import annotations

import html
import re
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from .argument_types import kind_of, typed
from .call import MarkedFormat, ToolCall, read_json_at, value_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .call import AnyCall, Frames, Turn

_CDATA, _CDATA_END = "<![CDATA[", "]]>"


class Tags(NamedTuple):
    """The tags of a form, as regular expressions, and as they are written."""

    begins: str
    """The beginning of a call, or of the section around calls."""
    header: str
    """Begins a call; group 1 is its name, and a group `alone` marks a call without arguments. It is matched at a mark,
    or after one that ends in `>`."""
    argument: str
    """Begins an argument; group 1 is its key, and groups `string` and `type` are its attributes."""
    closes: str
    """The text after the last argument."""
    marks: str
    """See `Turn.end_of_value`. The group `closed` is a mark that belongs to the value that it ends, `last` one that
    does not, and `next` the key of another argument, which ends the value if the tool has one of that name."""
    problems: tuple[str, str, str]
    """In errors: no header follows a mark, a key's value is not closed, and the call is not closed."""
    call: str
    """A call, with placeholders `name` and `arguments`."""
    pair: str
    """An argument, with placeholders `key` and `value`, `kind` for the type of the value, and `is_text`."""


class TaggedFormat(MarkedFormat):
    """Parses a call's header, its arguments, and its closing marks, in this order.

    Args:
        name: of the form.
        tags: see `Tags`.
        example: see `ToolCallFormat`.
        frames: see `ToolCallFormat`.
        lines: a value is on lines of its own.
        cdata: a value may be a CDATA section.
        escaped: names and keys are escaped as in XML.
    """

    def __init__(
        self,
        name: str,
        tags: Tags,
        example: str = "",
        *,
        frames: Frames | None = None,
        lines: bool = False,
        cdata: bool = False,
        escaped: bool = False,
    ) -> None:
        self._header, self._argument, self._closes, self._marks = map(re.compile, tags[1:5])
        self._problems, self._call, self._pair = tags[5:]
        self._lines, self._cdata, self._escaped = lines, cdata, escaped
        super().__init__(name, tags.begins, example, frames)

    def read(self, turn: Turn, found: re.Match[str]) -> tuple[Sequence[AnyCall], int]:
        text = turn.text
        header = self._header.match(text, found.end() if found[0].endswith(">") else found.start())
        if header is None:
            return [self.malformed(self._problems[0].format(found[0]))], found.end()
        name, position = self._plain(header[1]).strip(), header.end()
        arguments: dict[str, Any] = {}
        alone = bool(header.groupdict().get("alone"))
        while not alone and (argument := self._argument.match(text, position)) is not None:
            key, start = self._plain(argument[1]), argument.end()
            end = turn.end_of_value(start, self._marks, partial(self._ends, turn, name, argument, arguments))
            if end is None:
                return [self.malformed(self._problems[1].format(key), name)], len(text)
            arguments[key] = self._value(turn, name, argument, text[start : end.start()])
            position = end.end() if end["closed"] else end.start()
        closed = self._closes.match(text, position)
        if closed is None and not alone:
            return [self.malformed(self._problems[2], name)], position
        return [ToolCall(name, arguments)], position if closed is None else closed.end()

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        escape = html.escape if self._escaped else str
        pairs = (
            self._pair.format(
                key=escape(key),
                value=value_text(value),
                kind=kind_of(value),
                is_text=str(isinstance(value, str)).lower(),
            )
            for key, value in arguments.items()
        )
        return self._call.format(name=escape(name), arguments="".join(pairs))

    def _plain(self, written: str) -> str:
        return html.unescape(written) if self._escaped else written

    def _ends(
        self, turn: Turn, name: str, argument: re.Match[str], arguments: Mapping[str, Any], mark: re.Match[str]
    ) -> bool:
        """Return whether a mark ends the value of an argument; `arguments` are the earlier ones."""
        if self._cdata and turn.text.startswith(_CDATA, argument.end()):
            closed = turn.text.endswith(_CDATA_END, 0, mark.start())
        else:
            closed = True
        if mark["closed"] or mark["last"] is not None:
            return closed
        key = mark.groupdict().get("next")
        return key not in (None, argument[1]) and key not in arguments and key in (turn.types.keys(name) or ())

    def _value(self, turn: Turn, name: str, argument: re.Match[str], text: str) -> Any:
        """Return the value of an argument, by its attributes or the tool's schema."""
        if self._lines and text.startswith("\n"):
            text = text[1:].removesuffix("\n")
        if self._cdata and text.startswith(_CDATA):
            text = text[len(_CDATA) : -len(_CDATA_END)]
        attributes = argument.groupdict()
        if attributes.get("string") == "true":
            return text
        if attributes.get("string") == "false":
            try:
                read, end = read_json_at(text, len(text) - len(text.lstrip()))
                return text if text[end:].strip() else read
            except ValueError:
                pass
        if kind := attributes.get("type"):
            return typed({"type": kind}, text)
        return turn.types.typed(name, self._plain(argument[1]), text)


def xml_parameters(name: str, tag: str, *, lines: bool) -> TaggedFormat:
    """Return a form of `<parameter=KEY>` in `<function=NAME>`, in a tag."""
    follows = rf"\s*(?:</?{tag}>|<function=|\Z)"
    line = "\n" * lines
    tags = Tags(
        begins=rf"<{tag}>|^<function=(?=[^<>\n]{{1,256}}>)",
        header=r"\s*<function=([^<>\n]{1,256})>",
        argument=r"\s*<parameter=([^<>\n]{1,256})>",
        closes=rf"\s*(?:</function>(?:\s*</{tag}>)?|</{tag}>)",
        marks=r"(?P<enters>(?<=\n)<function=[^<>\n]{1,256}>)"
        rf"|(?P<leaves></function>)(?P<last>(?=\s*</{tag}>{follows}))?"
        rf"|(?P<closed></parameter>)(?=\s*(?:<parameter=|</function>{follows}|</{tag}>|\Z))"
        r"|(?<=\n)<parameter=(?P<next>[^<>\n]{1,256})>",
        problems=(
            "<function=NAME> does not follow {}",
            "parameter {} is not closed with </parameter>",
            "it is not closed with </function>",
        ),
        call=f"<{tag}>\n<function={{name}}>\n{{arguments}}</function>\n</{tag}>",
        pair=f"<parameter={{key}}>{line}{{value}}{line}</parameter>\n",
    )
    return TaggedFormat(name, tags, lines=lines)


def invoke(
    name: str,
    written: tuple[str, str, str],
    *,
    tags: tuple[str, str, str] | None = None,
    typed_strings: bool = False,
    frames: Frames | None = None,
) -> TaggedFormat:
    """Return a form of tags with an attribute `name`.

    Args:
        name: of the form.
        written: the tags of a call, of a parameter, and around the calls of a turn, which may be empty.
        tags: the same as regular expressions; None: as they are written.
        typed_strings: an attribute `string` says whether a value is text or JSON.
        frames: see `ToolCallFormat`.
    """
    call, parameter, around = tags or written
    attribute = r'\s+name="([^"<>\n]{1,256})"'
    follows = rf"\s*(?:</?(?:{around})>|<{call}\s|\Z)" if around else ""
    last = follows or r"\Z"
    whole = f'<{written[0]} name="{{name}}">\n{{arguments}}</{written[0]}>'
    string = ' string="{is_text}"' if typed_strings else ""
    return TaggedFormat(
        name,
        Tags(
            begins=(f"<(?:{around})>|" if around else "") + rf'<{call}(?=\s+name="[^"<>\n]{{1,256}}"\s*/?>)',
            header=rf"\s*<{call}{attribute}\s*(?P<alone>/?)>",
            argument=rf'\s*<{parameter}{attribute}(?:\s+string="(?P<string>true|false)")?\s*>',
            closes=rf"\s*</{call}>" + (rf"(?:\s*</(?:{around})>)?" if around else ""),
            marks=rf'(?P<enters><{call}\s+name="[^"<>\n]{{1,256}}"\s*>)'
            rf"|(?P<leaves></{call}>)(?P<last>(?={last}))?"
            rf"|(?P<closed></{parameter}>)(?=\s*(?:<{parameter}\s|</{call}>{follows}|\Z))",
            problems=("no call follows {}", "parameter {} is not closed", "it is not closed"),
            call=f"<{written[2]}>\n{whole}\n</{written[2]}>" if around else whole,
            pair=f'<{written[1]} name="{{key}}"{string}>{{value}}</{written[1]}>\n',
        ),
        cdata=True,
        frames=frames,
    )


def arg_keys(name: str) -> TaggedFormat:
    """Return the form of pairs `<arg_key>` and `<arg_value>`; all tags of a turn may have a suffix, such as `:x`."""
    s = r"(?::\w{1,32})?"
    tags = Tags(
        begins=rf"(?:<tool_calls{s}>\s*)?<tool_call{s}>",
        header=rf"\s*+([^\s<>{{}}\"]{{1,256}})\s*+(?:<tool_sep{s}>\s*+)?(?=<)",
        argument=rf"\s*<arg_key{s}>([^<>]{{1,256}})</arg_key{s}>\s*<arg_value{s}>",
        closes=rf"\s*</tool_call{s}>",
        marks=rf"(?P<enters><tool_call{s}>)"
        rf"|(?P<leaves></tool_call{s}>)(?P<last>(?=\s*(?:<tool_call{s}>|</tool_calls{s}>|\Z)))?"
        rf"|(?P<closed></arg_value{s}>)(?=\s*(?:<arg_key{s}>|</tool_call{s}>|\Z))",
        problems=(
            "no name follows {}",
            "the value of {} is not closed with </arg_value>",
            "it is not closed with </tool_call>",
        ),
        call="<tool_call>{name}{arguments}</tool_call>",
        pair="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
    )
    return TaggedFormat(name, tags, "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>")


_OPEN = r'<\|open\|>call tool="([^"<>\n]{1,512})"[^"<>\n]{0,64}(?:"[^"<>\n]{0,64}"[^"<>\n]{0,64})?<\|sep\|>'
_THOUGHT, _THOUGHT_END = "<|open|>think<|sep|>", "<|close|>think<|sep|>"
_SAID, _SAID_END, _TURN_END = "<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"
_CALL = (
    '<|open|>tools<|sep|><|open|>call tool="{name}" index="1"<|sep|>{arguments}<|close|>call<|sep|>'
    "<|close|>tools<|sep|>"
)
_PAIR = '<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


class KimiK3Format(TaggedFormat):
    """The form of Kimi K3, whose reasoning and response are framed too."""

    def __init__(self, name: str) -> None:
        tags = Tags(
            begins=r'<\|open\|>tools<\|sep\|>|<\|open\|>call(?= tool=")',
            header=r"\s*" + _OPEN,
            argument=r'\s*<\|open\|>argument key="([^"<>\n]{1,512})"(?: type="(?P<type>\w{1,16})")?<\|sep\|>',
            closes=r"\s*<\|close\|>call<\|sep\|>(?:\s*<\|close\|>tools<\|sep\|>)?",
            marks=rf"(?P<enters>{_OPEN})|(?P<leaves><\|close\|>call<\|sep\|>)(?P<last>(?!))?"
            r"|(?P<closed><\|close\|>argument<\|sep\|>)(?=\s*(?:<\|open\|>argument |<\|close\|>call<\|sep\|>|\Z))",
            problems=(
                "no call follows {}",
                "argument {} is not closed",
                "it is not closed with <|close|>call<|sep|>",
            ),
            call=_CALL,
            pair=_PAIR,
        )
        pair = _PAIR.format(key="KEY", kind="string", value="VALUE")
        super().__init__(name, tags, _CALL.format(name="NAME", arguments=pair), escaped=True)

    def before_calls(self, text: str) -> str:
        return super().before_calls(text).removesuffix(_TURN_END).removeprefix(_SAID).removesuffix(_SAID_END)

    def split(self, text: str) -> tuple[str | None, str] | None:
        before, closed, after = text.partition(_THOUGHT_END)
        if closed and _SAID not in before:
            return before.removeprefix(_THOUGHT), after
        return (None, text) if _SAID in text or _SAID_END in text else None
