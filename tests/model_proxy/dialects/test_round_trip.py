"""What a harness reads of a reply and sends back, in all APIs: it names the turn, and says what the policy said."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_model import turn

from prorl_zmq.data.trajectory import Role
from prorl_zmq.model_proxy.dialects.chat_completions import ChatCompletions
from prorl_zmq.model_proxy.dialects.gemini import Gemini
from prorl_zmq.model_proxy.dialects.messages import Messages
from prorl_zmq.model_proxy.dialects.responses import Responses

USER = {"role": "user", "content": "hi"}
FREE = {"type": "custom", "name": "free"}
DIALECTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat_completions": (ChatCompletions(), {"messages": [USER]}),
    "responses": (Responses(), {"input": [USER], "tools": [FREE]}),
    "messages": (Messages(), {"messages": [USER], "thinking": {"type": "enabled"}}),
    "gemini": (
        Gemini(),
        {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"thinkingConfig": {"includeThoughts": True}}},
    ),
}
OBJECTS = st.dictionaries(st.text(), st.none() | st.integers(-(2**53), 2**53) | st.text()).map(json.dumps)
CALLS = st.tuples(st.sampled_from(["bash", "free", "unknown"]), OBJECTS | st.text())
TURNS = st.builds(
    lambda text, calls, reasoning, cut: turn(text, *calls, reasoning=reasoning, finish_reason=cut),
    st.text(),
    st.lists(CALLS, max_size=3),
    st.text(),
    st.sampled_from([None, "length"]),
)


def with_reply(name: str, body: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """The next request of a harness that sends back what it got."""
    match name:
        case "chat_completions":
            return body | {"messages": [*body["messages"], written["choices"][0]["message"]]}
        case "responses":
            return body | {"input": [*body["input"], *written["output"]]}
        case "messages":
            return body | {"messages": [*body["messages"], {"role": "assistant", "content": written["content"]}]}
        case _:
            return body | {"contents": [*body["contents"], written["candidates"][0]["content"]]}


def meaning(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


@pytest.mark.parametrize("name", DIALECTS)
@given(reply=TURNS)
def test_a_reply_sent_back_is_read_as_the_turn_that_it_was(name: str, reply: Any) -> None:
    dialect, body = DIALECTS[name]
    written = json.loads(json.dumps(dialect.write(dialect.read(body, {}), reply, "policy")))
    messages = dialect.read(with_reply(name, body, written), {}).messages
    assert [message.role for message in messages] == [Role.USER, Role.ASSISTANT]
    read = messages[1]
    assert (read.text, read.reasoning) == (reply.text, reply.reasoning)
    assert [(call.call_id, call.name) for call in read.calls] == [(call.call_id, call.name) for call in reply.calls]
    if name != "chat_completions" or reply.calls:  # which has no place for an id beside the text
        assert read.turn_ids == (reply.turn_id,) or not any((reply.text, reply.calls, reply.reasoning))
    for sent, got in zip(reply.calls, read.calls, strict=True):
        if not (name == "responses" and sent.name == "free"):  # what goes into a free text is not JSON
            assert meaning(got.arguments) == meaning(sent.arguments)


@pytest.mark.parametrize("name", DIALECTS)
@given(reply=TURNS)
def test_a_streamed_reply_is_events_of_json(name: str, reply: Any) -> None:
    dialect, body = DIALECTS[name]
    stream = dialect.stream(dialect.read(body, {}), "policy")
    sent = stream.waiting() + stream.begin(reply.turn_id, 11) + stream.waiting() + stream.end(reply)
    assert sent.endswith(b"\n\n")
    for event in sent.removesuffix(b"\n\n").split(b"\n\n"):
        *named, data = event.split(b"\n")
        assert len(named) <= 1
        assert data == b"data: [DONE]" or isinstance(json.loads(data.removeprefix(b"data: ")), dict)
    for call in reply.calls:
        assert call.call_id.encode() in sent
