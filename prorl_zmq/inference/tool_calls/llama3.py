"""The JSON form of tool calls that Llama 3 is trained on: the whole turn is a call, or several separated by `;`.

    {"name": "bash", "parameters": {"command": "ls"}}

`<|python_tag|>` may stand before them. A turn that begins in another way calls nothing, and neither does JSON that
names nothing, since it may be the answer that was asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from .call import (
    MAX_CALLS,
    MalformedCall,
    ToolCall,
    ToolCallFormat,
    call_json,
    describe_tools,
    read_json_at,
    too_many_calls,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

PYTHON_TAG = "<|python_tag|>"
EXAMPLE = '{"name": "NAME", "parameters": {…}}'


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    parameters: dict[str, Any] = {}
    type: str = "function"


class Llama3Format(ToolCallFormat):
    """Implements `call.ToolCallFormat`."""

    name: ClassVar = "llama3"

    def describe(self, tools: Sequence[dict[str, Any]]) -> str:
        """Return the text that tells a model of its tools."""
        return f"{describe_tools(tools, EXAMPLE)}\nwith nothing before it; separate several with a semicolon."

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> list[ToolCall | MalformedCall]:  # noqa: ARG002 - JSON has types
        """Return the tool calls of one turn, in order. Never raises."""
        before, tag, after = text.partition(PYTHON_TAG)
        content = (after if tag else before).strip()
        if not content.startswith("{"):
            unread = f"What follows {PYTHON_TAG} is no tool call. Write one as {EXAMPLE}"
            return [MalformedCall(unread)] if tag else []
        if not tag and '"name"' not in content:
            return []
        calls: list[ToolCall | MalformedCall] = []
        position = 0
        while content.startswith("{", position):
            if len(calls) == MAX_CALLS:
                return [*calls, too_many_calls()]
            call, position = read_json_at(content, position, _Call, EXAMPLE)
            calls.append(call if isinstance(call, MalformedCall) else ToolCall(call.name, call.parameters))
            while position < len(content) and (content[position].isspace() or content[position] == ";"):
                position += 1
        return calls

    def before_calls(self, text: str) -> str:
        """Return what a turn says before its first call."""
        before, tag, _ = text.partition(PYTHON_TAG)
        if tag:
            return before
        return "" if self.parse(text) else text

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call."""
        return f"{call_json('parameters', name, arguments)};"
