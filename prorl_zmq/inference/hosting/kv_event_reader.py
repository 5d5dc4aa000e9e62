"""`KvEventReader`: subscribes to the KV events of the host's own engine, in vLLM's form, and keeps a `PrefixIndex`.

    PUB of the engine     topic, number, batch
    ROUTER of the engine  empty, first number  ->  empty, topic, number, batch, repeated; at the end, number -1

Numbers are 8 bytes, big-endian. The sockets are drained as fast as the loop runs.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

import zmq

from ...security.keyring import connect_to_peer
from ...wire.async_socket import AsyncSocket
from ...wire.sockets import PROMPT_FRAME_BYTES, open_socket
from .frames import frame_bytes
from .prefix_index import PrefixIndex

if TYPE_CHECKING:
    from ..engine import KvEventSource

ANSWER_S = 10.0
"""Longest wait for batches that were asked for again."""
NUMBER_BYTES = 8

log = logging.getLogger("prorl.engine")


class KvEventReader:
    """Reads until it is closed; made and used on a running loop.

    Raises:
        InvalidEndpoint: one of the engine's endpoints is malformed, or another account could answer there.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], source: KvEventSource) -> None:
        self.index = PrefixIndex(source.block_tokens)
        self._loop = asyncio.get_running_loop()
        self._giving_up: asyncio.TimerHandle | None = None
        with ExitStack() as stack:
            published = stack.enter_context(open_socket(context, zmq.SUB, PROMPT_FRAME_BYTES))
            published.subscribe(b"")
            connect_to_peer(published, source.endpoint, "", None)
            asked = stack.enter_context(open_socket(context, zmq.DEALER, PROMPT_FRAME_BYTES))
            connect_to_peer(asked, source.replay, "", None)
            stack.pop_all()
        self._published = AsyncSocket(published, self._note_live)
        self._asked = AsyncSocket(asked, self._note_again)
        self._ask()

    def close(self) -> None:
        """Stop reading; may be repeated."""
        self._published.close()
        self._asked.close()
        if self._giving_up is not None:
            self._giving_up.cancel()

    def _ask(self) -> None:
        self._asked.send([b"", self.index.next.to_bytes(NUMBER_BYTES, "big")])
        self._giving_up = self._loop.call_later(ANSWER_S, self._give_up)

    def _give_up(self) -> None:
        log.warning("the engine did not repeat its KV events within %g s", ANSWER_S)
        self.index.give_up()

    def _note_live(self, frames: list[bytes | zmq.Frame]) -> None:
        message = [frame_bytes(frame) for frame in frames]
        if len(message) == 3 and len(message[1]) == NUMBER_BYTES:
            _, number, batch = message
            if self.index.note_live(int.from_bytes(number, "big"), batch):
                self._ask()

    def _note_again(self, frames: list[bytes | zmq.Frame]) -> None:
        message = [frame_bytes(frame) for frame in frames]
        if len(message) != 4 or len(message[2]) != NUMBER_BYTES:
            return
        number = int.from_bytes(message[2], "big", signed=True)
        if number >= 0:
            self.index.note_again(number, message[3])
            return
        assert self._giving_up is not None
        self._giving_up.cancel()
        if self.index.end_answer():
            self._ask()
