"""`MessageTexts`: extracts message contents and tool calls from the tokens of a trajectory.

The text that a chat template puts around a message is learned by rendering a message with known content. A message that
does not have this text around it is returned whole.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ..data.trajectory import Role
from ..errors import ProrlError, UnknownBackend
from ..evaluation.transcript import TextReader
from ..inference.chat import ChatMessage, Prompt
from ..inference.chat.loading import chat_format
from ..security.rights import ANYBODY
from ..wire.messages.backends import BackendList, ListBackends
from ..wire.messages.base import new_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..evaluation.transcript import Call
    from ..inference.chat import ChatFormat
    from ..wire.messages.chat import ChatSettings
    from .connection import GatewayConnection

MARK = "the content of a message"
LOADED_LIMIT = 64


class MessageTexts:
    """The message texts of one model.

    Args:
        chat: the model's chat format.
        settings: its backend's.
        tools: schemas of the conversation's tools, which templates render into a message.
    """

    def __init__(self, chat: ChatFormat, settings: ChatSettings, tools: Sequence[dict[str, Any]] = ()) -> None:
        self._chat = chat
        self._tools = tools
        self.reader = TextReader(chat, settings)
        self._around: dict[Role, tuple[str, str]] = {}
        """The template's text before and after a message, by role."""
        system, user = ChatMessage(Role.SYSTEM, MARK), ChatMessage(Role.USER, MARK)
        for opening in ([user], [system, user]):
            try:
                self._learn(chat.conversation(opening, tools).prompt())
            except ProrlError:
                continue  # a template without a system message

    def said(self, generated: NDArray[np.int32]) -> tuple[str, tuple[Call, ...]]:
        """Return the text of a policy's turn before its calls, and the calls."""
        ended = len(generated) > 0 and int(generated[-1]) in self._chat.stop_token_ids
        text = self.reader.text(generated[:-1] if ended else generated)
        return self.reader.before_calls(text), self.reader.calls(text)

    def content(self, role: Role, token_ids: NDArray[np.int32], after: NDArray[np.int32] | None = None) -> str:
        """Return the content of a message that is not the policy's; `after` is the turn that a tool answers."""
        if role == Role.TOOL and role not in self._around and after is not None:
            self._learn_tool(after)
        before, behind = self._around.get(role, ("", ""))
        text = self.reader.text(token_ids)
        if text.startswith(before) and text.endswith(behind):
            return text[len(before) : len(text) - len(behind)]
        return text

    def _learn_tool(self, turn: NDArray[np.int32]) -> None:
        self._around[Role.TOOL] = ("", "")
        try:
            read = self._chat.read_turn(turn, self._tools)
            answers = [ChatMessage(Role.TOOL, MARK, call_id=str(number)) for number in range(len(read.calls))]
            self._learn(Prompt(self._chat.following(read, answers, self._tools)))
        except ProrlError:
            return

    def _learn(self, prompt: Prompt) -> None:
        for piece in prompt.pieces:
            before, mark, behind = self.reader.text(piece.token_ids).partition(MARK)
            if mark and MARK not in behind:
                self._around[piece.role] = (before, behind)


class LoadedTexts:
    """Caches the `MessageTexts` of each chat format and set of tools."""

    def __init__(self, connection: GatewayConnection) -> None:
        self._connection = connection
        self._loaded: dict[tuple[ChatSettings, tuple[str, ...]], MessageTexts] = {}

    async def of(self, backend_id: str, tools: Sequence[dict[str, Any]] = ()) -> MessageTexts:
        """Return the reader of a backend's tokens; of one that is gone, that of the others.

        Raises:
            ConfigError: its tokenizer cannot be loaded here.
            UnknownBackend: it is gone, and the others are not of one kind.
            RequestTimeout: the backend broker did not answer.
        """
        listed: BackendList = await self._connection.ask_backend_broker(ANYBODY, ListBackends(new_id()))
        found = {one.backend.chat for one in listed.backends if one.backend.backend_id == backend_id}
        found = found or {one.backend.chat for one in listed.backends}
        if len(found) != 1:
            raise UnknownBackend(f"the backend {backend_id} is gone, and no other can read its tokens")
        settings = found.pop()
        key = settings, tuple(tool["function"]["name"] for tool in tools)
        if key not in self._loaded:
            made = await asyncio.to_thread(MessageTexts, await chat_format(settings), settings, tools)
            if len(self._loaded) == LOADED_LIMIT:
                self._loaded.clear()
            self._loaded[key] = made
        return self._loaded[key]
