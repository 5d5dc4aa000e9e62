"""`BackendRegistry`: the registered backends, and records of those that are gone. Pure: no sockets, no clock, no file.

A silent engine host that promised heartbeats is removed, but the registry stores its weight version and draining flag:
a host that returns with older weights is behind until it has caught up. Of a host's version and a trainer's, the later
change counts. A host that was removed on request stays removed until it is added again.

`take_changes` returns changes for the journal, and `restore` reads them back. Restored hosts have one lease to send
their next heartbeat.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ...errors import ConfigError, InvalidEndpoint, UnknownBackend
from ...wire.messages.backends import EngineLoad
from ...wire.messages.base import POLICY
from ...wire.sockets import check_endpoint
from .backend_records import BackendRecord

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ...wire.messages.backends import AddBackend, Backend, BackendAlive, BackendStatus
    from ...wire.messages.relay import CopyState
    from .backend_heap import BackendHeap
    from .backend_records import Fate

SILENT_SHARE = 0.3
"""Share of the lease after which a silent host is replaced by a new one of the same name."""
ADOPTED_S = 3.0
"""Seconds after a restart of the broker within which stage processes report their assignments."""
LOST_LIMIT = 10_000
"""Most records of lost hosts, and of dismissed ones; the oldest is deleted first."""

log = logging.getLogger("prorl.backend_broker")


@dataclass(slots=True)
class _Host:
    heard: float
    reported: int | None
    """Weight version of the last message; None: the next message counts even if the version is the same."""
    load: EngineLoad
    adapters: Mapping[str, tuple[int, ...]]
    """The adapters of the last message."""
    copy: CopyState | None = None
    """Of the last heartbeat."""
    of_before: bool = False
    """Whether the host belonged to an earlier service and has not been heard in this one."""
    closed_until: float = -math.inf
    """Until then it gets no new rollouts: the stage processes have not reported yet which ones it has."""


class BackendRegistry:
    """Adds backends to a heap and removes them; a silent engine host keeps its registration for one lease.

    Args:
        heap: of the backends.
        lease_s: the lease.
        heeds_room: whether jobs wait for a backend that has no room.
    """

    def __init__(self, heap: BackendHeap, lease_s: float, *, heeds_room: bool = True) -> None:
        self._heap = heap
        self._heeds_room = heeds_room
        self._lease_s = lease_s
        self._hosts: dict[str, _Host] = {}
        self._lost: dict[str, BackendRecord] = {}
        """Hosts that fell silent; they are not in the heap."""
        self._dismissed: dict[str, BackendRecord] = {}
        """Hosts that were removed on request, in order of removal."""
        self._changed: dict[str, None] = {}

    def add(self, request: AddBackend, now: float) -> None:
        backend = request.backend
        backend_id = backend.backend_id
        check_backend(backend)
        if backend.name in self._heap.adapters:
            message = (
                f"{backend.name} is the model of an adapter: give the backend another name, or remove the model first"
            )
            raise ConfigError(message, key="name")
        self._end_silent_namesake(request, now)
        lost = self._lost.get(backend_id)
        known = lost.backend.weight_version if lost is not None and lost.backend.name == backend.name else 0
        if backend_id in self._heap:
            of_before = backend_id in self._hosts and self._hosts[backend_id].of_before
            is_new = of_before or self._heap.member(backend_id).backend.name != backend.name
            known = 0 if is_new else self._heap.member(backend_id).known_version
        # A host reports what its process was started with; other clients state what is wanted.
        self._heap.add(backend, needed_version=known if request.heartbeats else 0)
        self._heap.adapters.registered(backend)
        for gone in (self._lost, self._dismissed):
            gone.pop(backend_id, None)
        self._changed[backend_id] = None
        if request.heartbeats:
            self._end_earlier_lives(backend)
            if lost is not None and lost.draining:  # falling silent does not undo the drain request
                self._heap.drain(backend_id)
            self._hosts[backend_id] = _Host(now, backend.weight_version, EngineLoad(), backend.adapters, request.copy)
            self._set_room(backend_id, request.room, now)
        elif backend_id in self._hosts:
            self._hosts[backend_id].reported = None

    def _end_earlier_lives(self, backend: Backend) -> None:
        """Remove hosts of other names at this backend's endpoint."""
        for other_id in [key for key in self._hosts if key != backend.backend_id]:
            if self._heap.member(other_id).backend.endpoint == backend.endpoint:
                log.warning("backend %s is gone: %s answers at its endpoint", other_id, backend.backend_id)
                self._lose(other_id)

    def _end_silent_namesake(self, request: AddBackend, now: float) -> None:
        """Remove a silent host that was restarted at another endpoint."""
        backend_id = request.backend.backend_id
        host = self._hosts.get(backend_id)
        if host is None or not request.heartbeats or host.heard + SILENT_SHARE * self._lease_s > now:
            return
        if self._heap.member(backend_id).backend.endpoint != request.backend.endpoint:
            log.warning("backend %s is silent, and one of its name is at %s now", backend_id, request.backend.endpoint)
            self._lose(backend_id)
            if host.of_before:
                del self._lost[backend_id]

    def _lose(self, backend_id: str) -> None:
        self._lost[backend_id] = self._record(backend_id, "lost")
        self._take_off(backend_id)
        self._changed[backend_id] = None

    def host_alive(self, alive: BackendAlive, now: float) -> None:
        """Renew a registration; raise `UnknownBackend` if the host must register."""
        backend_id = alive.backend_id
        host = self._hosts.get(backend_id)
        if host is not None:
            host.heard = now
            if host.of_before:
                host.of_before = False
                self._changed[backend_id] = None
            host.load, host.copy = alive.load, alive.copy
            self._set_room(backend_id, alive.room, now)
            if alive.resident is not None:
                self._heap.warm.note_resident(backend_id, alive.resident)
            self._heap.set_problem(backend_id, alive.problem)
            if host.reported != alive.weight_version:  # a repeated version must not undo a trainer's change
                host.reported = alive.weight_version
                self._heap.set_weight_version(alive.weight_version, backend_id)
                self._changed[backend_id] = None
            if host.adapters != alive.adapters:
                host.adapters = alive.adapters
                self._heap.set_adapters(backend_id, alive.adapters)
                self._changed[backend_id] = None
        elif backend_id not in self._dismissed:
            raise UnknownBackend(f"backend {backend_id} is not registered", backend=backend_id)

    def _set_room(self, backend_id: str, room: int | None, now: float) -> None:
        known = self._heap.member(backend_id).room
        if room is not None and now < self._hosts[backend_id].closed_until:
            room = 0
        if room != known and self._heeds_room:
            self._heap.set_room(backend_id, room)
            if room is None or known is None:
                self._changed[backend_id] = None

    def drain(self, backend_id: str) -> None:
        self._heap.drain(backend_id)
        self._changed[backend_id] = None

    def remove(self, backend_id: str) -> None:
        if self._lost.pop(backend_id, None) is None:
            dismissed = self._record(backend_id, "dismissed") if backend_id in self._hosts else None
            self._take_off(backend_id)
            if dismissed is not None:
                self._dismissed[backend_id] = dismissed
        self._changed[backend_id] = None

    def clear(self) -> None:
        for backend_id in (*self._lost, *self._heap):
            self.remove(backend_id)

    def set_weight_version(self, weight_version: int, backend_id: str | None, model: str = POLICY) -> None:
        self._heap.set_weight_version(weight_version, backend_id, as_wanted=True, model=model)
        self._changed.update(dict.fromkeys(self._heap.trained(model) if backend_id is None else [backend_id]))

    def adapter_loaded(self, backend_id: str, model: str, version: int) -> None:
        """Record that a backend has loaded a version of an adapter, before its next heartbeat reports it."""
        adapters = self._heap.member(backend_id).backend.adapters
        earlier = tuple(one for one in adapters.get(model, ()) if one != version)
        self._heap.set_adapters(backend_id, {**adapters, model: (*earlier, version)})
        self._changed[backend_id] = None

    def adapter_unloaded(self, backend_id: str, model: str, kept: Collection[int]) -> None:
        """Record that a backend has unloaded an adapter's other versions, before its next heartbeat reports it."""
        adapters = dict(self._heap.member(backend_id).backend.adapters)
        if left := tuple(one for one in adapters.pop(model, ()) if one in kept):
            adapters[model] = left
        self._heap.set_adapters(backend_id, adapters)
        self._changed[backend_id] = None

    def loaded(self, model: str) -> dict[str, tuple[int, ...]]:
        """Return the versions of an adapter that backends have, or had when they fell silent, by backend."""
        backends = [*(record.backend for record in self._lost.values()), *self._heap.backends()]
        return {one.backend_id: one.adapters[model] for one in backends if model in one.adapters}

    def copies(self, model: str) -> dict[str, CopyState]:
        """Return the copies of a model's weights that live hosts have, by backend."""
        hosts = {one: self._hosts[one].copy for one in self._heap.trained(model) if one in self._hosts}
        return {backend_id: copy for backend_id, copy in hosts.items() if copy is not None}

    def lost_models(self) -> set[str]:
        """Return the models of hosts that fell silent and may return."""
        return {record.backend.name for record in self._lost.values()}

    def note_all(self) -> None:
        self._changed.update(dict.fromkeys(self._heap))

    def tick(self, now: float) -> None:
        for backend_id in [key for key, host in self._hosts.items() if host.heard + self._lease_s <= now]:
            self._lose(backend_id)
        for gone in (self._lost, self._dismissed):
            while len(gone) > LOST_LIMIT:
                first = next(iter(gone))
                del gone[first]
                self._changed[first] = None

    def with_host(self, status: BackendStatus, now: float) -> BackendStatus:
        """Return a backend's status with its host's load, silence and lease."""
        host = self._hosts.get(status.backend.backend_id)
        if host is None:
            return status
        silent_s = max(0.0, now - host.heard)
        return msgspec.structs.replace(status, load=host.load, copy=host.copy, silent_s=silent_s, lease_s=self._lease_s)

    # What outlives the process ----------------------------------------------------------------------------------------

    def take_changes(self) -> dict[str, BackendRecord | None]:
        if not self._changed:
            return {}
        changed, self._changed = self._changed, {}
        return {backend_id: self._known(backend_id) for backend_id in changed}

    def restore(self, records: Iterable[BackendRecord], now: float, *, of_before: bool = False) -> None:
        """Restore the records of an earlier process in a new registry.

        With `of_before` the records are of an earlier service: hosts that register need only the wanted weights, not
        the version that each of them served.
        """
        for record in records:
            backend_id = record.backend.backend_id
            if record.fate == "lost" and of_before:
                self._changed[backend_id] = None
            elif record.fate == "lost":
                self._lost[backend_id] = record
            elif record.fate == "dismissed":
                self._dismissed[backend_id] = record
            else:
                self._heap.add(record.backend)
                if not of_before:  # its weights may be newer than those it must return to
                    self._heap.hold_back(backend_id, record.needed_version)
                if record.draining:
                    self._heap.drain(backend_id)
                if record.heartbeats:
                    self._hosts[backend_id] = _Host(
                        now,
                        record.reported,
                        EngineLoad(),
                        record.backend.adapters,
                        of_before=of_before or record.of_before,
                    )
                    if record.has_room and not of_before:
                        self._hosts[backend_id].closed_until = now + ADOPTED_S
                        self._set_room(backend_id, 0, now)
                    self._changed[backend_id] = None

    def _known(self, backend_id: str) -> BackendRecord | None:
        if backend_id in self._heap:
            return self._record(backend_id, "listed")
        return self._lost.get(backend_id) or self._dismissed.get(backend_id)

    def _record(self, backend_id: str, fate: Fate) -> BackendRecord:
        member = self._heap.member(backend_id)
        host = self._hosts.get(backend_id)
        backend = member.backend
        if fate == "lost":
            backend = msgspec.structs.replace(backend, weight_version=self._heap.member(backend_id).known_version)
        return BackendRecord(
            fate=fate,
            backend=backend,
            draining=member.draining,
            needed_version=member.needed_version,
            heartbeats=host is not None,
            has_room=member.room is not None,
            reported=host.reported if host is not None else None,
            of_before=host is not None and host.of_before,
        )

    def _take_off(self, backend_id: str) -> None:
        self._heap.remove(backend_id)
        self._hosts.pop(backend_id, None)


def check_backend(backend: Backend) -> None:
    if backend.endpoint.startswith(("http://", "https://")):
        raise InvalidEndpoint(
            f"{backend.endpoint} is an HTTP server, which jobs reach through an engine host: start `prorl-engine "
            f"--engine http --url {backend.endpoint}`, which registers itself",
            endpoint=backend.endpoint,
        )
    endpoint = check_endpoint(backend.endpoint)
    if endpoint.startswith("tcp://") and ("*" in endpoint or not int(endpoint.rpartition(":")[2])):
        raise InvalidEndpoint(
            f"{endpoint} is where a socket could bind; a backend's names one host and port", endpoint=endpoint
        )
    if backend.chat.kind == "transformers" and not backend.chat.tokenizer:
        raise ConfigError(f"backend {backend.backend_id} has no tokenizer to render chats with", key="chat.tokenizer")
