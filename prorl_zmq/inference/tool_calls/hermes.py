"""The hermes form of tool calls, which Qwen and many others are trained on.

<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>
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
    malformed,
    read_json,
    too_many_calls,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

OPEN, CLOSE = "<tool_call>", "</tool_call>"
EXAMPLE = f'{OPEN}{{"name": "NAME", "arguments": {{…}}}}{CLOSE}'


class HermesFormat(ToolCallFormat):
    """Implements `call.ToolCallFormat`."""

    name: ClassVar = "hermes"

    def describe(self, tools: Sequence[dict[str, Any]]) -> str:
        """Return the text that tells a model of its tools."""
        return describe_tools(tools, EXAMPLE)

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> list[ToolCall | MalformedCall]:  # noqa: ARG002 - JSON has types
        """Return the tool calls of one turn, in order. Never raises."""
        calls: list[ToolCall | MalformedCall] = []
        position = 0
        while (start := text.find(OPEN, position)) >= 0:
            if len(calls) == MAX_CALLS:
                return [*calls, too_many_calls()]
            end = text.find(CLOSE, start)
            if end < 0:
                problem = f"The tool call was not closed with {CLOSE}. Write it as {EXAMPLE}"
                return [*calls, malformed(problem, text[start + len(OPEN) :])]
            calls.append(read_json(text[start + len(OPEN) : end], ToolCall, EXAMPLE))
            position = end + len(CLOSE)
        if not calls and CLOSE in text:
            return [MalformedCall(f"There is {CLOSE} without {OPEN}. Write a tool call as {EXAMPLE}")]
        return calls

    def before_calls(self, text: str) -> str:
        """Return what a turn says before its first call."""
        return text.partition(OPEN)[0]

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call."""
        return f"{OPEN}{call_json('arguments', name, arguments)}{CLOSE}"
