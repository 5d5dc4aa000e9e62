"""`Registration`: keeps an engine host on the backend broker's list.

    DEALER ⇄ backend broker's ROUTER      `AddBackend`, then `BackendAlive` with every heartbeat;
                                          with keys over TCP, `ListKeys` before each;
                                          replies `BackendHeld` say how many rollouts the host has

A restarted broker answers `unknown_backend`, and the host registers again at once. After `UNANSWERED_LIMIT` heartbeats
without an answer the host reconnects, to the broker's current address. While another backend has the same name, the
host sends `AddBackend` instead of heartbeats, which would renew the other registration. A backend that is refused for
its settings ends the host (`refusal`). A host on another node than the service registers once the broker has sent it
the list of allowed keys.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import ConfigError, InvalidEndpoint, MalformedMessage, RequestTimeout, UnknownBackend, from_info
from ...security.request_connection import AsyncRequestConnection
from ...wire import codec
from ...wire.messages.backends import (
    AddBackend,
    AnyBackendReply,
    BackendAlive,
    BackendHeld,
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

    import zmq

    from ...errors import ProrlError
    from ...security.allow_list import AllowList
    from ...security.keyring import Keyring
    from ...wire.messages.backends import AnyBackendReply as Answer
    from ...wire.messages.backends import AnyBackendRequest, Backend
    from ...wire.messages.relay import CopyState

UNANSWERED_LIMIT = 5
"""Heartbeats without an answer after which the host reconnects to the backend broker."""
PROBLEM_LIMIT = 1000
"""Most characters of a reported problem."""
FINAL = frozenset({ConfigError.code, InvalidEndpoint.code})
"""Codes of refusals that another try would not change."""
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
        on_held: Callable[[BackendHeld], None] = lambda _: None,
    ) -> None:
        self._allow_list = allow_list if allow_list is not None and backend.curve_key else None
        self._backend = backend
        self._unanswered = 0
        self._load = EngineLoad()
        self._problem = ""
        self._adapters: dict[str, tuple[int, ...]] = {}
        self._room: int | None = None
        self._copy: CopyState | None = None
        self._resident: tuple[str, ...] | None = None
        self._resident_sent: tuple[str, ...] | None = None
        self._on_held = on_held
        self._weight_version = backend.weight_version
        self._registered = False
        self.refusal: ProrlError | None = None
        """Why the broker will never list the backend as it is; None: it may."""
        self._adding = ""
        """Id of the latest `AddBackend`; its answer says whether the host is registered."""
        self._connection = AsyncRequestConnection(
            context,
            endpoint,
            keyring,
            find,
            fail_if_refused=False,
            is_interim=self._receive,
            limit_bytes=CONTROL_FRAME_BYTES,
        )

    def announce(
        self,
        weight_version: int,
        load: EngineLoad | None = None,
        problem: str = "",
        adapters: dict[str, tuple[int, ...]] | None = None,
        room: int | None = None,
        copy: CopyState | None = None,
        resident: tuple[str, ...] | None = None,
    ) -> None:
        """Send one heartbeat now, or request registration; without a load, most is as in the last call."""
        if adapters is not None:
            self._adapters = adapters
        if load is not None:
            self._heartbeat(load, problem)
            self._room, self._copy, self._resident = room, copy, resident
        self._weight_version = weight_version
        backend = self._backend
        if self._allow_list is not None and self._allow_list.is_told:
            self._send(ListKeys(new_id(), self._allow_list.list_state))
            if not self._allow_list.list_state:
                return
        if self._registered:
            resident = self._resident if self._resident != self._resident_sent else None
            self._resident_sent = self._resident
            about = self._load, self._problem, self._adapters, self._room, self._copy, resident
            self._send(BackendAlive(new_id(), backend.backend_id, weight_version, *about))
        else:
            current = msgspec.structs.replace(backend, weight_version=weight_version, adapters=self._adapters)
            self._adding = new_id()
            self._resident_sent = None
            self._send(AddBackend(self._adding, current, heartbeats=True, room=self._room, copy=self._copy))

    def _heartbeat(self, load: EngineLoad, problem: str) -> None:
        self._load, self._problem = load, problem[:PROBLEM_LIMIT]
        if self._unanswered >= UNANSWERED_LIMIT:
            endpoint = self._connection.requester.endpoint
            log.warning("the backend broker at %s does not answer; connecting again", endpoint)
            self._connection.reconnect()
            self._unanswered = 0
            self._resident_sent = None
        self._unanswered += 1

    async def close(self) -> None:
        """Remove the backend from the list, waiting a little for the answer, and close the socket."""
        if self._registered and self._unanswered < UNANSWERED_LIMIT:
            self._registered = False  # a broker that has forgotten the backend must not get it again
            self._send(DrainBackend(new_id(), self._backend.backend_id))
            remove = RemoveBackend(new_id(), self._backend.backend_id)
            with contextlib.suppress(RequestTimeout):
                await self._connection.ask_frames(remove, time.monotonic() + GOODBYE_S)
        self._connection.close()

    def _send(self, request: AnyBackendRequest) -> None:
        self._connection.send([codec.encode(request)])

    def _receive(self, content: dict[str, Any]) -> bool:
        """Receive a reply; return whether it does not answer the request with its id."""
        try:
            reply: Answer = codec.convert(content, AnyBackendReply)
        except MalformedMessage as error:
            log.warning("the backend broker's answer is malformed: %s", error)
            return True
        self._unanswered = 0
        if isinstance(reply, KeyList):
            self._learn(reply)
        elif isinstance(reply, BackendHeld):
            self._on_held(reply)
        elif isinstance(reply, Refused):
            if reply.error.code == UnknownBackend.code:
                if self._registered:
                    self._registered = False
                    self.announce(self._weight_version)
            else:
                log.warning("the backend broker refused: %s", reply.error.message)
                if reply.request_id == self._adding and reply.error.code in FINAL:
                    self.refusal = from_info(reply.error)
        elif reply.request_id == self._adding:
            self._registered = True
        return False

    def _learn(self, reply: KeyList) -> None:
        if self._allow_list is None or reply.keys is None:
            return
        first = not self._allow_list.list_state
        self._allow_list.learn(reply.keys, reply.state)
        if first:
            self.announce(self._weight_version)
