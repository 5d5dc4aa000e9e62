from __future__ import annotations

import pytest

from prorl_zmq.inference.tool_calls.call import MAX_CALLS, MalformedCall, ToolCall
from prorl_zmq.inference.tool_calls.formats import FORMS, HERMES

PARSE = HERMES.parse


def test_text_without_a_call() -> None:
    assert PARSE("I am done.") == []


def test_one_call_between_words() -> None:
    text = 'Let me look.<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call> There.'
    assert PARSE(text) == [ToolCall("bash", {"command": "ls"})]
    assert HERMES.before_calls(text) == "Let me look."


def test_several_calls_keep_their_order() -> None:
    text = "".join(f'<tool_call>{{"name": "t{index}"}}</tool_call>' for index in range(3))
    assert PARSE(text) == [ToolCall("t0"), ToolCall("t1"), ToolCall("t2")]


@pytest.mark.parametrize(
    "content",
    [
        '{"name": "a", "arguments": {"x": "a </tool_call> b <tool_call>"}}',
        '{"name": "a", "arguments": {"x": "a </tool_call> b <tool_call>"}, "reason": "I must", "id": 7}',
        r'{"name": "a", "arguments": "{\"x\": \"a </tool_call> b <tool_call>\"}"}',
        '{"parameters": {"x": "a </tool_call> b <tool_call>"}, "name": "a"}',
    ],
)
def test_a_call_is_read_object_by_object(content: str) -> None:
    assert PARSE(f"<tool_call>{content}</tool_call>") == [ToolCall("a", {"x": "a </tool_call> b <tool_call>"})]


@pytest.mark.parametrize("arguments", ['""', "null", "{}", '"{}"', '" "', '"null"'])
def test_no_arguments(arguments: str) -> None:
    if arguments == '"null"':
        assert isinstance(PARSE(f'<tool_call>{{"name": "a", "arguments": {arguments}}}</tool_call>')[0], MalformedCall)
    else:
        assert PARSE(f'<tool_call>{{"name": "a", "arguments": {arguments}}}</tool_call>') == [ToolCall("a")]


def test_a_line_end_in_a_string_is_one() -> None:
    assert PARSE('<tool_call>{"name": "a", "arguments": {"x": "1\n2"}}</tool_call>') == [ToolCall("a", {"x": "1\n2"})]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<tool_call>ls</tool_call>", "could not be read: Expecting value"),
        ('<tool_call>{"arguments": {}}</tool_call>', "missing required field `name`"),
        ('<tool_call>{"name": "bash", "arguments": "ls"}</tool_call>', "Expected `object`, got `str`"),
        ('<tool_call>{"name": "bash", "arguments": [1]}</tool_call>', "Expected `object`, got `array`"),
        ("<tool_call>[1]</tool_call>", "Expected `object`, got 1"),
        ("<tool_call></tool_call>", "could not be read"),
        ('<tool_call>{"name": "bash"', "could not be read"),
        ('<tool_call>{"name": "bash"}', "was not closed with </tool_call>"),
        ('{"name": "bash"}</tool_call>', "</tool_call> without <tool_call>"),
    ],
)
def test_malformed_call_says_what_was_wrong_and_how_to_write_it(text: str, said: str) -> None:
    (call,) = PARSE(text)
    assert isinstance(call, MalformedCall)
    assert said in call.feedback
    assert '<tool_call>{"name": "NAME", "arguments": {…}}</tool_call>' in call.feedback


def test_what_can_be_seen_of_a_malformed_call() -> None:
    (call,) = PARSE('<tool_call>{"name": "bash", "arguments": {"command": ls}}</tool_call> and more')
    assert isinstance(call, MalformedCall)
    assert (call.name, call.arguments) == ("bash", '{"command": ls}')


def test_good_call_beside_a_broken_one() -> None:
    broken, good = PARSE('<tool_call>{"name": }</tool_call><tool_call>{"name": "a"}</tool_call>')
    assert isinstance(broken, MalformedCall)
    assert good == ToolCall("a")


def test_several_objects_behind_one_mark() -> None:
    assert PARSE('<tool_call>{"name": "a"}\n{"name": "b"}</tool_call>') == [ToolCall("a"), ToolCall("b")]


@pytest.mark.parametrize(
    ("form", "text", "call"),
    [
        ("nemotron_v2", '<TOOLCALL>[{"name": "a", "arguments": {"x": 1}}]</TOOLCALL>', ToolCall("a", {"x": 1})),
        (
            "command_r",
            '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "a", "parameters": {"x": 1}}\n]<|END_ACTION|>',
            ToolCall("a", {"x": 1}, "0"),
        ),
        ("apertus", '<|tools_prefix|>[{"a": {"x": 1}}]<|tools_suffix|>', ToolCall("a", {"x": 1})),
        ("gigachat", '<|function_call|>{"name": "a", "arguments": {"x": 1}}', ToolCall("a", {"x": 1})),
        ("phi4_mini", 'functools[{"name": "a", "arguments": {"x": 1}}]', ToolCall("a", {"x": 1})),
        ("phi4_mini", '<|tool_call|>[{"name": "a", "arguments": {"x": 1}}]<|/tool_call|>', ToolCall("a", {"x": 1})),
        ("granite3", '<|tool_call|>[{"name": "a", "arguments": {"x": 1}}]', ToolCall("a", {"x": 1})),
    ],
)
def test_forms_of_other_makers(form: str, text: str, call: ToolCall) -> None:
    assert FORMS[form].parse(text) == [call]


def test_one_list_of_many_calls_is_cut_too() -> None:
    many = ", ".join(['{"name": "a"}'] * 100)
    calls = FORMS["granite3"].parse(f"<|tool_call|>[{many}]")
    assert calls[:MAX_CALLS] == [ToolCall("a")] * MAX_CALLS
    (last,) = calls[MAX_CALLS:]
    assert isinstance(last, MalformedCall)


def test_what_closes_no_list_is_looked_for_in_linear_time() -> None:
    assert PARSE("<tool_call>[]" * 100_000) == []
    assert PARSE("<tool_call>[]" * 3 + '<tool_call>{"name": "a"}</tool_call>') == [ToolCall("a")]
