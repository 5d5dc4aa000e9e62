"""Tool calls in the policy's text: the hermes form, which Qwen and many others are trained on.

    <tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>

A call that cannot be read is not an error of the service: the model is told what was wrong and how to write it.
"""

from __future__ import annotations

from typing import Any

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"
EXAMPLE = f'{OPEN}{{"name": "NAME", "arguments": {{…}}}}{CLOSE}'

MAX_CALLS = 64
"""Tool calls of one turn that are read."""


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
    calls: list[ToolCall | MalformedCall] = []
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        end = text.find(CLOSE, start)
        if end < 0:
            calls.append(MalformedCall(f"The tool call was not closed with {CLOSE}. Write it as {EXAMPLE}"))
            return calls
        calls.append(_parse(text[start + len(OPEN) : end]))
        position = end + len(CLOSE)
        if len(calls) == MAX_CALLS:
            calls.append(MalformedCall(f"More than {MAX_CALLS} tool calls in one turn; the rest were not read."))
            return calls
    if not calls and CLOSE in text:
        calls.append(MalformedCall(f"There is {CLOSE} without {OPEN}. Write a tool call as {EXAMPLE}"))
    return calls


def _parse(content: str) -> ToolCall | MalformedCall:
    try:
        return msgspec.json.decode(content, type=ToolCall)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        return MalformedCall(f"The tool call could not be read: {error}. Write it as {EXAMPLE}")
