"""The form of Kimi K3: typed arguments in tags, whose attributes are escaped as in XML.

<|open|>tools<|sep|><|open|>call tool="bash" index="1"<|sep|>
<|open|>argument key="command" type="string"<|sep|>ls<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>
"""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Any, ClassVar

from .argument_types import kind_of, typed
from .call import MarkedFormat, ToolCall, value_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .call import MalformedCall
    from .turn import Turn

_OPEN = r'<\|open\|>call tool="([^"<>\n]{1,512})"[^"<>\n]{0,64}(?:"[^"<>\n]{0,64}"[^"<>\n]{0,64})?<\|sep\|>'
_OPENED = re.compile(r"\s*" + _OPEN)
_ARGUMENT = re.compile(r'\s*<\|open\|>argument key="([^"<>\n]{1,512})"(?: type="(\w{1,16})")?<\|sep\|>')
_CLOSES = re.compile(r"\s*<\|close\|>call<\|sep\|>(?:\s*<\|close\|>tools<\|sep\|>)?")
_MARKS = re.compile(
    rf"(?P<enters>{_OPEN})|(?P<leaves><\|close\|>call<\|sep\|>)"
    r"|(?P<closed><\|close\|>argument<\|sep\|>)(?=\s*(?:<\|open\|>argument |<\|close\|>call<\|sep\|>|\Z))"
)
_THOUGHT, _THOUGHT_END = "<|open|>think<|sep|>", "<|close|>think<|sep|>"
_SAID, _SAID_END, _TURN_END = "<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"


class KimiK3Format(MarkedFormat):
    """Of Kimi K3."""

    name: ClassVar = "kimi_k3"
    example: ClassVar = (
        '<|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|><|open|>argument key="KEY" type="string"<|sep|>'
        "VALUE<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
    )
    begins = re.compile(r'<\|open\|>tools<\|sep\|>|<\|open\|>call(?= tool=")')

    def read(self, turn: Turn, found: re.Match[str]) -> tuple[Sequence[ToolCall | MalformedCall], int]:
        """Read a call behind its mark."""
        text = turn.text
        opened = _OPENED.match(text, found.end() if found[0].endswith("<|sep|>") else found.start())
        if opened is None:
            return [self.malformed(f"no call follows {found[0]}")], found.end()
        name, position = html.unescape(opened[1]), opened.end()
        arguments: dict[str, Any] = {}
        while (argument := _ARGUMENT.match(text, position)) is not None:
            key, kind, start = html.unescape(argument[1]), argument[2], argument.end()
            end = turn.end_of_value(start, _MARKS, lambda mark: mark["closed"] is not None)
            if end is None:
                return [self.malformed(f"argument {key} is not closed", name)], len(text)
            value = text[start : end.start()]
            arguments[key] = typed({"type": kind}, value) if kind else turn.types.typed(name, key, value)
            position = end.end()
        closed = _CLOSES.match(text, position)
        if closed is None:
            return [self.malformed("it is not closed with <|close|>call<|sep|>", name)], position
        return [ToolCall(name, arguments)], closed.end()

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
