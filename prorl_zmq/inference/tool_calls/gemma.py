"""The form of Gemma 4: an object whose keys have no quotes and whose strings have quotes of their own.

<|tool_call>call:bash{command:<|"|>ls<|"|>,seconds:5}<tool_call|>
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from .argument_types import literal
from .call import NAME, MarkedFormat, ToolCall, json_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .call import AnyCall, Turn

MAX_DEPTH = 64
"""Most levels of nested values."""
QUOTE = '<|"|>'

_HEADER = re.compile(rf"\s*call:({NAME})\s*(?=\{{)")
_KEY = re.compile(r'\s*(?:<\|"\|>([^<]{1,256})<\|"\|>|([^:{}\[\],<]{1,256}))\s*:')
_MARKS = re.compile(r'(?P<enters><\|tool_call>call:)|(?P<leaves><tool_call\|>)|(?P<closed><\|"\|>)(?=\s*[,}\]])')
_BARE = re.compile(r"[^,{}\[\]<]{1,400}")
_BLANK = re.compile(r"\s*")


class GemmaFormat(MarkedFormat):
    def __init__(self, name: str) -> None:
        super().__init__(name, r"<\|tool_call>", '<|tool_call>call:NAME{TEXT:<|"|>…<|"|>,NUMBER:1}<tool_call|>')

    def read(self, turn: Turn, found: re.Match[str]) -> tuple[Sequence[AnyCall], int]:
        header = _HEADER.match(turn.text, found.end())
        if header is None:
            return [self.malformed(f"call:NAME{{…}} does not follow {found[0]}")], found.end()
        try:
            arguments, end = _object(turn, header.end(), 0)
        except ValueError as error:
            return [self.malformed(str(error), header[1])], len(turn.text)
        return [ToolCall(header[1], arguments)], end

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        return f"<|tool_call>call:{name}{_written(arguments)}<tool_call|>"


def _value(turn: Turn, start: int, depth: int) -> tuple[Any, int]:
    text = turn.text
    start = _skip(text, start)
    if depth > MAX_DEPTH:
        raise ValueError("it is nested too deep")
    if text.startswith(QUOTE, start):
        start += len(QUOTE)
        if (end := turn.end_of_value(start, _MARKS, lambda mark: mark["closed"] is not None)) is None:
            raise ValueError(f"a string is not closed with {QUOTE}")
        return text[start : end.start()], end.end()
    if text.startswith("{", start):
        return _object(turn, start, depth)
    if text.startswith("[", start):
        return _list(turn, start, depth)
    if (bare := _BARE.match(text, start)) is None:
        raise ValueError(f"a value is missing at {text[start : start + 20]!r}")
    return literal(bare[0].strip()), bare.end()


def _object(turn: Turn, start: int, depth: int) -> tuple[dict[str, Any], int]:
    text = turn.text
    found: dict[str, Any] = {}
    position = _skip(text, start + 1)
    while not text.startswith("}", position):
        if (key := _KEY.match(text, position)) is None:
            raise ValueError(f"a key is missing at {text[position : position + 20]!r}")
        found[(key[1] or key[2]).strip()], position = _value(turn, key.end(), depth + 1)
        position = _separated(text, position, "}")
    return found, position + 1


def _list(turn: Turn, start: int, depth: int) -> tuple[list[Any], int]:
    text = turn.text
    found: list[Any] = []
    position = _skip(text, start + 1)
    while not text.startswith("]", position):
        value, position = _value(turn, position, depth + 1)
        found.append(value)
        position = _separated(text, position, "]")
    return found, position + 1


def _separated(text: str, position: int, end: str) -> int:
    position = _skip(text, position)
    if text.startswith(",", position):
        return _skip(text, position + 1)
    if text.startswith(end, position):
        return position
    raise ValueError(f"it is not closed with {end}")


def _skip(text: str, position: int) -> int:
    blank = _BLANK.match(text, position)
    return position if blank is None else blank.end()


def _written(value: Any) -> str:
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_written(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return json_text(value)
