"""Tool calls in the policy's text: the hermes form, which Qwen and many others are trained on.

    <tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>

A call that cannot be read is not an error of the service: the model is told what was wrong and how to write it.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"
EXAMPLE = f'{OPEN}{{"name": "NAME", "arguments": {{…}}}}{CLOSE}'
_CALL = re.compile(re.escape(OPEN) + "(.*?)" + re.escape(CLOSE), re.DOTALL)


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call that the policy asks for."""

    name: str
    arguments: dict[str, Any] = {}


class MalformedCall(msgspec.Struct, frozen=True):
    """Something that was meant as a tool call and is none."""

    feedback: str
    """What to tell the model."""


def parse_tool_calls(text: str) -> list[ToolCall | MalformedCall]:
    """Give the tool calls of one turn of the policy, in order; an empty list if it calls no tool."""
    calls: list[ToolCall | MalformedCall] = [_parse(match[1]) for match in _CALL.finditer(text)]
    rest = _CALL.sub("", text)
    if OPEN in rest:
        calls.append(MalformedCall(f"The tool call was not closed with {CLOSE}. Write it as {EXAMPLE}"))
    elif CLOSE in rest:
        calls.append(MalformedCall(f"There is {CLOSE} without {OPEN}. Write a tool call as {EXAMPLE}"))
    return calls


def _parse(content: str) -> ToolCall | MalformedCall:
    try:
        return msgspec.json.decode(content, type=ToolCall)
    except (msgspec.MsgspecError, UnicodeError) as error:
        return MalformedCall(f"The tool call could not be read: {error}. Write it as {EXAMPLE}")
