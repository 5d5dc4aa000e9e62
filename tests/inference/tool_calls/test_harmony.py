from __future__ import annotations

import pytest

from prorl_zmq.inference.tool_calls.call import MalformedCall, ToolCall
from prorl_zmq.inference.tool_calls.formats import FORMS

FORM = FORMS["harmony"]
THOUGHT = "<|channel|>analysis<|message|>I must look; <|call|> is a mark.<|end|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{"x": "<|end|>"}'


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.bash <|constrain|>json",
        "<|start|>assistant to=functions.bash<|channel|>commentary json",
        " to=functions.bash<|channel|>analysis",
        "assistant<|channel|>commentary to=functions.bash<|constrain|>json",
    ],
)
def test_the_recipient_may_stand_behind_role_or_channel(header: str) -> None:
    assert FORM.parse(f'{header}<|message|>{{"x": 1}}') == [ToolCall("bash", {"x": 1})]


def test_a_turn_of_several_messages() -> None:
    preamble = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    reasoning, rest = FORM.split(THOUGHT + preamble + CALL) or (None, "")
    assert reasoning == "I must look; <|call|> is a mark."
    assert rest == preamble + CALL
    assert FORM.before_calls(rest) == "I look."
    assert FORM.parse(rest) == [ToolCall("bash", {"x": "<|end|>"})]


def test_an_answer_has_no_call() -> None:
    text = THOUGHT + '<|start|>assistant<|channel|>final<|message|>{"name": "bash", "arguments": {}}'
    assert FORM.parse(text) == []
    assert FORM.before_calls(text) == '{"name": "bash", "arguments": {}}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<|channel|>commentary to=functions.bash<|message|>ls", "could not be read: Expecting value"),
        ("<|channel|>commentary to=functions.bash<|message|>", "could not be read"),
        ("<|channel|>commentary to=functions.bash<|message|>{} and more", "text follows its arguments"),
        ("<|channel|>commentary to=python <|constrain|>code<|message|>print(1)", "there is no tool to=python"),
        ('<|channel|>commentary?? to=functions.bash {"x": 1}', "could not be read"),
    ],
)
def test_malformed_call_says_what_was_wrong_and_how_to_write_it(text: str, said: str) -> None:
    (call,) = FORM.parse(text)
    assert isinstance(call, MalformedCall)
    assert said in call.feedback
    assert FORM.example in call.feedback
