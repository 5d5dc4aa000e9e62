"""Reading tool calls out of what a model wrote."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.stages.tool_calls import MAX_CALLS, MalformedCall, ToolCall, parse_tool_calls


def test_text_without_a_call() -> None:
    assert parse_tool_calls("I am done.") == []


def test_one_call_between_words() -> None:
    text = 'Let me look.<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call> There.'
    assert parse_tool_calls(text) == [ToolCall("bash", {"command": "ls"})]


def test_several_calls_keep_their_order() -> None:
    text = "".join(f'<tool_call>{{"name": "t{index}"}}</tool_call>' for index in range(3))
    assert parse_tool_calls(text) == [ToolCall("t0"), ToolCall("t1"), ToolCall("t2")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<tool_call>ls</tool_call>", "could not be read: JSON is malformed"),
        ('<tool_call>{"arguments": {}}</tool_call>', "missing required field `name`"),
        ('<tool_call>{"name": "bash", "arguments": "ls"}</tool_call>', "Expected `object`, got `str`"),
        ('<tool_call>{"name": "bash", "args": {}}</tool_call>', "unknown field `args`"),
        ("<tool_call></tool_call>", "could not be read"),
        ('<tool_call>{"name": "bash"', "was not closed with </tool_call>"),
        ('{"name": "bash"}</tool_call>', "</tool_call> without <tool_call>"),
    ],
)
def test_malformed_call_says_what_was_wrong_and_how_to_write_it(text: str, said: str) -> None:
    (call,) = parse_tool_calls(text)
    assert isinstance(call, MalformedCall)
    assert said in call.feedback
    assert '<tool_call>{"name": "NAME", "arguments": {…}}</tool_call>' in call.feedback


def test_good_call_beside_a_broken_one() -> None:
    first, second = parse_tool_calls('<tool_call>{"name": "a"}</tool_call><tool_call>{"name"')
    assert first == ToolCall("a")
    assert isinstance(second, MalformedCall)


PIECES = ["<tool_call>", "</tool_call>", '{"name": "a"}', "{", "x", "\ud800"]


@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
def test_never_raises(text: str) -> None:
    for call in parse_tool_calls(text):
        assert isinstance(call, ToolCall | MalformedCall)


def test_thousands_of_opening_marks_are_read_in_one_pass() -> None:
    """A model that repeats one token must not freeze its stage process: 16,384 of them once took a minute."""
    (call,) = parse_tool_calls("<tool_call>" * 100_000)
    assert isinstance(call, MalformedCall)
    assert "not closed" in call.feedback


def test_json_that_is_nested_too_deep_is_feedback_and_no_error() -> None:
    (call,) = parse_tool_calls('<tool_call>{"name": "a", "arguments": {"a": ' + "[" * 5000 + "</tool_call>")
    assert isinstance(call, MalformedCall)


def test_most_calls_of_a_turn() -> None:
    calls = parse_tool_calls('<tool_call>{"name": "a"}</tool_call>' * 100)
    assert calls[:MAX_CALLS] == [ToolCall("a")] * MAX_CALLS
    (last,) = calls[MAX_CALLS:]
    assert isinstance(last, MalformedCall)
