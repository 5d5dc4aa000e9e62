"""What all forms of tool calls have in common."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.inference.tool_calls.call import MAX_CALLS, MalformedCall, ToolCall
from prorl_zmq.inference.tool_calls.formats import FORMS, format_named
from prorl_zmq.wire.messages.backends import ChatSettings

BEGINNINGS = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "llama3": '{"name": "a"}',
    "fenced": "```tool_call\n",
}
CALL = {
    "hermes": '<tool_call>{"name": "a"}</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "a"}]',
    "llama3": '{"name": "a"};',
    "fenced": '```tool_call\n{"name": "a"}\n```\n',
}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.builds(
        ToolCall,
        st.text(st.characters(categories=["L", "N"], include_characters="_.-"), min_size=1, max_size=12),
        st.dictionaries(TEXTS, VALUES, max_size=3),
    ),
    min_size=1,
    max_size=4,
)


def write(name: str, calls: list[ToolCall], *, ascii_only: bool) -> str:
    def text(value: Any) -> str:
        return json.dumps(value, ensure_ascii=ascii_only)

    if name == "llama3":
        return "; ".join(text({"name": call.name, "parameters": call.arguments}) for call in calls)
    entries = [text({"name": call.name, "arguments": call.arguments}) for call in calls]
    if name == "mistral":
        return f"[TOOL_CALLS] [{', '.join(entries)}]"
    before, after = ("<tool_call>\n", "\n</tool_call>") if name == "hermes" else ("```tool_call\n", "\n```")
    return "\n".join(f"{before}{entry}{after}" for entry in entries)


def test_every_form_of_the_settings_is_there() -> None:
    assert set(get_args(get_type_hints(ChatSettings)["tool_calls"])) == {"", *FORMS}
    assert all(format_named(name).name == name for name in FORMS)


@pytest.mark.parametrize("name", FORMS)
@given(calls=CALLS, ascii_only=st.booleans())
def test_what_is_written_is_read(name: str, calls: list[ToolCall], ascii_only: bool) -> None:
    text = write(name, calls, ascii_only=ascii_only)
    assert format_named(name).parse(text) == calls
    assert format_named(name).before_calls(text) == ""


@pytest.mark.parametrize("name", FORMS)
@given(
    parts=st.lists(st.sampled_from([*BEGINNINGS.values(), *CALL.values(), "]", "}", "{", '"', "\\", "\n```", "\ud800"]))
)
def test_never_raises(name: str, parts: list[str]) -> None:
    for call in format_named(name).parse("".join(parts)):
        assert isinstance(call, ToolCall | MalformedCall)
    format_named(name).before_calls("".join(parts))


@pytest.mark.parametrize("name", FORMS)
def test_text_without_a_call(name: str) -> None:
    text = "I am done: {1, 2} and [3]."
    assert format_named(name).parse(text) == []
    assert format_named(name).before_calls(text) == text


@pytest.mark.parametrize("name", FORMS)
def test_a_hundred_thousand_beginnings_are_read_in_one_pass(name: str) -> None:
    *_, last = format_named(name).parse(BEGINNINGS[name] * 100_000)
    assert isinstance(last, MalformedCall)


@pytest.mark.parametrize("name", FORMS)
def test_most_calls_of_a_turn(name: str) -> None:
    assert format_named(name).parse(CALL[name] * MAX_CALLS) == [ToolCall("a")] * MAX_CALLS
    calls = format_named(name).parse(CALL[name] * (MAX_CALLS + 1))
    assert calls[:MAX_CALLS] == [ToolCall("a")] * MAX_CALLS
    (last,) = calls[MAX_CALLS:]
    assert isinstance(last, MalformedCall)
    assert "the rest were not read" in last.feedback


@pytest.mark.parametrize("name", FORMS)
def test_json_that_is_nested_too_deep_is_feedback_and_no_error(name: str) -> None:
    key = "parameters" if name == "llama3" else "arguments"
    deep = CALL[name].replace('"a"}', f'"a", "{key}": {{"a": {"[" * 50_000}')
    *_, last = format_named(name).parse(deep)
    assert isinstance(last, MalformedCall)
    assert "NAME" in last.feedback


@pytest.mark.parametrize("name", FORMS)
def test_tools_are_described_with_an_example(name: str) -> None:
    text = format_named(name).describe([{"type": "function", "function": {"name": "bash"}}])
    assert '"name": "bash"' in text
    assert '"name": "NAME"' in text
