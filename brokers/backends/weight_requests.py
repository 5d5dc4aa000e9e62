"""Requests about weights that are under way: which engine hosts were asked, which answered, and what follows. Pure.

    request             before                 every engine host         after
    BeginWeights        update.begin           BeginUpdate               failed: CancelUpdate everywhere, update.cancel
    EndWeights                                 EndUpdate                 one did: note its version, update.end
    CancelWeights                              CancelUpdate              update.cancel
    LoadWeights         update.begin           UpdateWeights             one did: as the end; none did: update.cancel
    SetWeightVersion    note the version       NoteWeightVersion

All hosts of a request have one deadline. The reply says that all did it, or why the first that did not, did not. A
request that is sent again joins the one under way, and one that has ended gets the same reply: a load that is run twice
would stand in the way of the next one. Hosts are asked once, and again where a connection was lost (their requests
are idempotent). A broker that dies leaves updates to the limits of hosts and broker; a request that comes after its
restart is run from the beginning.

A backend that comes with older weights than the wanted ones, such as one whose host died and was started again, is
asked to load them from where the others did: it catches up.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ...errors import (
    FIELDS_LIMIT,
    Busy,
    InvalidWeights,
    NoBackend,
    ProrlError,
    RequestTimeout,
    UnknownBackend,
    UpdateNotBegun,
)
from ...metrics.catalog import WEIGHTS_REQUEST_SECONDS
from ...wire.messages.backends import (
    TAKE_BACK_S,
    BackendRefused,
    BeginWeights,
    CancelWeights,
    Done,
    EndWeights,
    HoldWeights,
    LoadWeights,
    SetWeightVersion,
)
from ...wire.messages.base import new_id
from ...wire.messages.engines import BeginUpdate, CancelUpdate, EndUpdate, NoteWeightVersion, UpdateWeights
from .trainer_lease import TrainerLease

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...wire.messages.backends import AnyBackendReply, AnyWeightsRequest, Backend
    from ...wire.sockets import Frame
    from .backend_heap import BackendHeap
    from .backend_registry import BackendRegistry
    from .weight_update import WeightUpdate

    EngineRequest = BeginUpdate | EndUpdate | CancelUpdate | UpdateWeights | NoteWeightVersion

log = logging.getLogger("prorl.backend_broker")

CATCH_UP_S = 600.0
"""How long one backend may take to load the wanted weights when it comes late."""
REQUESTS_LIMIT = 256
"""Most requests under way, and most that have ended whose replies are remembered."""
LIMIT_MOST_S = 7 * 86400.0


class Answer(NamedTuple):
    """A reply, and the envelope behind which its client is."""

    envelope: Sequence[Frame]
    reply: AnyBackendReply


class EngineAddress(NamedTuple):
    """Where an engine host listens, and the key that it proves there; empty: none."""

    endpoint: str
    curve_key: str


class EngineCall(NamedTuple):
    address: EngineAddress
    request: EngineRequest


@dataclass(slots=True, eq=False)
class _UnderWay:
    request: AnyWeightsRequest
    envelope: Sequence[Frame] | None
    """None: nobody asked, a backend catches up."""
    since: float
    until: float
    outcomes: dict[str, ProrlError | None]
    """Of each backend; None: it did its part, if it is not missing."""
    missing: dict[str, str] = field(default_factory=dict)
    """The backends whose hosts have not answered, by the ids of the calls."""
    failure: ProrlError | None = None
    """Why a begin is being taken back."""

    def done(self) -> list[str]:
        return [backend_id for backend_id, error in self.outcomes.items() if error is None]

    def error(self) -> ProrlError | None:
        """Return the first error that explains the failure; that a host had begun nothing explains the least.

        Where others have ended an update, a backend that came too late for its begin is no failure: it is behind, and
        gets no jobs until it serves the version.
        """
        errors = [error for error in self.outcomes.values() if error is not None]
        if isinstance(self.request, EndWeights) and self.done():
            errors = [error for error in errors if not isinstance(error, UpdateNotBegun)]
        return min(errors, key=lambda error: isinstance(error, UpdateNotBegun), default=None)


class WeightRequests:
    def __init__(self, heap: BackendHeap, registry: BackendRegistry, update: WeightUpdate) -> None:
        self._heap = heap
        self._registry = registry
        self._update = update
        self._trainer = TrainerLease()
        self._under_way: dict[AnyWeightsRequest, _UnderWay] = {}
        self._ended: dict[AnyWeightsRequest, AnyBackendReply] = {}
        self._calls: dict[str, tuple[EngineCall, _UnderWay]] = {}
        """Those without an answer, by their request's id."""
        self._unsent: list[EngineCall] = []
        self._answers: list[Answer] = []

    def handle(
        self, envelope: Sequence[Frame], request: AnyWeightsRequest | HoldWeights, now: float
    ) -> AnyBackendReply | None:
        """Begin a request; None: the reply comes later, by `take_answers`."""
        if isinstance(request, HoldWeights):
            self._trainer.renew(request, now)
            return Done(request.request_id)
        if isinstance(request, SetWeightVersion) and request.backend_id is not None:
            self._trainer.check(request, now)
            self._update.check_none_but(request.weight_version)
            self._registry.set_weight_version(request.weight_version, request.backend_id)
            self._trainer.begin(request, now)
            return Done(request.request_id)
        under_way = self._under_way.get(request)
        if under_way is not None:
            under_way.envelope = envelope
            return None
        if request in self._ended:
            return self._ended[request]
        if len(self._under_way) >= REQUESTS_LIMIT:
            raise Busy("too many requests about weights are under way", retry_after_s=1.0)
        self._trainer.check(request, now)
        self._prepare(request, now)
        self._trainer.begin(request, now)
        under_way = self._under_way[request] = _UnderWay(request, envelope, now, now + request.timeout_s, {})
        self._ask(under_way)
        return None

    def engine_answered(self, request_id: str, error: ProrlError | None, now: float) -> None:
        known = self._calls.pop(request_id, None)
        if known is not None:
            _, under_way = known
            backend_id = under_way.missing.pop(request_id)
            under_way.outcomes[backend_id] = _named(error, backend_id) if error is not None else None
            if not under_way.missing:
                self._follow(under_way, now)

    def unreachable(self, address: EngineAddress, error: ProrlError, now: float) -> None:
        """No connection to an address will come about: the calls there have failed."""
        for request_id in [key for key, (call, _) in self._calls.items() if call.address == address]:
            self.engine_answered(request_id, type(error)(error.message, **error.fields), now)

    def reconnected(self, address: EngineAddress) -> None:
        """A connection was lost, and is there again: what was sent may be lost too, and is sent again."""
        self._unsent += [call for call, _ in self._calls.values() if call.address == address]

    def registered(self, backend: Backend, now: float) -> None:
        """A backend has registered: its host may be another process, to which its calls go from now on.

        What its earlier life has done, one of other weights has not.
        """
        address, backend_id = _address(backend), backend.backend_id
        for request_id, (call, under_way) in self._calls.items():
            if under_way.missing[request_id] == backend_id and call.address != address:
                moved = EngineCall(address, call.request)
                self._calls[request_id] = (moved, under_way)
                self._unsent.append(moved)
        for under_way in self._under_way.values():
            request = under_way.request
            taking_back = under_way.failure is not None or isinstance(request, CancelWeights)
            has_answered = backend_id in under_way.done() and backend_id not in under_way.missing.values()
            if has_answered and not taking_back and backend.weight_version != request.weight_version:
                self._ask_one(under_way, backend_id)
        self._catch_up(backend_id, now)
        member = self._heap.member(backend_id)
        if member.state == "behind" and not member.catch_up:
            log.warning("backend %s gets no jobs: %s", backend_id, member.trouble)

    def tick(self, now: float) -> None:
        for under_way in [one for one in self._under_way.values() if one.until <= now]:
            for request_id, backend_id in under_way.missing.items():
                del self._calls[request_id]
                late = RequestTimeout("its engine host did not answer in time")
                under_way.outcomes[backend_id] = _named(late, backend_id)
            under_way.missing.clear()
            self._follow(under_way, now)

    def next_deadline(self) -> float | None:
        return min((one.until for one in self._under_way.values()), default=None)

    def take_calls(self) -> list[EngineCall]:
        calls, self._unsent = self._unsent, []
        return calls

    def take_answers(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    def addresses(self) -> set[EngineAddress]:
        return {call.address for call, _ in self._calls.values()}

    def _prepare(self, request: AnyWeightsRequest, now: float) -> None:
        version = request.weight_version
        match request:
            case BeginWeights() | LoadWeights():
                self._update.check_none_but(version)
                self._check_backends()
                limit_s = request.limit_s if isinstance(request, BeginWeights) else request.timeout_s + TAKE_BACK_S
                self._update.begin(version, min(limit_s, LIMIT_MOST_S), now)
            case SetWeightVersion():
                self._update.check_none_but(None)
                self._check_backends()
                self._registry.set_weight_version(version, None)
            case _:
                self._check_backends()

    def _check_backends(self) -> None:
        if len(self._heap) == 0:
            raise NoBackend("no backend is registered, so none has taken the weights; see `prorl backends list`")

    def _ask(self, under_way: _UnderWay) -> None:
        for backend_id in self._heap:
            self._ask_one(under_way, backend_id)

    def _ask_one(self, under_way: _UnderWay, backend_id: str) -> None:
        call = EngineCall(_address(self._heap.member(backend_id).backend), _part(under_way))
        under_way.outcomes[backend_id] = None
        under_way.missing[call.request.request_id] = backend_id
        self._calls[call.request.request_id] = (call, under_way)
        self._unsent.append(call)

    def _catch_up(self, backend_id: str, now: float) -> None:
        """Have a backend load the wanted weights, if it has older ones and none are on their way."""
        wanted, path = self._heap.wanted_version, self._update.path
        is_asked = any(backend_id in under_way.missing.values() for under_way in self._under_way.values())
        is_behind = self._heap.member(backend_id).backend.weight_version < wanted
        if path and is_behind and not is_asked and self._update.version is None:
            log.info("backend %s is asked to load weights %d from %s", backend_id, wanted, path)
            self._heap.note_catch_up(backend_id, f"it is loading them from {path}")
            request = LoadWeights(new_id(), path, wanted, "keep", CATCH_UP_S)
            under_way = self._under_way[request] = _UnderWay(request, None, now, now + CATCH_UP_S, {})
            self._ask_one(under_way, backend_id)

    def _caught_up(self, under_way: _UnderWay) -> None:
        del self._under_way[under_way.request]
        for backend_id, error in under_way.outcomes.items():
            if error is not None:
                log.warning("weights %d: %s", under_way.request.weight_version, error.message)
                with suppress(UnknownBackend):
                    self._heap.note_catch_up(backend_id, f"loading them failed, so update it by hand: {error.message}")
            elif under_way.request.weight_version == self._heap.wanted_version:
                with suppress(UnknownBackend):
                    self._registry.set_weight_version(under_way.request.weight_version, backend_id)

    def _follow(self, under_way: _UnderWay, now: float) -> None:
        request, error = under_way.request, under_way.error()
        if under_way.envelope is None:
            self._caught_up(under_way)
            return
        if under_way.failure is not None:
            with suppress(ProrlError):
                self._cancel(request.weight_version)
            error = under_way.failure
        elif error is not None and isinstance(request, BeginWeights):
            under_way.failure, under_way.until, under_way.outcomes = error, now + TAKE_BACK_S, {}
            self._ask(under_way)
            if under_way.missing:
                return
            self._follow(under_way, now)  # all backends have left
            return
        else:
            try:
                self._conclude(under_way)
            except ProrlError as refusal:
                error = refusal
        request_id, kind = request.request_id, type(request).__name__
        WEIGHTS_REQUEST_SECONDS.observe(now - under_way.since, kind, "done" if error is None else "failed")
        reply = BackendRefused(request_id, error.info()) if error is not None else Done(request_id)
        del self._under_way[request]
        self._ended[request] = reply
        if len(self._ended) > REQUESTS_LIMIT:
            del self._ended[next(iter(self._ended))]
        self._answers.append(Answer(under_way.envelope, reply))
        for backend_id in [*self._heap]:
            if not isinstance(under_way.outcomes.get(backend_id), InvalidWeights):
                self._catch_up(backend_id, now)  # it came meanwhile, or died meanwhile and came again

    def _conclude(self, under_way: _UnderWay) -> None:
        version, done = under_way.request.weight_version, under_way.done()
        match under_way.request:
            case EndWeights() | LoadWeights() if done:
                self._update.check_none_but(version)
                for backend_id in done:  # heartbeats would say it too, in a second
                    with suppress(UnknownBackend):  # it has left meanwhile
                        self._registry.set_weight_version(version, backend_id)
                request = under_way.request
                if self._update.end(version, request.path if isinstance(request, LoadWeights) else ""):
                    self._registry.note_all()
            case CancelWeights():
                self._cancel(version)
            case LoadWeights():
                with suppress(ProrlError):
                    self._cancel(version)

    def _cancel(self, version: int) -> None:
        if self._update.cancel(version):
            self._registry.note_all()


def _part(under_way: _UnderWay) -> EngineRequest:
    request_id, request = new_id(), under_way.request
    version = request.weight_version
    if under_way.failure is not None:
        return CancelUpdate(request_id, version)
    match request:
        case BeginWeights():
            return BeginUpdate(request_id, version, request.limit_s, request.mode)
        case EndWeights():
            return EndUpdate(request_id, version)
        case CancelWeights():
            return CancelUpdate(request_id, version)
        case LoadWeights():
            return UpdateWeights(request_id, request.path, version, request.mode)
        case SetWeightVersion():
            return NoteWeightVersion(request_id, version)


def _address(backend: Backend) -> EngineAddress:
    return EngineAddress(backend.endpoint, backend.curve_key)


def _named(error: ProrlError, backend_id: str) -> ProrlError:
    error.fields = {**dict(list(error.fields.items())[: FIELDS_LIMIT - 1]), "backend": backend_id}
    error.message = f"backend {backend_id}: {error.message}"
    error.args = (error.message,)
    return error
