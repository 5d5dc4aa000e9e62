from __future__ import annotations

from typing import Any

import pytest

from prorl_zmq.inference.tool_calls.call import MAX_CALLS, MalformedCall, ToolCall
from prorl_zmq.inference.tool_calls.formats import FORMS
from prorl_zmq.inference.tool_calls.python_calls import MAX_CHARS

LLAMA, LFM, OLMO = FORMS["llama4"], FORMS["lfm2"], FORMS["olmo3"]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ("x='a]<|tool_call_end|>'", {"x": "a]<|tool_call_end|>"}),
        ("x=-1, y=1.5", {"x": -1, "y": 1.5}),
        ("x=None, y=null, z=true", {"x": None, "y": None, "z": True}),
        ("x=[1, {'a': (2, 3)}]", {"x": [1, {"a": [2, 3]}]}),
        ("**{'a b': 1}", {"a b": 1}),
        ("from='x', class=1", {"from": "x", "class": 1}),
        ("x='1\n2'", {"x": "1\n2"}),
        (r"x='\d'", {"x": r"\d"}),
        ("", {}),
    ],
)
def test_arguments_are_literals(arguments: str, value: dict[str, Any]) -> None:
    text = f"Look.<|tool_call_start|>[a.b-c({arguments}), d()]<|tool_call_end|>"
    assert LFM.parse(text) == [ToolCall("a.b-c", value), ToolCall("d")]
    assert LFM.before_calls(text) == "Look."


@pytest.mark.parametrize(
    "call",
    [
        "a(open('x'))",
        "a(x=open('x'))",
        "a(x=1+1)",
        "a(x=-1e999)",
        "a(x=b'c')",
        "a(x={1: 2})",
        "a(x=1e999)",
        "a(1)",
        "a",
        "(lambda: 1)()",
    ],
)
def test_nothing_is_evaluated(call: str) -> None:
    (found,) = LFM.parse(f"<|tool_call_start|>[{call}]<|tool_call_end|>")
    assert isinstance(found, MalformedCall)
    assert LFM.example in found.feedback


@pytest.mark.parametrize(
    "content",
    [
        "import os",
        "a(",
        "a(x='",
        "x" * (MAX_CHARS + 1),
        "[" * 100_000,
        "a(x=" + "-" * 50_000 + "1)",
        "9" * 10_000,
        "\0",
    ],
)
def test_what_is_no_call_is_malformed(content: str) -> None:
    (found,) = LFM.parse(f"<|tool_call_start|>{content}<|tool_call_end|>")
    assert isinstance(found, MalformedCall)


def test_calls_on_lines() -> None:
    text = "<function_calls>\na(x='1\n2')\nb(y=2)\n</function_calls>"
    assert OLMO.parse(text) == [ToolCall("a", {"x": "1\n2"}), ToolCall("b", {"y": 2})]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[a(x=1), b()]", [ToolCall("a", {"x": 1}), ToolCall("b")]),
        ("<|python_start|>[a(x=1)]<|python_end|>", [ToolCall("a", {"x": 1})]),
        ('<|python_start|><|python_end|>{"name": "a", "parameters": {"x": 1}}', [ToolCall("a", {"x": 1})]),
        ('{"name": "a", "parameters": {"x": 1}}', [ToolCall("a", {"x": 1})]),
        ("[1] says so (a).", []),
        ("I call [a(x=1)]", []),
    ],
)
def test_a_whole_turn_of_llama_4(text: str, calls: list[ToolCall]) -> None:
    assert LLAMA.parse(text) == calls
    assert LLAMA.before_calls(text) == ("" if calls else text)


def test_most_calls_of_a_list() -> None:
    *calls, last = LLAMA.parse(f"[{'a(), ' * 100}]")
    assert calls == [ToolCall("a")] * MAX_CALLS
    assert isinstance(last, MalformedCall)
