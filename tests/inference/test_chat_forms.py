"""Conversations that a template refuses: only what it refuses has another form, and calls stay calls."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from chat_families import FAMILIES, make_tokenizer, save_tokenizer

from prorl_zmq.data.trajectory import Role
from prorl_zmq.inference.chat import ChatMessage, PastCall
from prorl_zmq.inference.chat.forms import forms
from prorl_zmq.inference.chat.transformers_chat import TransformersChatFormat
from prorl_zmq.inference.tool_calls.formats import FENCED
from prorl_zmq.wire.messages.chat import ChatSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_zmq.inference.chat import Piece

pytestmark = pytest.mark.xdist_group("transformers")

TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": {"type": "object"}}}]
A, B = (PastCall(name, "bash", {"command": f"cat {name}"}) for name in "ab")


def user(text: str) -> ChatMessage:
    return ChatMessage(Role.USER, text)


def system(text: str) -> ChatMessage:
    return ChatMessage(Role.SYSTEM, text)


def turn(text: str = "", *calls: PastCall) -> ChatMessage:
    return ChatMessage(Role.ASSISTANT, text, None, calls)


def answer(call_id: str, text: str) -> ChatMessage:
    return ChatMessage(Role.TOOL, text, call_id=call_id)


@cache
def load(name: str) -> TransformersChatFormat:
    with tempfile.TemporaryDirectory() as folder:
        directory = save_tokenizer(FAMILIES[name], Path(folder))
        return TransformersChatFormat.load(ChatSettings("transformers", str(directory)))


def told(name: str, pieces: Sequence[Piece]) -> str:
    return load(name).decode(np.concatenate([piece.token_ids for piece in pieces]))


def opened(name: str, *messages: ChatMessage) -> str:
    return told(name, load(name).opening(messages, TOOLS))


def continued(name: str, spoken: str, *messages: ChatMessage) -> str:
    ids = make_tokenizer(FAMILIES[name])(spoken + FAMILIES[name].end, add_special_tokens=False)["input_ids"]
    read = load(name).read_turn(np.array(ids, np.int32))
    assert read.calls
    return told(name, load(name).following(read, messages, TOOLS))


def llama(role: str, text: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"


def test_two_calls_are_two_turns_where_a_template_takes_one() -> None:
    text = opened("llama3", user("Read."), turn("", A, B), answer("a", "I am A."), answer("b", "I am B."), user("So?"))
    assert text.endswith(
        llama("assistant", '{"name": "bash", "parameters": {"command": "cat a"}}')
        + llama("ipython", '"I am A."')
        + llama("assistant", '{"name": "bash", "parameters": {"command": "cat b"}}')
        + llama("ipython", '"I am B."')
        + llama("user", "So?")
        + "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_a_system_message_in_the_middle_is_the_users_where_a_template_takes_none() -> None:
    text = opened(
        "mistral", system("Work."), user("Read."), turn("", A), answer("a", "I am A."), turn("Done."), system("Hurry.")
    )
    assert '[TOOL_CALLS] [{"name": "bash", "arguments": {"command": "cat a"}' in text
    assert '[TOOL_RESULTS] {"content": "I am A."' in text
    assert text.endswith("Done.</s>[AVAILABLE_TOOLS] " + text.rpartition("[AVAILABLE_TOOLS] ")[2])
    assert text.endswith("[INST] Work.\n\nHurry.[/INST]")


def test_messages_that_become_the_users_are_joined_where_roles_must_alternate() -> None:
    text = opened("mistral", user("Read."), turn("Done."), system("Hurry."), user("Again."))
    assert text.endswith("[INST] Hurry.\n\nAgain.[/INST]")
    text = opened("gemma", user("Read."), turn("Done."), system("Hurry."), user("Again."))
    assert text.endswith("<start_of_turn>user\nHurry.\n\nAgain.<end_of_turn>\n<start_of_turn>model\n")


def test_a_system_message_after_an_answer_is_part_of_it_where_nothing_else_is_taken() -> None:
    text = opened("mistral", user("Read."), turn("", A), answer("a", "I am A."), system("Hurry."))
    assert '[TOOL_CALLS] [{"name": "bash"' in text
    assert '[TOOL_RESULTS] {"content": "I am A.\\n\\nHurry."' in text


def test_what_follows_a_turn_changes_only_where_it_is_refused() -> None:
    call = '[TOOL_CALLS] [{"name": "bash", "arguments": {}, "id": "123456789"}]'
    text = continued("mistral", call, answer("0", "I am A."), system("Hurry."))
    assert text.startswith('[TOOL_RESULTS] {"content": "I am A."')
    assert text.endswith("Hurry.[/INST]")
    calls = '{"name": "bash", "parameters": {}}; {"name": "bash", "parameters": {}}'
    text = continued("llama3", calls, answer("0", "I am A."), answer("1", "I am B."), system("Hurry."))
    assert text.startswith(llama("ipython", '"I am A."') + llama("ipython", '"I am B."') + llama("system", "Hurry."))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_that_is_taken_is_left_as_it_is(name: str) -> None:
    messages = [user("Read."), turn("Done."), user("Again.")]
    assert opened(name, *messages) == told(name, load(name).conversation(messages, TOOLS).prompt().pieces)


def test_in_the_last_form_calls_are_text() -> None:
    messages = [user("Read."), turn("I look.", A), answer("a", "I am A."), user("So?"), turn("Done.")]
    *_, last = forms(messages, FENCED.write)
    assert [message.role for message in last] == [Role.USER, Role.ASSISTANT, Role.USER, Role.ASSISTANT]
    assert last[1].content == "I look." + FENCED.write("bash", {"command": "cat a"})
    assert last[2].content == "I am A.\n\nSo?"
