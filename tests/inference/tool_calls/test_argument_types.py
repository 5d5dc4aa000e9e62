from __future__ import annotations

from typing import Any

import pytest

from prorl_zmq.inference.tool_calls.argument_types import ArgumentTypes, typed

DEFINED = {"$defs": {"count": {"type": "integer"}}, "properties": {"n": {"$ref": "#/$defs/count"}, "s": True}}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "03106", "03106"),
        ({"type": "string"}, " true ", " true "),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, " 5\n", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "integer"}, "many", "many"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "number"}, "1e20", 1e20),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "null"}, "None", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "nothing", "nothing"),
        ({"type": ["integer", "string"]}, "5", "5"),
        ({"type": "object"}, "{'a': [1, None, True]}", {"a": [1, None, True]}),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "object"}, "{1, 2}", "{1, 2}"),
        ({"type": "object"}, "{1: (2, 3)}", {"1": [2, 3]}),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"type": "array"}, '["a"]', ["a"]),
        ({"type": "array"}, "[NaN]", "[NaN]"),
        ({"type": "array"}, r"['\d']", [r"\d"]),
        ({"type": "array"}, r'["\ud800"]', r'["\ud800"]'),
        ({"type": "array"}, f"['{'x' * 70_000}']", f"['{'x' * 70_000}']"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": True}, "true", True),
        ({}, "5", "5"),
        (True, "5", "5"),
        (None, "5", "5"),
        ({"type": 7, "anyOf": 7, "enum": 7, "$ref": 7}, "5", "5"),
        ({"$ref": "#"}, "5", "5"),
    ],
)
def test_a_value_has_the_type_of_its_schema_or_is_text(schema: Any, text: str, value: Any) -> None:
    assert repr(typed(schema, text)) == repr(value)


def test_arguments_by_tool_and_name() -> None:
    types = ArgumentTypes([{"type": "function", "function": {"name": "a", "parameters": DEFINED}}])
    assert types.typed("a", "n", "5") == 5
    assert types.typed("a", "s", "5") == "5"
    assert types.typed("a", "x", "5") == "5"
    assert types.typed("b", "n", "5") == "5"
    assert types.keys("a") == {"n", "s"}
    assert types.keys("b") is None


@pytest.mark.parametrize("tool", [{}, {"function": 7}, {"function": {"name": "a", "parameters": [1]}}, {"name": "a"}])
def test_a_schema_may_be_anything(tool: dict[str, Any]) -> None:
    assert ArgumentTypes([tool]).typed("a", "n", "5") == "5"


def test_references_that_multiply_are_followed_once() -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}] * 400 + [{"type": "integer"}]}
    assert typed({"$defs": {"loop": loop}, "$ref": "#/$defs/loop"}, "5") == 5
