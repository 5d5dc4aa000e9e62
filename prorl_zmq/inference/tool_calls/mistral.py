"""The two forms of tool calls that Mistral's models are trained on: a list of JSON objects, or name and arguments.

    [TOOL_CALLS] [{"name": "bash", "arguments": {"command": "ls"}, "id": "a1b2c3d4e"}]
    [TOOL_CALLS]bash[CALL_ID]a1b2c3d4e[ARGS]{"command": "ls"}

The id may be missing in both. What follows something that cannot be read is not read.
"""

from __future__ import annotations

import re
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

OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
EXAMPLE = f'{OPEN} [{{"name": "NAME", "arguments": {{…}}}}]'

_NAMED = re.compile(r"([^\s\[\]{}]{1,256})(?:\[CALL_ID\](\w{1,64}))?(?:\[ARGS\])?\s*(?=\{)")


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any] = {}
    id: str = ""


class MistralFormat(ToolCallFormat):
    """Implements `call.ToolCallFormat`."""

    name: ClassVar = "mistral"

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
            read, position = _read(text, start + len(OPEN))
            if isinstance(read, MalformedCall):
                return [*calls, read]
            calls += read
            if len(calls) > MAX_CALLS:
                return [*calls[:MAX_CALLS], too_many_calls()]
        return calls

    def before_calls(self, text: str) -> str:
        """Return what a turn says before its first call."""
        return text.partition(OPEN)[0]

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call."""
        return f"{OPEN}[{call_json('arguments', name, arguments)}]"


def _read(text: str, start: int) -> tuple[list[ToolCall] | MalformedCall, int]:
    """Read what follows one `[TOOL_CALLS]`; also give where it ended."""
    while text.startswith((" ", "\n"), start):
        start += 1
    if named := _NAMED.match(text, start):
        arguments, end = read_json_at(text, named.end(), dict[str, Any], EXAMPLE)
        if isinstance(arguments, MalformedCall):
            return MalformedCall(arguments.feedback, named[1], text[named.end() :].strip()), end
        return [ToolCall(named[1], arguments, named[2] or "")], end
    found, end = read_json_at(text, start, list[_Call], EXAMPLE)
    if isinstance(found, MalformedCall):
        return found, end
    return [ToolCall(call.name, call.arguments, call.id) for call in found], end
