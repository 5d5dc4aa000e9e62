"""A backend's registration with the backend broker: how an engine host gets onto its list, and stays there.

    DEALER ⇄ backend broker's ROUTER      `AddBackend`, then `BackendAlive` with every heartbeat;
                                          with keys over TCP, `ListKeys` before each

A broker that was restarted says `unknown_backend`, and is asked again at once. One that does not answer gets a new
socket after a few heartbeats, so that old ones do not pile up. While the name is taken by another backend there are no
heartbeats, which would keep that one's registration alive, but the request to be registered again and again.
A host on another node than the service's has the list of keys that are let in from the broker; before it has one, it
does not register, since nobody could use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import msgspec
import zmq

from ...errors import MalformedMessage, UnknownBackend
from ...security.peer_connection import PeerConnection
from ...wire import codec
from ...wire.messages.backends import (
    AddBackend,
    AnyBackendReply,
    BackendAlive,
    DrainBackend,
    EngineLoad,
    KeyList,
    ListKeys,
    RemoveBackend,
)
from ...wire.messages.base import Refused, new_id
from ...wire.sockets import CONTROL_FRAME_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...security.allow_list import AllowList
    from ...security.keyring import Keyring
    from ...wire.messages.backends import AnyBackendReply as Answer
    from ...wire.messages.backends import AnyBackendRequest, Backend

UNANSWERED_LIMIT = 5
"""Heartbeats without an answer after which the line to the backend broker is opened anew."""
PROBLEM_LIMIT = 1000
"""Characters of a problem that are told."""
GOODBYE_S = 1.0
"""Longest wait, when closing, for the backend broker to confirm."""

log = logging.getLogger("prorl.engine")


class Registration:
    """Keeps one backend registered with the backend broker."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        backend: Backend,
        keyring: Keyring | None = None,
        allow_list: AllowList | None = None,
        find: Callable[[], str] | None = None,
    ) -> None:
        self._find = find
        self._context = context
        self._keyring = keyring
        self._allow_list = allow_list if allow_list is not None and backend.curve_key else None
        self._endpoint = endpoint
        self._backend = backend
        self._unanswered = 0
        self._load = EngineLoad()
        self._problem = ""
        self._weight_version = backend.weight_version
        self._registered = False
        self._adding = ""
        """Id of the latest `AddBackend`: its answer says whether we are registered."""
        self._leaving = ""
        self._left = asyncio.Event()
        self._socket = self._open()

    def announce(self, weight_version: int, load: EngineLoad | None = None, problem: str = "") -> None:
        """Send one heartbeat now, or ask to be registered."""
        if load is not None:
            self._heartbeat(load, problem)
        self._weight_version = weight_version
        backend = self._backend
        if self._allow_list is not None and self._allow_list.is_told:
            self._send(ListKeys(new_id(), self._allow_list.list_state))
            if not self._allow_list.list_state:
                return
        if self._registered:
            self._send(BackendAlive(new_id(), backend.backend_id, weight_version, self._load, self._problem))
        else:
            current = msgspec.structs.replace(backend, weight_version=weight_version)
            self._adding = new_id()
            self._send(AddBackend(self._adding, current, heartbeats=True))

    def _heartbeat(self, load: EngineLoad, problem: str) -> None:
        self._load, self._problem = load, problem[:PROBLEM_LIMIT]
        if self._unanswered >= UNANSWERED_LIMIT:
            log.warning("the backend broker at %s does not answer; connecting again", self._endpoint)
            self._socket.close()
            self._endpoint = (self._find() if self._find is not None else "") or self._endpoint
            self._socket = self._open()
        self._unanswered += 1

    async def close(self) -> None:
        """Take the backend off the list, waiting a little for the answer, and close the socket."""
        if self._registered and self._unanswered < UNANSWERED_LIMIT:
            self._leaving = new_id()
            self._send(DrainBackend(new_id(), self._backend.backend_id))
            self._send(RemoveBackend(self._leaving, self._backend.backend_id))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._left.wait(), GOODBYE_S)
        self._socket.close()

    def _open(self) -> PeerConnection:
        self._unanswered = 0
        return PeerConnection(
            self._context,
            zmq.DEALER,
            self._endpoint,
            self._keyring,
            self._receive,
            copied=2,
            limit_bytes=CONTROL_FRAME_BYTES,
        )

    def _send(self, request: AnyBackendRequest) -> None:
        self._socket.send([b"", codec.encode(request)])

    def _receive(self, frames: list[bytes | zmq.Frame]) -> None:
        try:
            reply: Answer = codec.decode(
                frames[-1] if isinstance(frames[-1], bytes) else frames[-1].bytes, AnyBackendReply
            )
        except MalformedMessage as error:
            log.warning("the backend broker's answer is malformed: %s", error)
            return
        self._unanswered = 0
        if isinstance(reply, KeyList):
            self._learn(reply)
        elif reply.request_id == self._leaving:
            self._left.set()
        elif isinstance(reply, Refused):
            if reply.error.code == UnknownBackend.code:
                if self._registered:
                    self._registered = False
                    self.announce(self._weight_version)
            else:
                log.warning("the backend broker refused: %s", reply.error.message)
        elif reply.request_id == self._adding:
            self._registered = True

    def _learn(self, reply: KeyList) -> None:
        if self._allow_list is None or reply.keys is None:
            return
        first = not self._allow_list.list_state
        self._allow_list.learn(reply.keys, reply.state)
        if first:
            self.announce(self._weight_version)
