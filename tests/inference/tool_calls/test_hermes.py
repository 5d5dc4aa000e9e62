from __future__ import annotations

import pytest

from prorl_zmq.inference.tool_calls.call import MalformedCall, ToolCall
from prorl_zmq.inference.tool_calls.hermes import HermesFormat

PARSE = HermesFormat().parse


def test_text_without_a_call() -> None:
    assert PARSE("I am done.") == []


def test_one_call_between_words() -> None:
    text = 'Let me look.<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call> There.'
    assert PARSE(text) == [ToolCall("bash", {"command": "ls"})]


def test_several_calls_keep_their_order() -> None:
    text = "".join(f'<tool_call>{{"name": "t{index}"}}</tool_call>' for index in range(3))
    assert PARSE(text) == [ToolCall("t0"), ToolCall("t1"), ToolCall("t2")]


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
    (call,) = PARSE(text)
    assert isinstance(call, MalformedCall)
    assert said in call.feedback
    assert '<tool_call>{"name": "NAME", "arguments": {…}}</tool_call>' in call.feedback


def test_good_call_beside_a_broken_one() -> None:
    first, second = PARSE('<tool_call>{"name": "a"}</tool_call><tool_call>{"name"')
    assert first == ToolCall("a")
    assert isinstance(second, MalformedCall)


def test_what_is_said_before_a_call() -> None:
    assert HermesFormat().before_calls('Look.<tool_call>{"name": "a"}</tool_call> There.') == "Look."
