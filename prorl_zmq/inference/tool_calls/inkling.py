"""The form of Inkling: a turn is several messages, and a call is one that holds JSON.

<|message_model|>bash<|content_invoke_tool_json|>{"name": "bash", "args": {"command": "ls"}}<|end_message|>
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from .marked_json import MarkedJsonFormat
from .messages import TurnMessage, said_before_calls, without_thoughts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .messages import Kind

_MESSAGE = re.compile(
    r"(?:<\|message_model\|>[^<]{0,256})?<\|content_(thinking|text|invoke_tool_json)\|>(.*?)(?:<\|end_message\|>|\Z)",
    re.DOTALL,
)
_KINDS: dict[str, Kind] = {"thinking": "thought", "text": "said", "invoke_tool_json": "call"}


class InklingFormat(
    MarkedJsonFormat,
    name="inkling",
    opens=["<|content_invoke_tool_json|>"],
    closes="<|end_message|>",
    keys=("name", "args"),
):
    """Of Inkling."""

    only_calls = False

    def before_calls(self, text: str) -> str:
        """Return what a turn says before its first call, without its frames."""
        return said_before_calls(text, _messages(text))

    def split(self, text: str) -> tuple[str | None, str] | None:
        """Return the messages of reasoning, and the others."""
        return without_thoughts(text, _messages(text))

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call."""
        return f"<|message_model|>{name}{super().write(name, arguments)}"


def _messages(text: str) -> Iterator[TurnMessage]:
    for found in _MESSAGE.finditer(text):
        yield TurnMessage(_KINDS[found[1]], found.start(), found.end(), found[2])
