"""`BackendRequestHandler`: the backend broker's requests and replies, waiting jobs, owners' leases, probation. Pure.

An owner (a stage process) that falls silent loses its assignments. During a weight update, jobs wait for backends with
the new weights (`ModelUpdates`). No wait expires while an engine is starting (`EngineStarts`), or while ready backends
have no room for more rollouts. While all backends are on probation, jobs wait and serve as trials; a job whose wait
expires gets such a backend rather than an error. Each model has a queue of its own (`AdmissionQueue`).
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ...errors import ModelInUse, ProrlError
from ...metrics.catalog import BACKEND_ASSIGNED, BACKEND_FAILURES, BACKEND_WAIT_SECONDS
from ...system.logs import of_job
from ...wire.messages.backends import (
    AdapterModel,
    AddBackend,
    Assign,
    Assigned,
    BackendAlive,
    BackendHeld,
    BackendList,
    ClearBackends,
    DrainBackend,
    GenerationFailed,
    HoldWeights,
    ListBackends,
    ListModels,
    ModelList,
    NameAll,
    OwnerAlive,
    Release,
    RemoveBackend,
    ReportStarts,
    WaitLonger,
)
from ...wire.messages.base import POLICY, Done, Refused, holder
from ...wire.messages.engines import WeightUpdate
from .admission_queue import AdmissionQueue
from .backend_heap import BackendHeap
from .backend_member import lacking_records
from .backend_probation import Probation
from .backend_registry import BackendRegistry
from .context_means import ContextMeans
from .engine_starts import EngineStarts
from .no_backend import no_backend
from .queue_waits import RoomWaits, Wait, WaitLimits
from .wanted_weights import ModelUpdates
from .weight_calls import Answer
from .weight_requests import WeightRequests

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ...wire.messages.backends import AnyBackendReply, AnyBackendRequest, BackendStatus
    from ...wire.messages.engines import EngineReady
    from ...wire.sockets import Frame
    from .backend_heap import Affinity
    from .backend_records import BackendRecord, WeightsRecord
    from .weight_calls import EngineAddress

log = logging.getLogger("prorl.backend_broker")


@dataclass(frozen=True, slots=True)
class _Waiting:
    envelope: Sequence[Frame]
    request: Assign
    since: float
    closed_s: float = 0.0
    """The wait for room of its queue when it came."""

    @property
    def wait(self) -> Wait:
        return Wait(self.since, self.request.wait_s)


class _Want(NamedTuple):
    """What waiting jobs have in common: if the first one gets no backend, none does."""

    model: str
    pinned: int | None

    @classmethod
    def of(cls, request: Assign) -> _Want:
        return cls(request.model, request.pinned)


class BackendRequestHandler:
    """The requests of one broker.

    Args:
        lease_s: of owners and hosts.
        affinity: what stays on one backend.
        heeds_room: whether jobs wait for backends whose hosts have no room for them.
    """

    def __init__(self, lease_s: float, affinity: Affinity = "job", *, heeds_room: bool = True) -> None:
        self.heap = BackendHeap(affinity)
        self._registry = BackendRegistry(self.heap, lease_s, heeds_room=heeds_room)
        self._probation = Probation()
        self._updates = ModelUpdates(self.heap)
        self._starts = EngineStarts(self.heap, lease_s)
        self.weights = WeightRequests(self.heap, self._registry, self._updates, self._starts, lease_s)
        self._lease_s = lease_s
        self._waiting: dict[_Want, AdmissionQueue[_Waiting]] = {}
        """The queues; blank ones are removed."""
        self._limits: dict[_Want, WaitLimits] = {}
        """Of the jobs of each queue."""
        self._room_waits = RoomWaits[_Want]()
        self._contexts = ContextMeans()
        self._owners: dict[str, float] = {}

    @property
    def waiting(self) -> int:
        """Number of jobs that wait for a backend."""
        return sum(map(len, self._waiting.values()))

    def waiting_by_model(self) -> dict[str, int]:
        waiting = Counter[str]()
        for want, queue in self._waiting.items():
            if len(queue):
                waiting[want.model] += len(queue)
        return waiting

    def handle(self, envelope: Sequence[Frame], request: AnyBackendRequest, now: float) -> list[Answer]:
        self._look(now)
        self._offer(now)
        try:
            reply = self._reply(envelope, request, now)
        except ProrlError as error:
            reply = Refused(request.request_id, error.info())
        answers = [Answer(envelope, reply)] if reply is not None else []
        return answers + self._ready_answers(now)

    def engine_answered(
        self, request_id: str, error: ProrlError | None, now: float, ready: EngineReady | None = None
    ) -> list[Answer]:
        self._look(now)
        self.weights.engine_answered(request_id, error, now, ready)
        return self._ready_answers(now)

    def engine_unreachable(self, address: EngineAddress, error: ProrlError, now: float) -> list[Answer]:
        self._look(now)
        self.weights.unreachable(address, error, now)
        return self._ready_answers(now)

    def tick(self, now: float) -> list[Answer]:
        """Drop silent owners and hosts, offer backends on probation, and answer waits that have expired."""
        self._look(now)
        self._owners = {owner: heard for owner, heard in self._owners.items() if heard + self._lease_s > now}
        for want, queue in tuple(self._waiting.items()):
            if self.heap.lacks_room(*want):  # other waits expire
                for job_id in [key for key, waiting in queue.items() if waiting.request.owner not in self._owners]:
                    self._forget_waiting(want, job_id)
        for owner in [one for one in self.heap.owners() if one not in self._owners]:
            self.heap.drop_owner(owner)
        self._registry.tick(now)
        self.weights.tick(now)  # first: an update that reached some engines in time is not given up
        if self._updates.tick(now):
            self._registry.note_all()
        self._starts.tick(now)
        self._offer(now)
        answers = self._ready_answers(now)
        for want, queue in tuple(self._waiting.items()):
            if len(queue) and not self._is_coming(want):
                for job_id in self._limits[want].take_expired(self._last(want), now):
                    waiting = queue.find(job_id)
                    assert waiting is not None
                    queue.withdraw(job_id)
                    answers.append(Answer(waiting.envelope, self._at_last(waiting, now)))
            queue.forget_groups(now)
            self._remove_blank(want)
        return answers

    def next_deadline(self) -> float | None:
        dues = [self.weights.next_deadline()]
        if self._waiting:
            dues += [self._probation.next_due(), self._updates.next_deadline()]
            for want, queue in self._waiting.items():
                if len(queue) and not self._is_coming(want):
                    dues.append(self._limits[want].next_expiry(self._last(want)))
        return min((due for due in dues if due is not None), default=None)

    def _look(self, now: float) -> None:
        """Record for which queues a backend is coming; call this before any change."""
        self._starts.look(now)
        if self._waiting:
            closed = [want for want, queue in self._waiting.items() if len(queue) and self.heap.lacks_room(*want)]
            self._room_waits.look(closed, now)

    def _is_coming(self, want: _Want) -> bool:
        """Return whether no wait expires: a backend is starting, or ready ones have no room yet."""
        return self._starts.is_starting(self.heap.adapters.base(want.model)) or self.heap.lacks_room(*want)

    def _last(self, want: _Want) -> float:
        """Return when a backend was coming for the last time: waits begin then."""
        return max(self._starts.last(self.heap.adapters.base(want.model)), self._room_waits.last(want))

    def _ready_answers(self, now: float) -> list[Answer]:
        return self.weights.take_answers() + self._serve_waiting(now)

    def take_changes(self) -> dict[str, BackendRecord | None]:
        return self._registry.take_changes()

    def take_weights(self) -> tuple[WeightsRecord, ...] | None:
        return self._updates.take_change()

    def restore(
        self,
        records: Iterable[BackendRecord],
        now: float,
        *,
        of_before: bool = False,
        weights: Sequence[WeightsRecord] = (),
    ) -> None:
        """Restore the journal before the first request; see `BackendRegistry.restore`."""
        for record in weights:
            if record.base:
                self.heap.set_base(record.model, record.base)
            if record.path or not record.base:
                self.heap.want_version(record.wanted, record.model)
        self._registry.restore(records, now, of_before=of_before)
        self._updates.restore(weights, now, of_before=of_before)

    def _reply(self, envelope: Sequence[Frame], request: AnyBackendRequest, now: float) -> AnyBackendReply | None:
        match request:
            case Assign():
                return self._assign(envelope, request, now)
            case GenerationFailed():
                self._failed(request, now)
            case Release():
                self._release(request, now)
            case OwnerAlive():
                return self._owner_alive(request, now)
            case BackendAlive():
                return self._host_alive(request, now)
            case AddBackend():
                self._registry.add(request, now)
                self.weights.registered(request.backend, now)
                self._probation.forget(request.backend.backend_id)
            case DrainBackend():
                self._registry.drain(request.backend_id)
            case RemoveBackend():
                self._registry.remove(request.backend_id)
            case ClearBackends():
                self._registry.clear()
            case HoldWeights() | WeightUpdate():
                return self._weights_asked(envelope, request, now)
            case ListModels():
                lacking = lacking_records(self.heap.backends(), self.heap.adapters.bases)
                return ModelList(request.request_id, tuple(sorted(self._models())), lacking)
            case ReportStarts():
                self._starts.report(request, now)
            case ListBackends():
                fetched = self.weights.fetched()
                backends = tuple(self._described(status, now, fetched) for status in self.heap.status())
                return BackendList(request.request_id, backends, self.waiting, tuple(self._starts), self._adapters())
        return Done(request.request_id)

    def _models(self) -> set[str]:
        own = self.heap.models() | self._starts.models() | self._registry.lost_models()
        return own | self.heap.adapters.published().keys()

    def _adapters(self) -> tuple[AdapterModel, ...]:
        adapters = self.heap.adapters
        jobs: dict[str, int] = self.heap.in_flight() if adapters.bases else {}
        return tuple(
            AdapterModel(model, adapters.base(model), version, jobs[model])
            for model, version in adapters.published().items()
        )

    def _weights_asked(
        self, envelope: Sequence[Frame], request: WeightUpdate | HoldWeights, now: float
    ) -> AnyBackendReply | None:
        model = request.model
        if isinstance(request, WeightUpdate) and request.step == "remove" and model in self.heap.adapters:
            jobs = self.heap.in_flight()[model] + self.waiting_by_model().get(model, 0)
            if jobs:
                raise ModelInUse(f"{jobs} jobs use the model {model}; cancel them, or wait", model=model, jobs=jobs)
            for want in [want for want in self._waiting if want.model == model]:
                self._forget_queue(want)
        return self.weights.handle(envelope, request, now)

    def _described(self, status: BackendStatus, now: float, fetched: Mapping[str, int]) -> BackendStatus:
        status = self._registry.with_host(status, now)
        if (version := fetched.get(status.backend.backend_id)) is not None:
            status = msgspec.structs.replace(status, fetching=version)
        if status.state != "probation":
            return status
        return msgspec.structs.replace(status, next_try_s=self._probation.next_try_s(status.backend.backend_id, now))

    # Probation --------------------------------------------------------------------------------------------------------

    def _failed(self, failed: GenerationFailed, now: float) -> None:
        backend_id = failed.backend_id
        if backend_id not in self.heap or failed.life not in ("", self.heap.member(backend_id).backend.life):
            return
        BACKEND_FAILURES.add(backend_id)
        if backend_id not in self._probation:
            fields = of_job(failed.job_id, backend=backend_id)
            log.warning("backend %s is on probation: %s", backend_id, failed.problem, extra=fields)
        self.heap.suspend(backend_id, failed.problem)
        self._probation.failed(backend_id, now)

    def _note_served(self, holder_id: str, attempt: int, served: int, now: float) -> None:
        done = self.heap.note_served(holder_id, attempt, served)
        if done is not None and self._probation.served(done.backend_id, now, trial=done.trial):
            self.heap.restore(done.backend_id)
            fields = of_job(holder_id.partition("/")[0], attempt, backend=done.backend_id)
            log.info("backend %s is ready again: it has served a job", done.backend_id, extra=fields)

    def _offer(self, now: float) -> None:
        for backend_id in self._probation.take_due(now):
            if backend_id in self.heap:
                self.heap.offer(backend_id)
            else:
                self._probation.forget(backend_id)

    # Owners and their jobs --------------------------------------------------------------------------------------------

    def _owner_alive(self, alive: OwnerAlive, now: float) -> Done | NameAll:
        self._owners[alive.owner] = now
        if alive.digest is None:
            self.heap.keep_only(alive.owner, alive.jobs)
        for holder_id, held in alive.jobs.items():
            self.heap.adopt(alive.owner, holder_id, held)
            self._note_served(holder_id, held.attempt, held.served, now)
            self._rerank(holder_id.partition("/")[0], now)
        if alive.digest not in (None, self.heap.digest(alive.owner)):
            return NameAll(alive.request_id)
        return Done(alive.request_id)

    def _host_alive(self, alive: BackendAlive, now: float) -> BackendHeld | Done:
        self._registry.host_alive(alive, now)
        if alive.room is None or alive.backend_id not in self.heap:
            return Done(alive.request_id)
        member = self.heap.member(alive.backend_id)
        known, mean_tokens = self._contexts.mean(member.backend.name)
        return BackendHeld(alive.request_id, len(member.jobs), member.ended, known, mean_tokens)

    def _assign(self, envelope: Sequence[Frame], request: Assign, now: float) -> Assigned | WaitLonger | Refused | None:
        self._owners[request.owner] = now
        want, job_id = _Want.of(request), request.job_id
        for before in self._wants_of(job_id, request.model) if self._waiting else ():
            waiting = self._waiting[before].find(job_id)
            assert waiting is not None
            if waiting.request.attempt > request.attempt:
                return None
            if waiting.request.attempt == request.attempt and before == want:  # the wait counts from the first request
                again = replace(waiting, envelope=envelope, request=_settled(request))
                self._enter(want, again, now)
                return self._wait_longer(request, want)
            self._forget_waiting(before, job_id)
        assigned = self._try(request, now)
        if assigned is None and not request.named and request.model not in self._models():
            return self._at_last(_Waiting(envelope, msgspec.structs.replace(request, wait_s=0.0), now), now)
        if assigned is None:
            self._room_waits.look((), now)
            entered = _Waiting(envelope, _settled(request), now, self._room_waits.seconds(want))
            self._enter(want, entered, now, has_left=bool(request.leaving))
            return self._wait_longer(request, want)
        return assigned

    def _wait_longer(self, request: Assign, want: _Want) -> WaitLonger | None:
        return WaitLonger(request.request_id) if self._is_coming(want) else None

    def _queue(self, want: _Want) -> AdmissionQueue[_Waiting]:
        queue = self._waiting.get(want)
        if queue is None:
            made = queue = self._waiting[want] = AdmissionQueue[_Waiting](self.heap.has_begun)
            self._limits[want] = WaitLimits(lambda job_id: found.wait if (found := made.find(job_id)) else None)
        return queue

    def _enter(self, want: _Want, waiting: _Waiting, now: float, *, has_left: bool = False) -> None:
        """Let a job wait; one that waits already keeps its place."""
        queue, request = self._queue(want), waiting.request
        known = queue.find(request.job_id)
        queue.enter(request.job_id, request.group_id, waiting, now, has_left=has_left)
        if known is None or known.wait != waiting.wait:
            self._limits[want].add(request.job_id, waiting.wait)

    def _rerank(self, job_id: str, now: float) -> None:
        """Move a job to its places in the queues after it got a backend."""
        for queue in self._waiting.values():
            queue.rerank(job_id, now)

    def _try(self, request: Assign, now: float, *, anyhow: bool = False) -> Assigned | None:
        holder_id = request.holder
        known = self.heap.holds(holder_id)
        backend = self.heap.assign(request, anyhow=anyhow)
        if backend is None:
            return None
        if self.heap.holds(holder_id) is not known:
            BACKEND_ASSIGNED.add(backend.backend_id)
            self._rerank(request.job_id, now)
            member = self.heap.member(backend.backend_id)
            if request.group_id and member.room is not None and request.pinned is None:
                admitted = request.job_id, request.group_id, backend.weight_version, now
                self._queue(_Want.of(request)).note_admitted(*admitted)
            if member.failure:
                self._probation.tried(backend.backend_id, now)
            if log.isEnabledFor(logging.DEBUG):
                fields = of_job(request.job_id, request.attempt, backend=backend.backend_id)
                log.debug("assigned to backend %s", backend.backend_id, extra=fields)
        held = self.heap.holds(holder_id)
        queue = self._waiting.get(_Want.of(request)) if request.group_id and self._waiting else None
        age_s = queue.age_s(request.group_id, now) if queue is not None else 0.0
        return Assigned(request.request_id, backend, held.pinned if held is not None else None, age_s)

    def _release(self, release: Release, now: float) -> None:
        """End a job's waits and assignments of one model, or of all."""
        job_id, attempt, model = release.job_id, release.attempt, release.model
        for want in self._wants_of(job_id, model) if self._waiting else ():
            waiting = self._waiting[want].find(job_id)
            if waiting is not None and waiting.request.attempt <= attempt:
                self._forget_waiting(want, job_id)
        holders = (job_id,) if model == POLICY else (holder(job_id, model),) if model else self.heap.holders(job_id)
        for holder_id in holders:
            self._note_served(holder_id, attempt, release.served, now)
            if self.heap.release(holder_id, attempt) and release.context_tokens:
                self._contexts.note(self.heap.adapters.base(model), release.context_tokens)

    def _wants_of(self, job_id: str, model: str) -> list[_Want]:
        """Return the queues in which a job waits for a backend of a model; empty: of any."""
        return [
            want
            for want, queue in self._waiting.items()
            if model in ("", want.model) and queue.find(job_id) is not None
        ]

    def _forget_waiting(self, want: _Want, job_id: str) -> None:
        self._waiting[want].withdraw(job_id)
        self._remove_blank(want)

    def _remove_blank(self, want: _Want) -> None:
        if want in self._waiting and self._waiting[want].is_blank:
            self._forget_queue(want)

    def _forget_queue(self, want: _Want) -> None:
        del self._waiting[want], self._limits[want]
        self._room_waits.forget(want)

    def _serve_waiting(self, now: float) -> list[Answer]:
        answers: list[Answer] = []
        while queues := len(self._waiting):
            served = self._serve_each_queue(now)
            answers += served
            if not served or queues == 1:
                break
            # A job that got a backend may wait for one of another model, for which it needs no room now.
        return answers

    def _serve_each_queue(self, now: float) -> list[Answer]:
        answers: list[Answer] = []
        for want, queue in tuple(self._waiting.items()):
            if not len(queue):
                continue
            served = len(answers)
            with closing(queue.in_order(now)) as in_order:
                for job_id, waiting in in_order:
                    assigned = self._try(waiting.request, now)
                    if assigned is None:
                        break
                    queue.withdraw(job_id)
                    self._owners.setdefault(waiting.request.owner, now)  # the owner may have fallen silent meanwhile
                    answers.append(Answer(waiting.envelope, self._with_wait(assigned, want, waiting)))
            if len(answers) > served:
                self._waiting[want] = self._waiting.pop(want)  # last, as others may wait for the same backends
                self._remove_blank(want)
        return answers

    def _with_wait(self, assigned: Assigned, want: _Want, waiting: _Waiting) -> Assigned:
        """Return an answer with the time for which the job waited for room."""
        waited_s = self._room_waits.seconds(want) - waiting.closed_s
        if waited_s <= 0:
            return assigned
        BACKEND_WAIT_SECONDS.observe(waited_s, want.model)
        return msgspec.structs.replace(assigned, room_wait_s=waited_s)

    def _at_last(self, waiting: _Waiting, now: float) -> Assigned | Refused:
        request = waiting.request
        assigned = self._try(request, now, anyhow=True)
        if assigned is not None:
            self._owners.setdefault(request.owner, now)
            return assigned
        error = no_backend(request, now - waiting.since, self.heap, self._starts, self._updates)
        return Refused(request.request_id, error.info())


def _settled(request: Assign) -> Assign:
    """Return a request that keeps waiting, which may get the backend that the job left."""
    return msgspec.structs.replace(request, leaving="") if request.leaving else request
