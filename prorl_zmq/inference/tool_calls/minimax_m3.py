"""The form of MiniMax M3: a tag for each argument, and for each part of it. A token stands before every tag.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="bash">]<]minimax[>[<command>ls]<]minimax[>[</command>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

An object is written as tags of its keys, a list as tags `<item>`. The tool's schema types the values.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from .argument_types import kinds_of, part_schema, typed
from .call import MarkedFormat, ToolCall, value_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .call import AnyCall, Turn

MAX_DEPTH = 64
"""Most levels of nested values."""
MARK = "]<]minimax[>["

_M = re.escape(MARK)
_OPENED = re.compile(rf'\s*{_M}<invoke name="([^"<>\n]{{1,256}})">')
_TAG = re.compile(rf"\s*{_M}<([^<>/\n][^<>\n]{{0,255}})>")
_CLOSES = re.compile(rf"\s*{_M}</invoke>(?:\s*{_M}</tool_call>)?")


class MiniMax3Format(MarkedFormat):
    def __init__(self, name: str) -> None:
        super().__init__(name, rf"{_M}<tool_call>|{_M}<invoke(?= name=)")

    def read(self, turn: Turn, found: re.Match[str]) -> tuple[Sequence[AnyCall], int]:
        text = turn.text
        opened = _OPENED.match(text, found.end() if found[0].endswith(">") else found.start())
        if opened is None:
            return [self.malformed(f"no call follows {found[0]}")], found.end()
        name, position = opened[1], opened.end()
        arguments: dict[str, Any] = {}
        try:
            while (tag := _TAG.match(text, position)) is not None:
                arguments[tag[1]], position = _value(turn, tag, turn.types.schema(name, tag[1]), 0)
        except ValueError as error:
            return [self.malformed(str(error), name)], len(text)
        closed = _CLOSES.match(text, position)
        if closed is None:
            return [self.malformed(f"it is not closed with {MARK}</invoke>", name)], position
        return [ToolCall(name, arguments)], closed.end()

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        call = f'{MARK}<invoke name="{name}">{_written(arguments)}{MARK}</invoke>'
        return f"{MARK}<tool_call>\n{call}\n{MARK}</tool_call>"


def _value(turn: Turn, tag: re.Match[str], schema: Any, depth: int) -> tuple[Any, int]:
    """Parse the content of a tag; also return the end of its closing tag."""
    if depth > MAX_DEPTH:
        raise ValueError("it is nested too deep")
    text, start = turn.text, tag.end()
    inner = _TAG.match(text, start)
    kinds = set(kinds_of(schema))
    if inner is None or "string" in kinds:
        return _text(turn, start, tag[1], schema)
    items: list[Any] = []
    fields: dict[str, Any] = {}
    position = start
    while (inner := _TAG.match(text, position)) is not None:
        value, position = _value(turn, inner, part_schema(schema, inner[1]), depth + 1)
        items.append(value)
        fields[inner[1]] = value
    closing = f"{MARK}</{tag[1]}>"
    if not text.startswith(closing, position):
        raise ValueError(f"{tag[1]} is not closed with {closing}")
    listed = "array" in kinds or ("object" not in kinds and set(fields) == {"item"})
    return items if listed else fields, position + len(closing)


def _text(turn: Turn, start: int, key: str, schema: Any) -> tuple[Any, int]:
    """Parse a value without tags; a closing tag counts only if another tag follows."""
    marks = re.compile(
        rf"(?P<enters>{_M}<invoke name=)|(?P<leaves>{_M}</invoke>)|(?P<closed>{_M}</{re.escape(key)}>)(?={_M}<)"
    )
    end = turn.end_of_value(start, marks, lambda mark: mark["closed"] is not None)
    if end is None:
        raise ValueError(f"{key} is not closed with {MARK}</{key}>")
    return typed(schema, turn.text[start : end.start()]), end.end()


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(f"{MARK}<{key}>{_written(inner)}{MARK}</{key}>" for key, inner in value.items())
    if isinstance(value, list):
        return "".join(f"{MARK}<item>{_written(inner)}{MARK}</item>" for inner in value)
    return value_text(value)
