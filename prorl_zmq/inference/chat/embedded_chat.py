r"""The embedded policy's chat format: ChatML with hermes tool calls, in few tokens, since its context window is small.

<|im_start|>user\nCount the lines …<|im_end|>\n<|im_start|>assistant\n
<tool_call>{"name": "bash", "arguments": {"command": "wc -l < data.txt"}}</tool_call><|im_end|>\n

The tools are listed by name only: this policy reads no schema.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...data.trajectory import Role
from ...errors import EngineFailed
from ..tokenizer import IM_END, IM_START, ROLE_PIECES, decode, encode
from ..tool_calls.formats import HERMES
from . import ChatMessage, Piece, Prompt, ReadTurn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_ROLES: dict[Role, NDArray[np.int32]] = {
    role: encode(piece)
    for role, piece in zip((Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL), ROLE_PIECES, strict=True)
}
_NEWLINE = encode("\n")
_TOOL_CALLS = HERMES


class EmbeddedChatFormat:
    """Implements `chat.ChatFormat` for the embedded policy."""

    warning = ""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (IM_END,)

    def conversation(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> EmbeddedConversation:
        return EmbeddedConversation([encode_message(message) for message in _with_tools(messages, tools)], tools)

    def opening(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> tuple[Piece, ...]:
        return self.conversation(messages, tools).prompt().pieces

    def read_turn(self, generated: NDArray[np.int32], tools: Sequence[dict[str, Any]] = ()) -> ReadTurn:
        text, ended = _text_of_turn(generated)
        return ReadTurn(None, text, _TOOL_CALLS.before_calls(text), tuple(_TOOL_CALLS.parse(text, tools)), ended)

    def following(
        self, turn: ReadTurn, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]
    ) -> tuple[Piece, ...]:
        del tools  # they are in the opening
        return (_end_of_turn(turn.ended), *map(encode_message, messages), Piece(Role.ASSISTANT, generation_prompt()))

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the ids of a text, int32 [N]; special tokens that it spells are plain text."""
        return encode(text)

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        return _text(token_ids)


class EmbeddedConversation:
    """Implements `chat.Conversation` for the embedded policy; its prompts are never rewritten."""

    def __init__(self, opening: Sequence[Piece], tools: Sequence[dict[str, Any]]) -> None:
        self._tools = tools
        self._coming = list(opening)
        """The ids before the next turn, without those that open it."""

    def prompt(self) -> Prompt:
        return Prompt((*self._coming, Piece(Role.ASSISTANT, generation_prompt())))

    def add_turn(self, generated: NDArray[np.int32]) -> ReadTurn:
        text, ended = _text_of_turn(generated)
        self._coming = [_end_of_turn(ended)]
        if not self._tools:
            return ReadTurn(None, text, text, (), ended)
        return ReadTurn(None, text, _TOOL_CALLS.before_calls(text), tuple(_TOOL_CALLS.parse(text)), ended)

    def add_tool_results(self, results: Sequence[str]) -> None:
        self.add_messages([ChatMessage(Role.TOOL, result) for result in results])

    def add_messages(self, messages: Sequence[ChatMessage]) -> None:
        self._coming += map(encode_message, messages)


def encode_message(message: ChatMessage) -> Piece:
    """Return the ids of one whole message; its content cannot form a special token."""
    calls = "".join(_TOOL_CALLS.write(call.name, call.arguments) for call in message.calls)
    parts = [_ids(IM_START), _ROLES[message.role], encode(message.content + calls), _ids(IM_END), _NEWLINE]
    return Piece(message.role, np.concatenate(parts))


def _text_of_turn(generated: NDArray[np.int32]) -> tuple[str, bool]:
    """Return a turn's text, and whether the token that ends a turn ended it."""
    ended = len(generated) > 0 and int(generated[-1]) == IM_END
    return _text(generated[:-1] if ended else generated), ended


def _text(token_ids: NDArray[np.int32]) -> str:
    try:
        return decode(token_ids)
    except ValueError as error:
        raise EngineFailed(f"the engine gave ids that the chat format has no text for: {error}") from error


def _end_of_turn(ended: bool) -> Piece:
    return Piece(Role.ASSISTANT, _NEWLINE if ended else _ids(IM_END, *_NEWLINE), new_turn=False)


def generation_prompt() -> NDArray[np.int32]:
    """Return the ids of `<|im_start|>assistant` and a line's end, int32 [2]."""
    return np.concatenate([_ids(IM_START), _ROLES[Role.ASSISTANT]])


def _with_tools(messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> list[ChatMessage]:
    if not tools:
        return list(messages)
    names = f"Tools: {', '.join(str(tool.get('function', tool).get('name', '?')) for tool in tools)}."
    if messages and messages[0].role == Role.SYSTEM:
        content = messages[0].content
        return [ChatMessage(Role.SYSTEM, f"{content} {names}" if content else names), *messages[1:]]
    return [ChatMessage(Role.SYSTEM, names), *messages]


def _ids(*token_ids: int) -> NDArray[np.int32]:
    return np.array(token_ids, np.int32)
