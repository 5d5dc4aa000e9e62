"""Types of arguments that a form writes as plain text, from the JSON schemas of the tools.

Types are never guessed: an argument without a schema, one that may be text, and one whose text does not fit its type
all stay text. Callers write the schemas, so these may be anything: unsupported parts are ignored.
"""

from __future__ import annotations

import ast
import json
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_DEPTH = 8
"""Most levels of alternatives and references of a schema that are followed."""
MAX_SCHEMAS = 1000
"""Most schemas that are followed: programs in a sandbox choose schemas, too."""
MAX_LITERAL_CHARS = 1 << 16
"""Longest literal of Python: its syntax tree takes some hundred times the memory of its text."""
_NULLS = ("null", "None")
_LITERALS = {"true": True, "false": False, "null": None, "none": None}
_KINDS: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "boolean": bool,
    "number": (int, float),
    "integer": int,
    "object": dict,
    "array": list,
    "null": type(None),
}


class ArgumentTypes:
    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        self._parameters: dict[str, Any] = {}
        for tool in tools:
            function = _object(_object(tool).get("function", tool))
            self._parameters[str(function.get("name", ""))] = function.get("parameters")

    def keys(self, tool: str) -> frozenset[str] | None:
        """Return the names of a tool's arguments; None if it has no schema."""
        if tool not in self._parameters:
            return None
        return frozenset(_object(_object(self._parameters[tool]).get("properties")))

    def schema(self, tool: str, key: str) -> Any:
        """Return the schema of one argument, an object; empty if there is none."""
        parameters = _object(self._parameters.get(tool))
        schema = _object(_object(parameters.get("properties")).get(key))
        definitions = {part: parameters[part] for part in ("$defs", "definitions") if part in parameters}
        return {**definitions, **schema}

    def typed(self, tool: str, key: str, text: str) -> Any:
        return typed(self.schema(tool, key), text)


def typed(schema: Any, text: str) -> Any:
    """Return the value of a text by a schema; the text itself if it does not fit, or may be text."""
    kinds = set(kinds_of(schema))
    if "null" in kinds and text.strip() in _NULLS:
        return None
    if not kinds or "string" in kinds:
        return text
    value = literal(text.strip())
    if isinstance(value, float) and value.is_integer() and "number" not in kinds and "integer" in kinds:
        value = int(value)
    if isinstance(value, bool) and "boolean" not in kinds:
        return text
    return value if any(kind in _KINDS and isinstance(value, _KINDS[kind]) for kind in kinds) else text


def kinds_of(schema: Any) -> Iterator[str]:
    """Yield the types that a schema allows."""
    root = _object(schema)
    waiting = [(root, 0)]
    seen: set[int] = set()  # references may lead to one schema in any number of ways
    while waiting and len(seen) < MAX_SCHEMAS:
        inner, depth = waiting.pop()
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        kinds = inner.get("type")
        yield from (kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str))
        if kinds is None:
            constants = inner.get("enum", [inner["const"]] if "const" in inner else [])
            for constant in constants if isinstance(constants, list) else []:
                yield kind_of(constant)
        if depth == MAX_DEPTH:
            continue
        for part in ("anyOf", "oneOf", "allOf"):
            parts = inner.get(part)
            waiting += [(one, depth + 1) for one in (parts if isinstance(parts, list) else ()) if isinstance(one, dict)]
        if isinstance(reference := inner.get("$ref"), str):
            found: Any = root
            for step in reference.removeprefix("#/").split("/"):
                found = _object(found).get(step)
            waiting.append((_object(found), depth + 1))


def kind_of(value: Any) -> str:
    """Return the type of a value, in a schema's terms."""
    return next((kind for kind, types in _KINDS.items() if isinstance(value, types)), "")


def literal(text: str) -> Any:
    """Return the value of a text as JSON or as a literal of Python; the text itself if it is neither."""
    if text.lower() in _LITERALS:
        return _LITERALS[text.lower()]
    readers = (json.loads, ast.literal_eval) if len(text) <= MAX_LITERAL_CHARS else (json.loads,)
    for read in readers:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of backslashes in strings
                written = json.dumps(read(text), ensure_ascii=False, allow_nan=False)
            written.encode()  # half of a surrogate pair is not text elsewhere
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        return json.loads(written)
    return text


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def part_schema(schema: Any, key: str) -> Any:
    """Return the schema of one key of an object, or of the items of a list; empty if there is none."""
    schema = _object(schema)
    return _object(schema.get("properties")).get(key, schema.get("items") if key == "item" else None)
