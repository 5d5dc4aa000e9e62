"""`LoadedTexts`: caches one `MessageTexts` for each chat format and set of tools."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ..errors import UnknownBackend
from ..inference.chat.loading import chat_format
from ..security.rights import ANYBODY
from ..wire.messages.backends import BackendList, ListBackends
from ..wire.messages.base import new_id
from .message_texts import MessageTexts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..wire.messages.backends import ChatSettings
    from .connection import GatewayConnection

LIMIT = 64


class LoadedTexts:
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
            if len(self._loaded) == LIMIT:
                self._loaded.clear()
            self._loaded[key] = made
        return self._loaded[key]
