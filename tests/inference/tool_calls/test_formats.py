"""What all forms of tool calls have in common."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_zmq.inference.tool_calls.argument_types import kind_of
from prorl_zmq.inference.tool_calls.call import MAX_CALLS, MalformedCall, ToolCall
from prorl_zmq.inference.tool_calls.formats import FORMS, format_named
from prorl_zmq.wire.messages.chat import ChatSettings

JSON_FORMS = [
    name
    for name in FORMS
    if FORMS[name].write("a", {"b": [None]}).count("[null]") and FORMS[name].write("a", {"b": "x"}).count('"x"')
]
FLAT_FORMS = ("minimax_m3",)
"""Forms that write the parts of a value without types."""
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=20)
NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
SIMPLE = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXTS
VALUES = st.recursive(
    SIMPLE | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


def calls_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[ToolCall]]:
    arguments = st.dictionaries(NAMES, values, max_size=3)
    return st.lists(st.builds(ToolCall, NAMES, arguments), min_size=1, max_size=4, unique_by=lambda call: call.name)


def schemas(calls: list[ToolCall]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": call.name,
                "parameters": {"properties": {key: {"type": kind_of(value)} for key, value in call.arguments.items()}},
            },
        }
        for call in calls
    ]


def parsed(name: str, text: str, tools: list[dict[str, Any]]) -> list[ToolCall | MalformedCall]:
    form = format_named(name)
    split = form.split(text)
    return form.parse(text if split is None else split[1], tools)


def bare(calls: list[ToolCall | MalformedCall]) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments if isinstance(call, ToolCall) else call.feedback) for call in calls]


def test_every_form_of_the_settings_is_there() -> None:
    assert set(get_args(get_type_hints(ChatSettings)["tool_calls"])) == {"", *FORMS}
    assert all(format_named(name).name == name for name in FORMS)


@pytest.mark.few(10)
@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=10)
@given(data=st.data())
def test_what_is_written_is_read(name: str, data: st.DataObject) -> None:
    calls = data.draw(calls_of(SIMPLE if name in FLAT_FORMS else VALUES))
    if name == "llama4":  # a whole turn is one list
        calls = calls[:1]
    text = "".join(format_named(name).write(call.name, call.arguments) for call in calls)
    assert bare(parsed(name, text, schemas(calls))) == [(call.name, call.arguments) for call in calls]
    assert format_named(name).before_calls(text) == ""


@pytest.mark.few(10)
@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=15)
@given(data=st.data())
def test_never_raises(name: str, data: st.DataObject) -> None:
    form = format_named(name)
    written = form.write("a", {"b": "c", "d": {"e": [1]}})
    cuts = st.integers(0, len(written))
    pieces = st.tuples(cuts, cuts).map(lambda cut: written[min(cut) : max(cut)])
    text = "".join(data.draw(st.lists(pieces | st.sampled_from([written, "[{", '"', "\\", "\n", "'", "\ud800"]))))
    for call in form.parse(text):
        assert isinstance(call, ToolCall | MalformedCall)
    assert isinstance(form.before_calls(text), str)
    if (parts := form.split(text)) is not None:
        assert len(parts[1]) <= len(text)


@pytest.mark.parametrize("name", FORMS)
def test_text_without_a_call(name: str) -> None:
    text = "I am done: {1, 2} and [3]."
    assert format_named(name).parse(text) == []
    assert format_named(name).before_calls(text) == text


@pytest.mark.parametrize("name", FORMS)
def test_every_beginning_of_a_call_is_no_call(name: str) -> None:
    """What was cut off is never run, and never silent once its mark is there."""
    written = format_named(name).write("bash", {"command": "rm -rf /tmp/x", "seconds": 12})
    (whole,) = bare(format_named(name).parse(written))
    lengths = range(len(written) + 1)
    complete = next(n for n in lengths if bare(format_named(name).parse(written[:n])) == [whole])
    assert len(written) - complete < 60
    for length in range(complete):
        found = format_named(name).parse(written[:length])
        assert not any(isinstance(call, ToolCall) for call in found)
        assert found or length < written.index("rm -rf")


@pytest.mark.few(20)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("repeated", ["begins", "call", "unclosed", "spaces", "quotes", "opened"])
def test_a_long_text_is_read(name: str, repeated: str) -> None:
    """A form that needs the square of a text's length would take hours."""
    form = format_named(name)
    written = form.write("a", {"b": "c"})
    head = written[: written.index("a")]
    text = {
        "begins": head * (400_000 // len(head) + 1),
        "call": written * (400_000 // len(written)),
        "unclosed": (written[:-1] + "x") * (400_000 // len(written)),
        "spaces": head + " " * 400_000,
        "quotes": head + "\"'\\" * 100_000,
        "opened": written[: written.index("c")] + (head + "\n") * (400_000 // (len(head) + 1)),
    }[repeated]
    calls = form.parse(text)
    assert len(calls) <= MAX_CALLS + 1
    form.before_calls(text)
    form.split(text)


@pytest.mark.parametrize("name", sorted(FORMS.keys() - {"llama4"}))
def test_most_calls_of_a_turn(name: str) -> None:
    written = format_named(name).write("a", {})
    assert bare(format_named(name).parse(written * MAX_CALLS)) == [("a", {})] * MAX_CALLS
    *calls, last = format_named(name).parse(written * (MAX_CALLS + 1))
    assert bare(calls) == [("a", {})] * MAX_CALLS
    assert isinstance(last, MalformedCall)
    assert "the rest were not read" in last.feedback


@pytest.mark.parametrize("name", JSON_FORMS)
def test_json_that_is_nested_too_deep_is_feedback_and_no_error(name: str) -> None:
    text = format_named(name).write("a", {"b": "VALUE"}).replace('"VALUE"', "[" * 50_000)
    *_, last = format_named(name).parse(text)
    assert isinstance(last, MalformedCall)
    assert "NAME" in last.feedback


@pytest.mark.parametrize("name", JSON_FORMS)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", r'"\ud800"'])
def test_what_is_no_json_elsewhere_is_malformed(name: str, number: str) -> None:
    (call,) = format_named(name).parse(format_named(name).write("a", {"b": "VALUE"}).replace('"VALUE"', number))
    assert isinstance(call, MalformedCall)
    call.feedback.encode()


@pytest.mark.parametrize("name", FORMS)
def test_tools_are_described_with_an_example(name: str) -> None:
    text = format_named(name).describe([{"type": "function", "function": {"name": "bash"}}])
    assert json.dumps({"name": "bash"}) in text
    assert "NAME" in text
