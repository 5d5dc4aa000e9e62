"""The JSON form of tool calls that Llama 3 is trained on: the whole turn is a call, or several separated by `;`.

    {"name": "bash", "parameters": {"command": "ls"}}

`<|python_tag|>` may stand before them. A turn that begins in another way calls nothing, and neither does JSON that
names nothing, since it may be the answer that was asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from .call import MAX_CALLS, MalformedCall, ToolCall, ToolCallFormat, json_text, too_many_calls
from .marked_json import read_calls

if TYPE_CHECKING:
    from collections.abc import Sequence

PYTHON_TAG = "<|python_tag|>"


class Llama3Format(ToolCallFormat):
    """Of Llama 3."""

    name: ClassVar = "llama3"
    example: ClassVar = '{"name": "NAME", "parameters": {…}}'

    def describe(self, tools: Sequence[dict[str, Any]]) -> str:
        """Return a text that describes the tools."""
        return f"{super().describe(tools)}\nwith nothing before it; separate several with a semicolon."

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> list[ToolCall | MalformedCall]:  # noqa: ARG002 - JSON has types
        """Return the tool calls of one turn, in order. Never raises."""
        before, tag, after = ("", "", text) if text.lstrip().startswith("{") else text.partition(PYTHON_TAG)
        content = (after if tag else before or after).strip()
        if not content.startswith("{"):
            return [self.malformed(f"what follows {PYTHON_TAG} is none")] if tag else []
        if not tag and '"name"' not in content:
            return []
        calls, _ = read_calls(self, content, 0)
        return calls if len(calls) <= MAX_CALLS else [*calls[:MAX_CALLS], too_many_calls()]

    def before_calls(self, text: str) -> str:
        """Return what a turn says before its first call."""
        before, tag, _ = text.partition(PYTHON_TAG)
        if tag and not text.lstrip().startswith("{"):
            return before
        return "" if self.parse(text) else text

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call."""
        return f"{json_text({'name': name, 'parameters': arguments})};"
