"""The form of gpt-oss: a turn is several messages, each with a channel, and a call is one with a recipient.

    <|channel|>analysis<|message|>I must look.<|end|><|start|>assistant<|channel|>commentary to=functions.bash
    <|constrain|>json<|message|>{"command": "ls"}<|call|>

The recipient may follow the role or the channel. A call's arguments are decoded where they begin, so that a mark within
a string belongs to the string.
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from .call import MAX_CALLS, ToolCall, ToolCallFormat, TurnMessage, at_most, json_text, read_arguments, read_json_at

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from .call import AnyCall

_START = "<|start|>"
_HEADER = re.compile(
    r"(?:<\|start\|>)?((?:assistant)?[^<]{0,256}(?:<\|(?:channel|constrain)\|>[^<]{0,256}){0,4})<\|message\|>"
)
_RECIPIENT = re.compile(r"\bto=([^\s<]{1,256})")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w{1,64})")
_END = re.compile(r"<\|(?:end|call|return)\|>(?=\s*(?:<\|start\|>|\Z))")


class HarmonyFormat(ToolCallFormat):
    has_messages = True

    def __init__(self, name: str) -> None:
        super().__init__(name, "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>")

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> list[AnyCall]:  # noqa: ARG002 - JSON has types
        calls = (self._call(message) for message in self.messages(text) if message.kind == "call")
        return at_most(list(islice(calls, MAX_CALLS + 1)))

    def _call(self, message: TurnMessage) -> AnyCall:
        name = message.name.removeprefix("functions.")
        if name == message.name:
            return self.malformed(f"there is no tool to={name}; the recipient is functions.NAME")
        try:
            value, end = read_json_at(message.body, 0)
            if message.body[end:].strip():
                raise ValueError("text follows its arguments")
            return ToolCall(name, read_arguments(value))
        except ValueError as error:
            return self.malformed(str(error), name, message.body)

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        header = f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json"
        return f"{header}<|message|>{json_text(arguments)}<|call|>"

    def messages(self, text: str) -> Iterator[TurnMessage]:
        """Yield the messages of a turn; text without a header is skipped."""
        start = 0
        while start < len(text):
            header = _HEADER.match(text, start)
            if header is None:
                following = text.find(_START, start + 1)
                end = len(text) if following < 0 else following
                recipient = _RECIPIENT.search(text, start, end)
                if recipient is not None and recipient[1].startswith("functions.") and "<|channel|>" in text[start:end]:
                    yield TurnMessage("call", start, end, text[recipient.end() : end], recipient[1])
            else:
                end = yield from _message(text, header)
            start = end


def _message(text: str, header: re.Match[str]) -> Generator[TurnMessage, None, int]:
    """Yield the message after a header, and return its end."""
    start, body = header.span()
    recipient, channel = _RECIPIENT.search(header[1]), _CHANNEL.search(header[1])
    called = recipient is not None and recipient[1] != "assistant"
    while called and text[body : body + 1].isspace():
        body += 1
    arguments = body
    if called:
        with suppress(ValueError):
            _, arguments = read_json_at(text, body)
    closing = _END.search(text, arguments)
    end = len(text) if closing is None else closing.end()
    content = text[body : end if closing is None else closing.start()]
    if called and recipient is not None:
        yield TurnMessage("call", start, end, content, recipient[1])
    elif channel is not None and _CHANNEL.findall(header[1])[-1] == "analysis":
        yield TurnMessage("thought", start, end, content)
    else:
        yield TurnMessage("said", start, end, content)
    return end
