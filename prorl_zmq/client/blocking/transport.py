"""What the blocking client waits with. `asynchronous.transport` has the same names; both are written by hand.

A client is for one thread, so its `Lock` locks nothing.
"""

from __future__ import annotations

import contextlib
import math
import time
from contextlib import nullcontext as Lock  # noqa: N812 - named as in asyncio
from time import sleep
from typing import TYPE_CHECKING, Any, TypeVar

import zmq

from ...errors import Closed
from ...security.handshake import Handshake
from ...security.keyring import connect_to_service
from ...wire import codec
from ...wire.sockets import open_socket, receive

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...security.keyring import Keyring

__all__ = ["Lock", "RequestSocket", "in_thread", "sleep"]

Result = TypeVar("Result")

SEND_MS = 1000
"""Longest wait to hand a request to libzmq; only a connection that is being refused makes it wait at all."""


def in_thread(call: Callable[..., Result], *args: Any) -> Result:
    """Call it here: this thread has nothing else to do."""
    return call(*args)


class RequestSocket:
    """A REQ socket on which a request may be sent twice. One request at a time, by one thread.

    When the other side refuses our key, `receive` raises `NotAllowed`, and the next `send` connects again.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keyring: Keyring | None) -> None:
        self._socket = open_socket(context, zmq.REQ)
        self._socket.sndtimeo = SEND_MS
        self.handshake = Handshake(self._socket, endpoint, keyring)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if endpoint.startswith("tcp://"):
            self._poller.register(self.handshake.watch(), zmq.POLLIN)
        try:
            connect_to_service(self._socket, endpoint, keyring)
        except BaseException:
            self.close()
            raise

    def send(self, frames: Sequence[bytes]) -> None:
        if self._socket.closed:
            raise Closed("the client was closed")
        self.handshake.drain()
        if self.handshake.refused:
            self.handshake.renew()
        with contextlib.suppress(zmq.Again):  # refused at this moment: the wait for the reply will say so
            self._socket.send_multipart(frames)

    def receive(self, request_id: str, until: float) -> list[bytes | zmq.Frame] | None:
        """Return the reply to a request; None if there is none by `until`, on the clock `time.monotonic`."""
        while True:
            left_s = until - time.monotonic()
            # Rounded up, and checked afterwards, since libzmq's clock has whole milliseconds: a wait that ends before
            # `until` makes the caller send the request again and again in its last millisecond.
            ready = dict(self._poller.poll(max(0, math.ceil(1000 * left_s))))
            if not ready:
                if time.monotonic() < until:
                    continue
                return None
            self.handshake.drain()
            if self.handshake.refused:
                raise self.handshake.error()
            if self._socket not in ready:
                continue
            try:
                frames = receive(self._socket, copied=1)
            except zmq.Again:
                continue  # it was the late reply to an earlier sending, which REQ_CORRELATE drops
            if codec.request_id(codec.unpack(frames[0])) in (request_id, "unknown"):  # type: ignore[arg-type]
                return frames

    def close(self) -> None:
        self.handshake.close()
        self._socket.close()
