"""The backend broker's connections to engine hosts, for requests about weights only.

    DEALER, one per host that has been asked and has not answered; CURVE with the key that the host announced

A host that was restarted under another key gets a new socket. A connection that is refused for good fails the calls
on it at once; one that was lost and is there again has them sent again. The sockets have a ZeroMQ context of their
own: libzmq looks up hosts' names in its own thread, and there is one per context.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import zmq

from ...errors import EngineFailed, MalformedMessage, ProrlError, from_info
from ...security.handshake import Handshake
from ...security.keyring import connect_to_peer
from ...wire import codec
from ...wire.messages.base import Refused
from ...wire.messages.engines import AnyEngineReply, EngineReady
from ...wire.sockets import CONTROL_FRAME_BYTES, NOBLOCK, open_socket, receive, send
from ..loop import MAX_SOCKETS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ...security.keyring import Keyring
    from ..loop import Loop
    from .weight_requests import EngineAddress, EngineCall

BATCH = 256
"""Replies of one host that are read before other sockets get their turn."""


class EngineConnections:
    def __init__(
        self,
        loop: Loop,
        keyring: Keyring | None,
        on_answer: Callable[[str, ProrlError | None], None],
        on_refused: Callable[[EngineAddress, ProrlError], None],
        on_return: Callable[[EngineAddress], None],
    ) -> None:
        self._loop = loop
        self._keyring = keyring
        self._on_answer = on_answer
        """Gets a request's id, and None or why it was not done."""
        self._on_refused = on_refused
        """No connection will come about."""
        self._on_return = on_return
        """A connection that was lost is there again."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, min(MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT)))
        self._connections: dict[EngineAddress, _Connection] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def send(self, call: EngineCall) -> None:
        connection = self._connections.get(call.address)
        if connection is None:
            try:
                connection = _Connection(self._context, call.address, self._keyring)
            except zmq.ZMQError as error:
                raise EngineFailed(f"no connection to {call.address.endpoint}: {error.strerror}") from error
            self._connections[call.address] = connection
            self._loop.register(connection.socket, partial(self._receive, connection))
            self._loop.register(connection.monitor, partial(self._watch, connection))
        try:
            send(connection.socket, [b"", codec.encode(call.request)], NOBLOCK)
        except zmq.Again:
            raise EngineFailed(f"the engine host at {call.address.endpoint} takes no messages") from None

    def keep_only(self, addresses: Collection[EngineAddress]) -> None:
        for address in self._connections.keys() - set(addresses):
            connection = self._connections.pop(address)
            self._loop.unregister(connection.socket)
            self._loop.unregister(connection.monitor)
            connection.close()

    def close(self) -> None:
        self.keep_only(())
        self._context.destroy(linger=0)

    def _receive(self, connection: _Connection) -> None:
        for _ in range(BATCH):
            if connection.socket.closed:
                return
            try:
                frames = receive(connection.socket, copied=2)
            except zmq.Again:
                return
            except MalformedMessage:
                continue
            if len(frames) == 2:
                self._answered(frames[1])

    def _answered(self, frame: bytes | zmq.Frame) -> None:
        request_id = "unknown"
        error: ProrlError | None
        try:
            content = codec.unpack(frame)  # type: ignore[arg-type]
            request_id = codec.request_id(content)
            reply: AnyEngineReply = codec.convert(content, AnyEngineReply)
            error = from_info(reply.error) if isinstance(reply, Refused) else None
            if error is None and not isinstance(reply, EngineReady):
                error = EngineFailed(f"its engine host answered with {type(reply).__name__}")
        except MalformedMessage as malformed:
            error = malformed
        self._on_answer(request_id, error)

    def _watch(self, connection: _Connection) -> None:
        kinds = connection.handshake.drain()
        if connection.handshake.refused:
            self._on_refused(connection.address, connection.handshake.error())
        elif connection.is_back(kinds):
            self._on_return(connection.address)


class _Connection:
    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: EngineAddress, keyring: Keyring | None
    ) -> None:
        self.address = address
        self.socket = open_socket(context, zmq.DEALER, CONTROL_FRAME_BYTES)
        self.handshake = Handshake(self.socket, address.endpoint, keyring)
        self._was_lost = False
        try:
            self.monitor = self.handshake.watch()
            connect_to_peer(self.socket, address.endpoint, address.curve_key, keyring)
        except BaseException:
            self.close()
            raise

    def is_back(self, kinds: list[zmq.Event]) -> bool:
        back = False
        for kind in kinds:
            if kind == zmq.Event.DISCONNECTED:
                self._was_lost, back = True, False
            elif kind == zmq.Event.HANDSHAKE_SUCCEEDED and self._was_lost:
                self._was_lost, back = False, True
        return back

    def close(self) -> None:
        self.handshake.close()
        self.socket.close(linger=0)
