from __future__ import annotations

import pytest

from prorl_zmq.inference.tool_calls.call import MAX_CALLS, MalformedCall, ToolCall
from prorl_zmq.inference.tool_calls.formats import FORMS

MISTRAL, KIMI = FORMS["mistral"].parse, FORMS["kimi_k2"].parse
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


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
def test_both_forms_of_mistral(text: str, calls: list[ToolCall]) -> None:
    assert MISTRAL(text) == calls


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[TOOL_CALLS]", "no name and arguments follow [TOOL_CALLS]"),
        ("[TOOL_CALLS] ls", "no name and arguments follow"),
        ('[TOOL_CALLS] [{"arguments": {}}]', "missing required field `name`"),
        ('[TOOL_CALLS]a[ARGS]{"x"', "could not be read"),
        ("[TOOL_CALLS]a[ARGS]", "no name and arguments follow"),
    ],
)
def test_malformed_call_says_how_to_write_it(text: str, said: str) -> None:
    (call,) = MISTRAL(text)
    assert isinstance(call, MalformedCall)
    assert said in call.feedback
    assert "[TOOL_CALLS]NAME[ARGS]{…}" in call.feedback


def test_one_list_of_many_calls_is_cut_too() -> None:
    many = ", ".join(['{"name": "a"}'] * 100)
    calls = MISTRAL(f"[TOOL_CALLS][{many}]")
    assert calls[:MAX_CALLS] == [ToolCall("a")] * MAX_CALLS
    (last,) = calls[MAX_CALLS:]
    assert isinstance(last, MalformedCall)


@pytest.mark.parametrize(
    ("written", "name"),
    [("functions.bash:0", "bash"), ("bash:12", "bash"), ("functions.a.b-c:3 ", "a.b-c"), ("\nfunctions.bash", "bash")],
)
def test_the_id_of_kimi_is_kept_and_names_the_tool(written: str, name: str) -> None:
    text = f'<|tool_calls_section_begin|>{BEGIN}{written}{ARGUMENTS}{{"x": "{END}"}}{END}<|tool_calls_section_end|>'
    assert KIMI(text) == [ToolCall(name, {"x": END}, written.strip())]


def test_a_section_without_a_call_is_malformed() -> None:
    (call,) = KIMI("<|tool_calls_section_begin|>functions.bash:0 ls")
    assert isinstance(call, MalformedCall)
    assert "no call follows <|tool_calls_section_begin|>" in call.feedback
