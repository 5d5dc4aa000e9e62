"""An asyncio client's line to one broker or engine host: a DEALER socket with many requests at once.

As `request_line`: a request is sent again while no reply comes, until the call's time is up. Whoever opened the line
closes it; what waits then for a reply ends with `Closed`.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import zmq

from ..errors import Closed, MalformedMessage, RequestTimeout
from ..security.peer_connection import Line
from ..wire import codec
from ..wire.sockets import MAX_FRAME_BYTES
from .requests import RESEND_S, read_reply

if TYPE_CHECKING:
    from ..security.keyring import Keyring


class AsyncRequestConnection:
    """A DEALER socket whose replies find their requests by id; a request is sent again while no reply comes.

    Args:
        context: the client's.
        endpoint: of the other side.
        keyring: ours; None: plaintext.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keyring: Keyring | None) -> None:
        self._endpoint = endpoint
        self._pending: dict[str, asyncio.Future[list[bytes | zmq.Frame]]] = {}
        self._socket = Line(
            context,
            zmq.DEALER,
            endpoint,
            keyring,
            self._receive,
            copied=2,
            on_refused=self._refused,
            limit_bytes=MAX_FRAME_BYTES,
        )

    async def ask(self, frames: list[bytes], request_id: str, until: float) -> Any:
        """Send a request and give what the reply's first frame says; see `RequestConnection.ask`."""
        return read_reply(await self.ask_frames(frames, request_id, until))

    async def ask_frames(
        self, frames: list[bytes], request_id: str, until: float, held_s: float = 0.0
    ) -> list[bytes | zmq.Frame]:
        """Send a request and give the frames of its reply, held for up to `held_s`; see `RequestConnection.ask`."""
        future: asyncio.Future[list[bytes | zmq.Frame]] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = future
        started = time.monotonic()
        try:
            while True:
                self._socket.send([b"", *frames])
                left = min(until - time.monotonic(), held_s + RESEND_S)
                done, _ = await asyncio.wait([future], timeout=max(0.0, left))
                if done:
                    return future.result()
                if time.monotonic() >= until:
                    waited = time.monotonic() - started
                    why = self._socket.handshake.problem or "is the service running? (`prorl serve`)"
                    message = f"no reply from {self._endpoint} within {waited:.1f} s; {why}"
                    raise RequestTimeout(message, timeout_s=waited)
        finally:
            del self._pending[request_id]

    def close(self) -> None:
        """Close the socket: who waits for a reply gets `Closed`."""
        self._socket.close()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(Closed("the client was closed"))

    def _refused(self) -> None:
        for future in self._pending.values():
            if not future.done():
                future.set_exception(self._socket.handshake.error())

    def _receive(self, frames: list[bytes | zmq.Frame]) -> None:
        try:
            request_id = codec.request_id(codec.unpack(frames[1]))  # type: ignore[arg-type]
        except (MalformedMessage, IndexError):
            return  # the request is sent again
        future = self._pending.get(request_id)
        if future is not None and not future.done():
            future.set_result(frames[1:])
