from __future__ import annotations

import pytest

from prorl_zmq.inference.tool_calls.call import MAX_CALLS, MalformedCall, ToolCall
from prorl_zmq.inference.tool_calls.mistral import MistralFormat

PARSE = MistralFormat().parse


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (
            '[TOOL_CALLS] [{"name": "a", "arguments": {"x": 1}, "id": "abc123def"}]',
            [ToolCall("a", {"x": 1}, "abc123def")],
        ),
        ('[TOOL_CALLS]a[ARGS]{"x": "[TOOL_CALLS]"}', [ToolCall("a", {"x": "[TOOL_CALLS]"})]),
        (
            "Look.[TOOL_CALLS]a[CALL_ID]abc123def[ARGS]{}[TOOL_CALLS]b[ARGS]{}",
            [ToolCall("a", {}, "abc123def"), ToolCall("b")],
        ),
        ('[TOOL_CALLS]a{"x": 1}', [ToolCall("a", {"x": 1})]),
        ("[TOOL_CALLS] []", []),
    ],
)
def test_both_forms(text: str, calls: list[ToolCall]) -> None:
    assert PARSE(text) == calls


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[TOOL_CALLS]", "could not be read"),
        ("[TOOL_CALLS] ls", "could not be read"),
        ('[TOOL_CALLS] {"name": "a"}', "Expected `array`, got `object`"),
        ('[TOOL_CALLS] [{"arguments": {}}]', "missing required field `name`"),
        ('[TOOL_CALLS]a[ARGS]{"x"', "could not be read"),
        ("[TOOL_CALLS]a[ARGS]", "could not be read"),
    ],
)
def test_malformed_call_says_how_to_write_it(text: str, said: str) -> None:
    (call,) = PARSE(text)
    assert isinstance(call, MalformedCall)
    assert said in call.feedback
    assert '[TOOL_CALLS] [{"name": "NAME", "arguments": {…}}]' in call.feedback


def test_one_list_of_many_calls_is_cut_too() -> None:
    many = ", ".join(['{"name": "a"}'] * 100)
    calls = PARSE(f"[TOOL_CALLS][{many}]")
    assert calls[:MAX_CALLS] == [ToolCall("a")] * MAX_CALLS
    (last,) = calls[MAX_CALLS:]
    assert isinstance(last, MalformedCall)


def test_half_a_surrogate_pair_is_malformed() -> None:
    (call,) = PARSE(r'[TOOL_CALLS] [{"name": "a", "arguments": {"x": "\udc00"}}]')
    assert isinstance(call, MalformedCall)
    assert "surrogates not allowed" in call.feedback
    call.feedback.encode()
