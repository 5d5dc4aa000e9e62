"""`RequestSocket`: a DEALER to a broker on an asyncio loop, with many requests at once, whose replies find them by id.

A reply that no request waits for is dropped, as is one that cannot be read: the caller sends its request again when
`receive` returns without one.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import zmq

from ..errors import Closed, MalformedMessage
from ..wire import codec
from ..wire.sockets import MAX_FRAME_BYTES
from .peer_connection import PeerConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..errors import ProrlError
    from ..wire.sockets import Frame
    from .keyring import Keyring


class RequestSocket(PeerConnection):
    """A DEALER that connects to a broker; made on a running loop.

    With `fail_if_refused`, `receive` raises `NotAllowed` when the other side refuses our key; else it waits on. Replies
    of which `is_interim` is true, which is called with what the header of each says, do not end the wait.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keyring: Keyring | None,
        *,
        fail_if_refused: bool = True,
        is_interim: Callable[[dict[str, Any]], bool] = lambda _content: False,
        limit_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._waiting: dict[str, asyncio.Future[list[bytes | zmq.Frame]]] = {}
        self._is_interim = is_interim
        super().__init__(
            context,
            zmq.DEALER,
            endpoint,
            keyring,
            self._take_reply,
            copied=2,
            on_refused=self._refused if fail_if_refused else None,
            limit_bytes=limit_bytes,
        )

    def send(self, frames: Sequence[Frame]) -> None:
        super().send([b"", *frames])

    async def receive(self, request_id: str, until: float) -> list[bytes | zmq.Frame] | None:
        """Return the next reply to a request; None if there is none by `until`, on the clock `time.monotonic`."""
        reply = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait([reply], timeout=max(0.0, until - time.monotonic()))
            return reply.result() if reply.done() else None
        finally:
            del self._waiting[request_id]

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; what waits for a reply gets `Closed`. May be called again."""
        super().close(linger_ms)
        self._fail(Closed("the client was closed"))

    def _take_reply(self, frames: list[bytes | zmq.Frame]) -> None:
        try:
            content = codec.unpack(frames[1])  # type: ignore[arg-type]
        except (MalformedMessage, IndexError):
            return
        is_interim = self._is_interim(content)
        reply = self._waiting.get(codec.request_id(content))
        if reply is not None and not reply.done() and not is_interim:
            reply.set_result(frames[1:])

    def _refused(self) -> None:
        self._fail(self.handshake.error())

    def _fail(self, error: ProrlError) -> None:
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(error)
