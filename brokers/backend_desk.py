"""What the backend broker is asked, answered: assignments that wait, and leases on owners and engine hosts.

Owns no socket and no clock, only the `BackendHeap` and what waits for it. An owner (a stage process) that falls silent
loses its assignments; an engine host that promised heartbeats and falls silent is removed, but its weight version is
remembered: one that comes back with older weights (a new process under the old name) drains until it has caught up. Of
a host's version and a trainer's, the one that changed last counts. A backend that a job could not reach is suspect
until it is heard of, or for the length of a lease since the last job that said so: those that send no heartbeats have
no other way back.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..errors import ConfigError, InvalidEndpoint, NoBackend, ProrlError, UnknownBackend
from ..messages import (
    AddBackend,
    Assign,
    Assigned,
    BackendAlive,
    BackendList,
    BackendRefused,
    ClearBackends,
    Done,
    DrainBackend,
    EngineLoad,
    ListBackends,
    OwnerAlive,
    Release,
    RemoveBackend,
    SetWeightVersion,
)
from ..sockets import check_endpoint
from .backend_heap import BackendHeap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..messages import AnyBackendReply, AnyBackendRequest, Backend
    from ..sockets import Frame
    from .backend_heap import Affinity

LOST_LIMIT = 10_000
"""Most hosts that are gone and remembered; beyond it, the first that went is forgotten."""

log = logging.getLogger("prorl.backend_broker")


class Answer(NamedTuple):
    """A reply, and the envelope behind which its client is."""

    envelope: Sequence[Frame]
    reply: AnyBackendReply


@dataclass(frozen=True, slots=True)
class _Waiting:
    envelope: Sequence[Frame]
    request: Assign
    since: float

    @property
    def until(self) -> float:
        return self.since + self.request.wait_s


@dataclass(slots=True)
class _Host:
    """An engine host that sends heartbeats."""

    heard: float
    reported: int | None
    """The weight version of its last message; None: its next one counts, whatever it is."""
    load: EngineLoad


class _Lost(NamedTuple):
    """What is remembered of a host that fell silent."""

    weight_version: int
    drained: bool
    """It was asked to take no more jobs."""


class BackendDesk:
    """Answers the requests of stage processes, engine hosts and trainers.

    Args:
        lease_s: how long a silent owner keeps its assignments, a silent engine host its registration, and a suspect
            backend without heartbeats its bad name.
        affinity: what sticks to a backend (see `backend_heap`).
    """

    def __init__(self, lease_s: float, affinity: Affinity = "job") -> None:
        self.heap = BackendHeap(affinity)
        self._lease_s = lease_s
        self._waiting: dict[str, _Waiting] = {}
        self._owners: dict[str, float] = {}
        self._hosts: dict[str, _Host] = {}
        self._lost: dict[str, _Lost] = {}
        """The hosts that fell silent; none of them is in the heap."""
        self._dismissed: dict[str, None] = {}
        """The hosts that were removed on request, in that order."""
        self._suspected: dict[str, float] = {}
        """When a job last said that it could not reach a backend; kept for a lease."""

    def handle(self, envelope: Sequence[Frame], request: AnyBackendRequest, now: float) -> list[Answer]:
        """Answer one request, and the assignments that no longer have to wait because of it."""
        try:
            reply = self._reply(envelope, request, now)
        except ProrlError as error:
            reply = BackendRefused(request.request_id, error.info())
        answers = [Answer(envelope, reply)] if reply is not None else []
        return answers + self._serve_waiting(now) if self._waiting else answers

    def tick(self, now: float) -> list[Answer]:
        """Time has passed: drop what fell silent, and refuse the assignments that waited too long."""
        for owner in [owner for owner in self.heap.owners() if self._owners[owner] + self._lease_s <= now]:
            self.heap.drop_owner(owner)
        self._owners = {owner: heard for owner, heard in self._owners.items() if heard + self._lease_s > now}
        for backend_id in [key for key, host in self._hosts.items() if host.heard + self._lease_s <= now]:
            self._lost[backend_id] = _Lost(self.heap.known_version(backend_id), self.heap.is_drained(backend_id))
            self._remove(backend_id)
        for gone in (self._lost, self._dismissed):
            while len(gone) > LOST_LIMIT:
                del gone[next(iter(gone))]
        for backend_id in [key for key, since in self._suspected.items() if since + self._lease_s <= now]:
            del self._suspected[backend_id]
            if backend_id in self.heap:
                self.heap.trust(backend_id)
        overdue = [waiting for waiting in self._waiting.values() if waiting.until <= now]
        for waiting in overdue:
            del self._waiting[waiting.request.job_id]
        return [Answer(waiting.envelope, _no_backend(waiting, now)) for waiting in overdue]

    def next_deadline(self) -> float | None:
        """Give the time at which the first waiting assignment has waited too long."""
        return min((waiting.until for waiting in self._waiting.values()), default=None)

    def _reply(self, envelope: Sequence[Frame], request: AnyBackendRequest, now: float) -> AnyBackendReply | None:
        match request:
            case Assign():
                return self._assign(envelope, request, now)
            case Release():
                self._withdraw(request)
                self.heap.release(request.job_id, request.attempt)
            case OwnerAlive():
                self._owners[request.owner] = now
                self.heap.keep_only(request.owner, request.jobs)
            case BackendAlive():
                self._host_alive(request, now)
            case AddBackend():
                self._add(request, now)
            case DrainBackend():
                self.heap.drain(request.backend_id)
            case RemoveBackend():
                if self._lost.pop(request.backend_id, None) is None:
                    self._dismissed.update(dict.fromkeys(self._hosts.keys() & {request.backend_id}))
                    self._remove(request.backend_id)
            case ClearBackends():
                self._dismissed.update(dict.fromkeys(self._hosts))
                self._hosts.clear()
                self._lost.clear()
                self.heap.clear()
            case SetWeightVersion():
                self.heap.set_weight_version(request.weight_version, request.backend_id)
            case ListBackends():
                backends = tuple(
                    msgspec.structs.replace(status, load=self._hosts[status.backend.backend_id].load)
                    if status.backend.backend_id in self._hosts
                    else status
                    for status in self.heap.status()
                )
                return BackendList(request.request_id, backends=backends, waiting=len(self._waiting))
        return Done(request.request_id)

    def _add(self, request: AddBackend, now: float) -> None:
        backend = request.backend
        backend_id = backend.backend_id
        _check(backend)
        lost = self._lost.pop(backend_id, _Lost(0, drained=False))
        known = self.heap.known_version(backend_id) if backend_id in self.heap else lost.weight_version
        # A host that registers says what its process was started with; anyone else says what is wanted.
        self.heap.add(backend, needed_version=known if request.heartbeats else 0)
        self._dismissed.pop(backend_id, None)
        if request.heartbeats:
            if lost.drained:  # that it fell silent meanwhile does not undo what it was asked
                self.heap.drain(backend_id)
            self._hosts[backend_id] = _Host(now, backend.weight_version, EngineLoad())
            if backend.weight_version < known:
                log.warning(
                    "backend %s came with weights %d after it had served %d (was it restarted?); it gets no jobs until "
                    "it serves those or newer ones",
                    backend_id,
                    backend.weight_version,
                    known,
                )
        elif backend_id in self._hosts:
            self._hosts[backend_id].reported = None

    def _host_alive(self, alive: BackendAlive, now: float) -> None:
        """Renew a registration. A host that was removed on request stays removed until it is added again."""
        backend_id = alive.backend_id
        host = self._hosts.get(backend_id)
        if host is not None:
            host.heard = now
            host.load = alive.load
            self.heap.trust(backend_id)
            self.heap.set_problem(backend_id, alive.problem)
            if host.reported != alive.weight_version:  # the same again does not undo what a trainer has set since
                host.reported = alive.weight_version
                self.heap.set_weight_version(alive.weight_version, backend_id)
        elif backend_id not in self._dismissed:
            raise UnknownBackend(f"backend {backend_id} is not registered", backend=backend_id)

    def _assign(self, envelope: Sequence[Frame], request: Assign, now: float) -> Assigned | None:
        self._owners[request.owner] = now
        waiting = self._waiting.get(request.job_id)
        if waiting is not None:  # it waits on; asking the heap again would make its old backend suspect once more
            if waiting.request.attempt == request.attempt:  # the job has waited since the first time
                self._waiting[request.job_id] = _Waiting(envelope, _settled(request), waiting.since)
                return None
            if waiting.request.attempt > request.attempt:
                return None
        backend = self.heap.assign(request)
        if request.unreachable and request.unreachable in self.heap:
            self._suspected[request.unreachable] = now
        if backend is not None:
            return Assigned(request.request_id, backend)
        self._waiting[request.job_id] = _Waiting(envelope, _settled(request), now)
        return None

    def _withdraw(self, release: Release) -> None:
        waiting = self._waiting.get(release.job_id)
        if waiting is not None and waiting.request.attempt <= release.attempt:
            del self._waiting[release.job_id]

    def _serve_waiting(self, now: float) -> list[Answer]:
        answers: list[Answer] = []
        while self._waiting:
            waiting = next(iter(self._waiting.values()))
            request = waiting.request
            backend = self.heap.assign(request)
            if backend is None:
                break
            del self._waiting[request.job_id]
            self._owners.setdefault(request.owner, now)  # it may have fallen silent while the job waited
            answers.append(Answer(waiting.envelope, Assigned(request.request_id, backend)))
        return answers

    def _remove(self, backend_id: str) -> None:
        self._hosts.pop(backend_id, None)
        self.heap.remove(backend_id)


def _settled(request: Assign) -> Assign:
    """Give a request that goes on waiting: what it said of its old backend has been taken note of."""
    return msgspec.structs.replace(request, unreachable="") if request.unreachable else request


def _check(backend: Backend) -> None:
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


def _no_backend(waiting: _Waiting, now: float) -> BackendRefused:
    request = waiting.request
    error = NoBackend(
        f"no inference backend took job {request.job_id} within {request.wait_s:g} s; register one with "
        "`prorl backends add` or start `prorl-engine`",
        job_id=request.job_id,
        waited_s=now - waiting.since,
    )
    return BackendRefused(request.request_id, error.info())
