"""A plain form of tool calls, for models that were trained on none: a fenced block of JSON.

    ```tool_call
    {"name": "bash", "arguments": {"command": "ls"}}
    ```

The fences stand at the beginnings of lines, so that no JSON string can hold the closing one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from .call import (
    MAX_CALLS,
    MalformedCall,
    ToolCall,
    ToolCallFormat,
    call_json,
    describe_tools,
    read_json,
    too_many_calls,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

OPEN, CLOSE = "```tool_call", "\n```"
EXAMPLE = f'{OPEN}\n{{"name": "NAME", "arguments": {{…}}}}{CLOSE}'


class FencedFormat(ToolCallFormat):
    """Implements `call.ToolCallFormat`."""

    name: ClassVar = "fenced"

    def describe(self, tools: Sequence[dict[str, Any]]) -> str:
        """Return the text that tells a model of its tools."""
        return describe_tools(tools, EXAMPLE)

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> list[ToolCall | MalformedCall]:  # noqa: ARG002 - JSON has types
        """Return the tool calls of one turn, in order. Never raises."""
        calls: list[ToolCall | MalformedCall] = []
        text = f"\n{text}"
        position = 0
        while (start := text.find(f"\n{OPEN}", position)) >= 0:
            if len(calls) == MAX_CALLS:
                return [*calls, too_many_calls()]
            begin = start + 1 + len(OPEN)
            end = text.find(CLOSE, begin)
            if end < 0:
                return [*calls, MalformedCall(f"The tool call's block was not closed. Write it as\n{EXAMPLE}")]
            calls.append(read_json(text[begin:end], ToolCall, f"\n{EXAMPLE}"))
            position = end + len(CLOSE)
        return calls

    def before_calls(self, text: str) -> str:
        """Return what a turn says before its first call."""
        return f"\n{text}".partition(f"\n{OPEN}")[0][1:]

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call."""
        return f"\n{OPEN}\n{call_json('arguments', name, arguments)}{CLOSE}\n"
