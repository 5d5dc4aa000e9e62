"""Waiting primitives of the blocking client. `asynchronous.transport` has the same names; both are written by hand.

A client is for one thread, so its `Lock` locks nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from contextlib import nullcontext as Lock  # noqa: N812 - named as in asyncio
from time import sleep
from typing import TYPE_CHECKING, Any, TypeVar

import zmq

from ...errors import Closed
from ...security.handshake import Handshake
from ...wire import codec
from ...wire.requester import RESEND_S, Request, Requester
from ...wire.sockets import receive

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...security.keyring import Keyring

__all__ = ["Lock", "RequestConnection", "in_thread", "sleep"]

Result = TypeVar("Result")

log = logging.getLogger("prorl.client")

SEND_MS = 1000
"""Longest wait to pass a request to libzmq, which only waits while the connection is being refused."""


def in_thread(call: Callable[..., Result], *args: Any) -> Result:
    """Call it in this thread, which has nothing else to do."""
    return call(*args)


class RequestConnection:
    """A REQ socket that connects to a broker. One request at a time, by one thread.

    Args, errors and methods are those of `security.request_connection`. When the other side refuses the client's key,
    the request fails, and the next one reconnects.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keyring: Keyring | None,
        find: Callable[[], str] | None = None,
        *,
        resend_s: float = RESEND_S,
        hint: str = "is the service running? (`prorl serve`)",
    ) -> None:
        self._requester = Requester(endpoint, time.monotonic(), find, resend_s=resend_s, hint=hint)
        self._handshake = Handshake(context, zmq.REQ, endpoint, keyring)
        self._socket = self._handshake.socket
        self._socket.sndtimeo = SEND_MS
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if self._handshake.events is not None:
            self._poller.register(self._handshake.events, zmq.POLLIN)

    def ask_frames(
        self, message: Any, until: float, payload: Sequence[bytes] = (), held_s: float = 0.0, *, warns: bool = False
    ) -> list[bytes | zmq.Frame]:
        """Send a request with its payload frames, and return the frames of its reply."""
        frames = [codec.encode(message), *payload]
        request = Request(time.monotonic(), until, held_s, warns)
        reply = None
        while reply is None:
            step = self._requester.step(request, time.monotonic(), self._handshake.problem)
            if step.move_to:
                self._handshake.renew(step.move_to)
            if step.warning:
                log.warning("%s", step.warning)
            if step.error is not None:
                raise step.error
            if step.send:
                self._send(frames)
            reply = self._receive(message.request_id, self._requester.wake_at(request))
        return reply

    def close(self) -> None:
        self._handshake.close()

    def _send(self, frames: Sequence[bytes]) -> None:
        if self._socket.closed:
            raise Closed("the client was closed")
        self._handshake.drain()
        if self._handshake.refused:
            self._handshake.renew()
        with contextlib.suppress(zmq.Again):  # refused right now: the wait for the reply reports that
            self._socket.send_multipart(frames)

    def _receive(self, request_id: str, until: float) -> list[bytes | zmq.Frame] | None:
        """Return the reply to a request; None if there is none by `until`."""
        while time.monotonic() < until or self._poller.poll(0):
            # Rounded up, since libzmq's clock has whole milliseconds.
            ready = dict(self._poller.poll(max(0, math.ceil(1000 * (until - time.monotonic())))))
            self._handshake.drain()
            if self._handshake.refused:
                raise self._handshake.error()
            if self._socket not in ready:
                continue
            try:
                frames = receive(self._socket, copied=1)
            except zmq.Again:
                continue  # a late reply to an earlier send, which REQ_CORRELATE drops
            if codec.request_id(codec.unpack(frames[0])) in (request_id, "unknown"):  # type: ignore[arg-type]
                return frames
        return None
