"""`ZapAuthenticator`: binds a process's sockets, and answers libzmq's question (ZAP) who may connect over TCP.

    ROUTER, inproc://zeromq.zap.01, bound in the process's context with the first TCP socket

A TCP socket's ZAP domain is the name of its `Listener`. The domain is enforced, so libzmq refuses a connection without
an answer, and peers that do not speak ZeroMQ. The process's own loop answers. (`zmq.auth` uses a thread, has no roles,
and requires an address list for CURVE as well as for plaintext.)
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

import zmq

from ..config import SERVICE_VARIABLE
from ..system.open_files import raise_open_files
from ..wire.async_socket import AsyncSocket
from ..wire.connection_guard import guard
from ..wire.messages.base import MAX_FRAMES, KeyRole
from ..wire.sockets import NOBLOCK, bind, check_private, is_loopback, receive_rest
from .allow_list import AllowList
from .rights import ANYBODY, Listener, Sender

if TYPE_CHECKING:
    from collections.abc import Callable

    from .keyring import Keyring

ZAP = "inproc://zeromq.zap.01"
HANDSHAKE_MS = 5000
"""Longest handshake: a connection that says nothing must not keep its descriptor."""
BATCH = 256
OF_A_NODE = (Listener.STAGE_INBOX, Listener.BLOCKS, Listener.ENGINE, Listener.WEIGHTS)
"""The listeners of stage processes, engine hosts and trainers; the others are the brokers'."""
LOG_EVERY_S = 1.0
"""Refusals beyond one in this time are only counted: an attacker must not fill the disk."""

PLAINTEXT = (
    "plaintext to and from other machines: %s has no keys; any machine that reaches it may do and read everything"
)

log = logging.getLogger("prorl.security")


class ZapAuthenticator:
    """Binds a process's sockets and decides who may connect to them."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keyring: Keyring | None,
        *,
        insecure: bool = False,
        allow_list: AllowList | None = None,
    ) -> None:
        raise_open_files()
        self.allow_list = allow_list or AllowList(keyring, insecure=insecure)
        self._context = context
        self._keyring = keyring
        self._insecure = insecure
        self._zap: zmq.Socket[bytes] | None = None
        self._line: AsyncSocket | None = None
        self._warned = False
        self._refused = 0
        self._told_at = -LOG_EVERY_S

    def bind(self, socket: zmq.Socket[bytes], endpoint: str, listener: Listener) -> str:
        """Bind a socket as one of the listeners, and give the endpoint that it got.

        Raises:
            InvalidEndpoint: it cannot be bound, or is TCP beyond loopback without keys or `insecure`.
            EndpointInUse: another process serves it.
        """
        if endpoint.startswith("tcp://"):
            if self._zap is None:
                self._zap = self._context.socket(zmq.ROUTER)
                self._zap.linger = 0
                self._zap.bind(ZAP)
            socket.setsockopt(zmq.ZAP_DOMAIN, listener.encode())
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
            if self._keyring is not None:
                self._keyring.serve(socket)
            elif not self._insecure:
                check_private(endpoint, KeyRole.STAGE if listener in OF_A_NODE else KeyRole.SERVICE)
            elif not is_loopback(endpoint) and not self._warned:
                self._warned = True
                if SERVICE_VARIABLE not in os.environ:  # else `prorl serve` has said so, for all of its processes
                    log.warning(PLAINTEXT, endpoint)
        guard(socket)
        return bind(socket, endpoint, insecure=self._insecure or self._keyring is not None)

    def curve_key(self, endpoint: str) -> str:
        """Return the public key that peers of a socket bound at `endpoint` have to know; empty: none."""
        return self._keyring.own.public_key if self._keyring is not None and endpoint.startswith("tcp://") else ""

    def receive(self, socket: zmq.Socket[bytes], copied: int = MAX_FRAMES) -> tuple[Sender, list[bytes | zmq.Frame]]:
        """Receive one message from a bound socket, as `sockets.receive` does, and say whose it is.

        Raises:
            zmq.Again: there is none.
            MalformedMessage: it has too many frames.
        """
        first = socket.recv(NOBLOCK, copy=False)
        sender = ANYBODY if self._keyring is None else self.sender(first)
        return sender, receive_rest(socket, first, copied)

    def sender(self, frame: bytes | zmq.Frame) -> Sender:
        """Say whose message this is a frame of, received without a copy."""
        if self._keyring is None:
            return ANYBODY
        if isinstance(frame, bytes):
            raise TypeError("a frame that was copied does not know whose it is")
        try:
            return self.allow_list.sender(str(frame.get("User-Id")))
        except zmq.ZMQError:
            return ANYBODY  # it came by ipc, of which ZAP is not asked

    def look_again(self, sender: Sender) -> Sender:
        """Say who a sender is now: its key may have been revoked since."""
        return self.allow_list.sender(sender.user_id)

    # The loop that answers --------------------------------------------------------------------------------------------

    def register(self, register: Callable[[zmq.Socket[bytes], Callable[[], None]], None]) -> None:
        """Have a broker's loop answer (see `Loop.register`)."""
        if self._zap is not None:
            register(self._zap, self.drain)

    def attend(self) -> None:
        """Have the running asyncio loop answer, until `close`."""
        if self._zap is not None:
            self._line = AsyncSocket(self._zap, self._receive, copied=MAX_FRAMES)

    def drain(self) -> None:
        """Answer what has been asked."""
        if self._zap is None:
            return
        for _ in range(BATCH):
            try:
                frames = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._zap.send_multipart(self.answer(frames))

    def close(self) -> None:
        """Stop answering, so that new connections fail. Idempotent."""
        if self._line is not None:
            self._line.close()
        elif self._zap is not None:
            self._zap.close()

    def answer(self, frames: list[bytes]) -> list[bytes]:
        """Answer one question of libzmq's (ZAP 1.0), the envelope included."""
        envelope, (version, request_id, domain, address, _, mechanism) = frames[:2], frames[2:8]
        listener, peer = domain.decode("ascii", "replace"), address.decode("ascii", "replace")
        verdict = self.allow_list.judge(listener, peer, mechanism, frames[8:])
        if verdict.user_id is None:
            self._tell(f"refused a connection from {peer} to {listener}: {verdict.reason}")
            return [*envelope, version, request_id, b"400", b"not allowed", b"", b""]
        return [*envelope, version, request_id, b"200", b"OK", verdict.user_id.encode(), b""]

    def _receive(self, frames: list[bytes | zmq.Frame]) -> None:
        if self._line is not None:
            self._line.send(self.answer([frame if isinstance(frame, bytes) else frame.bytes for frame in frames]))

    def _tell(self, refusal: str) -> None:
        self._refused += 1
        if time.monotonic() >= self._told_at + LOG_EVERY_S:
            more = f" (and {self._refused - 1} before it)" if self._refused > 1 else ""
            log.warning("%s%s", refusal, more)
            self._told_at, self._refused = time.monotonic(), 0
