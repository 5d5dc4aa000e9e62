from __future__ import annotations

import pytest

from prorl_zmq.inference.tool_calls.call import MalformedCall, ToolCall
from prorl_zmq.inference.tool_calls.formats import FORMS

FORM = FORMS["llama3"]
PARSE = FORM.parse


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "a", "parameters": {"x": 1}}', [ToolCall("a", {"x": 1})]),
        ('\n<|python_tag|>{"type": "function", "name": "a", "parameters": {}}', [ToolCall("a")]),
        ('{"name": "a"}; {"name": "b", "parameters": {"x": ";"}}', [ToolCall("a"), ToolCall("b", {"x": ";"})]),
        ('{"name": "a"} and that is all', [ToolCall("a")]),
        ('{"name": "a", "arguments": {"x": "<|python_tag|>"}, "id": 1}', [ToolCall("a", {"x": "<|python_tag|>"})]),
        ('I call {"name": "a"}', []),
        ('{"answer": 4}', []),
    ],
)
def test_a_turn_is_a_call_or_it_is_none(text: str, calls: list[ToolCall]) -> None:
    assert PARSE(text) == calls


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"name": "a", "parameters": {"x"', "could not be read"),
        ('{"name": "a", "parameters": "ls"}', "Expected `object`, got `str`"),
        ('{"name": "a", "parameters": [1]}', "Expected `object`, got `array`"),
        ("<|python_tag|>print(1)", "could not be read"),
    ],
)
def test_malformed_call_says_how_to_write_it(text: str, said: str) -> None:
    (call,) = PARSE(text)
    assert isinstance(call, MalformedCall)
    assert said in call.feedback
    assert '{"name": "NAME", "parameters": {…}}' in call.feedback


def test_what_is_said_before_a_tag() -> None:
    assert FORM.before_calls('Look.<|python_tag|>{"name": "a"}') == "Look."


def test_half_a_surrogate_pair_is_malformed() -> None:
    (call,) = PARSE(r'{"name": "a", "parameters": {"\ud800": "x"}}')
    assert isinstance(call, MalformedCall)
    assert "surrogates not allowed" in call.feedback
    call.feedback.encode()
