"""`EngineConnections`: the backend broker's connections to engine hosts, for weight requests only.

    DEALER, one per host with unanswered requests; CURVE with the key that the host announced

A host that restarts with another key gets a new socket. A rejected connection fails its calls at once; after a lost
connection returns, its calls are resent. `WeightRequests` decides deadlines. The sockets have their own ZeroMQ context,
since libzmq resolves host names in the context's I/O thread.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import zmq

from ...errors import EngineFailed, MalformedMessage, ProrlError, from_info
from ...security.handshake import Handshake
from ...wire import codec
from ...wire.messages.base import Refused
from ...wire.messages.engines import AnyEngineReply, EngineReady
from ...wire.sockets import CONTROL_FRAME_BYTES, NOBLOCK, receive, send
from ..loop import MAX_SOCKETS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ...security.keyring import Keyring
    from ..loop import Loop
    from .weight_calls import EngineAddress, EngineCall

BATCH = 256
"""Most replies read from one host before other sockets are served."""


class EngineConnections:
    def __init__(
        self,
        loop: Loop,
        keyring: Keyring | None,
        on_answer: Callable[[str, ProrlError | None, EngineReady | None], None],
        on_refused: Callable[[EngineAddress, ProrlError], None],
        on_return: Callable[[EngineAddress], None],
    ) -> None:
        self._loop = loop
        self._keyring = keyring
        self._on_answer = on_answer
        """Called with the request's id, and the error or the reply."""
        self._on_refused = on_refused
        """Called when a connection is permanently rejected."""
        self._on_return = on_return
        """Called when a lost connection is back."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, min(MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT)))
        self._connections: dict[EngineAddress, Handshake] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def send(self, call: EngineCall) -> None:
        connection = self._connections.get(call.address)
        if connection is None:
            try:
                connection = self._opened(call.address)
            except zmq.ZMQError as error:
                raise EngineFailed(f"no connection to {call.address.endpoint}: {error.strerror}") from error
        try:
            send(connection.socket, [b"", codec.encode(call.request)], NOBLOCK)
        except zmq.Again:
            raise EngineFailed(f"the engine host at {call.address.endpoint} takes no messages") from None

    def keep_only(self, addresses: Collection[EngineAddress]) -> None:
        for address in self._connections.keys() - set(addresses):
            connection = self._connections.pop(address)
            self._loop.unregister(connection.socket)
            if connection.events is not None:
                self._loop.unregister(connection.events)
            connection.close()

    def close(self) -> None:
        self.keep_only(())
        self._context.destroy(linger=0)

    def _opened(self, address: EngineAddress) -> Handshake:
        endpoint, curve_key = address
        limit_bytes = CONTROL_FRAME_BYTES
        connection = Handshake(
            self._context, zmq.DEALER, endpoint, self._keyring, curve_key=curve_key, limit_bytes=limit_bytes, watch=True
        )
        self._connections[address] = connection
        self._loop.register(connection.socket, partial(self._receive, connection.socket))
        if connection.events is not None:
            self._loop.register(connection.events, partial(self._watch, address, connection))
        return connection

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(BATCH):
            if socket.closed:
                return
            try:
                frames = receive(socket, copied=2)
            except zmq.Again:
                return
            except MalformedMessage:
                continue
            if len(frames) == 2:
                self._answered(frames[1])

    def _answered(self, frame: bytes | zmq.Frame) -> None:
        request_id = "unknown"
        ready: EngineReady | None = None
        error: ProrlError | None
        try:
            content = codec.unpack(frame)  # type: ignore[arg-type]
            request_id = codec.request_id(content)
            reply: AnyEngineReply = codec.convert(content, AnyEngineReply)
            error = from_info(reply.error) if isinstance(reply, Refused) else None
            if isinstance(reply, EngineReady):
                ready = reply
            elif error is None:
                error = EngineFailed(f"its engine host answered with {type(reply).__name__}")
        except MalformedMessage as malformed:
            error = malformed
        self._on_answer(request_id, error, ready)

    def _watch(self, address: EngineAddress, connection: Handshake) -> None:
        is_up = connection.drain() > 0
        if connection.refused:
            self._on_refused(address, connection.error())
        elif is_up and connection.connections > 1:
            self._on_return(address)
