"""Messages without what a chat template writes around them, for the quirks of each family."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from chat_families import FAMILIES, make_tokenizer

from prorl_zmq.data.trajectory import Role
from prorl_zmq.gateway.message_texts import MessageTexts
from prorl_zmq.gateway.tool_schemas import schemas_of
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.inference.chat.loading import load_chat_format
from prorl_zmq.wire.messages.chat import ChatSettings

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("transformers")
SYSTEM, USER, RESULT = "Be brief.", "What is in the folder?", "a.txt\n  b.txt"
TOOLS = schemas_of(["bash"])
HERMES = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
MERGED = {"llama3", "mistral", "gemma"}
"""Families that have no place of its own for a system message."""


@pytest.mark.parametrize("name", FAMILIES)
def test_contents_are_what_was_said(name: str, tmp_path: Path) -> None:
    make_tokenizer(FAMILIES[name]).save_pretrained(tmp_path)
    settings = ChatSettings("transformers", str(tmp_path))
    chat = load_chat_format(settings)
    texts = MessageTexts(chat, settings, TOOLS)
    conversation = chat.conversation([ChatMessage(Role.SYSTEM, SYSTEM), ChatMessage(Role.USER, USER)], TOOLS)
    pieces = [piece for piece in conversation.prompt().pieces if piece.role != Role.ASSISTANT]
    found = [(piece.role, texts.content(piece.role, piece.token_ids)) for piece in pieces]
    if name in MERGED:
        assert USER in found[-1][1]
    else:
        assert found == [(Role.SYSTEM, SYSTEM), (Role.USER, USER)]


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
def test_of_a_call_and_its_answer(name: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(FAMILIES[name])
    tokenizer.save_pretrained(tmp_path)
    settings = ChatSettings("transformers", str(tmp_path))
    chat = load_chat_format(settings)
    texts = MessageTexts(chat, settings, TOOLS)
    generated = np.array(tokenizer.encode(f"I look.\n{HERMES}<|im_end|>", add_special_tokens=False), np.int32)
    said, calls = texts.said(generated)
    assert (said.strip(), [(call.name, call.arguments) for call in calls]) == (
        "I look.",
        [("bash", '{"command": "ls"}')],
    )
    conversation = chat.conversation([ChatMessage(Role.USER, USER)], TOOLS)
    conversation.prompt()
    conversation.add_turn(generated)
    conversation.add_tool_results([RESULT])
    (answer,) = [piece for piece in conversation.prompt().pieces if piece.role == Role.TOOL]
    assert texts.content(Role.TOOL, answer.token_ids, generated) == RESULT
