"""A blocking client's line to one broker or engine host: a REQ socket on which a request may be sent twice.

The other side may be restarted at any time, and what was on its way to it is lost; so while no reply comes, the same
request goes out again, until the call's time is up. Replies to earlier requests are dropped. One request at a time, by
one thread; whoever opened the line closes it, or the context that it was opened in.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Self

import zmq

from ..errors import Closed, RequestTimeout
from ..security.handshake import Handshake
from ..security.keyring import connect_to_service
from ..wire import codec
from ..wire.sockets import open_socket, receive
from .requests import RESEND_S, read_reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..security.keyring import Keyring

SEND_MS = 1000
"""Longest wait to hand a request to libzmq; only a connection that is being refused makes it wait at all."""


class RequestConnection:
    """A REQ socket that sends a request again while no reply comes, and knows which reply is its own.

    Of a connection that the other side refuses it says so at once, and tries it again with the next request.

    Args:
        context: the client's.
        endpoint: of the other side.
        keyring: ours; None: plaintext.
        connect: connects the socket there.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keyring: Keyring | None,
        connect: Callable[[zmq.Socket[bytes]], None],
    ) -> None:
        self._socket = open_socket(context, zmq.REQ)
        self._socket.sndtimeo = SEND_MS
        self._endpoint = endpoint
        self._handshake = Handshake(self._socket, endpoint, keyring)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if endpoint.startswith("tcp://"):
            self._poller.register(self._handshake.watch(), zmq.POLLIN)
        try:
            connect(self._socket)
        except BaseException:
            self.close()
            raise

    @classmethod
    def to_service(cls, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keyring: Keyring | None) -> Self:
        """Open the line to a broker."""
        return cls(context, endpoint, keyring, lambda socket: connect_to_service(socket, endpoint, keyring))

    def ask(self, frames: list[bytes], request_id: str, until: float) -> Any:
        """Send a request and give what the reply's first frame says.

        Args:
            frames: the request.
            request_id: its id.
            until: when, by `time.monotonic`, to give up.

        Raises:
            ProrlError: what the other side refused the request with.
            RequestTimeout: no reply came.
            Closed: the client was closed.
        """
        return read_reply(self.ask_frames(frames, request_id, until))

    def ask_frames(
        self, frames: list[bytes], request_id: str, until: float, held_s: float = 0.0
    ) -> list[bytes | zmq.Frame]:
        """Send a request and give the frames of its reply, which may be held for `held_s`; see `ask`."""
        started = time.monotonic()
        while True:
            self.send(frames)
            received = self.receive(request_id, min(until, time.monotonic() + held_s + RESEND_S))
            if received is not None:
                return received
            if time.monotonic() >= until:
                waited = time.monotonic() - started
                why = self._handshake.problem or "is the service running? (`prorl serve`)"
                message = f"no reply from {self._endpoint} within {waited:.1f} s; {why}"
                raise RequestTimeout(message, timeout_s=waited)

    def send(self, frames: list[bytes]) -> None:
        """Send a request once; `reply` or `receive` waits for what comes back.

        Raises:
            Closed: the client was closed.
        """
        if self._socket.closed:
            raise Closed("the client was closed")
        self._handshake.drain()
        if self._handshake.refused:
            self._handshake.renew()
        with contextlib.suppress(zmq.Again):  # refused at this moment: the wait for the reply will say so
            self._socket.send_multipart(frames)

    def reply(self, request_id: str, until: float) -> Any:
        """Give what the reply to a request says; None if none came in time.

        Raises:
            ProrlError: what the other side refused the request with.
        """
        frames = self.receive(request_id, until)
        return read_reply(frames) if frames is not None else None

    def receive(self, request_id: str, until: float) -> list[bytes | zmq.Frame] | None:
        """Give the reply to a request; None if none came in time. Replies to earlier ones are dropped."""
        while ready := dict(self._poller.poll(max(0, int(1000 * (until - time.monotonic()))))):
            self._handshake.drain()
            if self._handshake.refused:
                raise self._handshake.error()
            if self._socket not in ready:
                continue
            try:
                frames = receive(self._socket, copied=1)
            except zmq.Again:
                continue  # it was the late reply to an earlier sending, which REQ_CORRELATE drops
            if codec.request_id(codec.unpack(frames[0])) in (request_id, "unknown"):  # type: ignore[arg-type]
                return frames
        return None

    def close(self) -> None:
        """Close the socket; what is on its way is lost."""
        self._handshake.close()
        self._socket.close()
