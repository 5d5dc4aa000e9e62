"""The tools of a conversation type the arguments of its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from chat_families import FAMILIES, make_tokenizer, save_tokenizer

from prorl_zmq.data.trajectory import Role
from prorl_zmq.inference.chat import ChatMessage
from prorl_zmq.inference.chat.transformers_chat import TransformersChatFormat
from prorl_zmq.inference.tool_calls.call import ToolCall
from prorl_zmq.wire.messages.chat import ChatSettings

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "<tool_call>bash<arg_key>seconds</arg_key><arg_value>5</arg_value></tool_call>"
PARAMETERS = {"type": "object", "properties": {"seconds": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}]


@pytest.mark.xdist_group("transformers")
def test_turns_are_read_with_the_tools(tmp_path: Path) -> None:
    directory = save_tokenizer(FAMILIES["chatml"], tmp_path)
    chat = TransformersChatFormat.load(ChatSettings("transformers", str(directory), tool_calls="glm"))
    tokenizer = make_tokenizer(FAMILIES["chatml"])
    generated = np.array(tokenizer(TEXT, add_special_tokens=False)["input_ids"], np.int32)
    call = ToolCall("bash", {"seconds": 5})
    assert chat.read_turn(generated, TOOLS).calls == (call,)
    conversation = chat.conversation([ChatMessage(Role.USER, "Wait.")], TOOLS)
    assert conversation.add_turn(generated).calls == (call,)
