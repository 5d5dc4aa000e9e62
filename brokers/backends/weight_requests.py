"""`WeightRequests`: forwards each `WeightUpdate` to every engine host of its model and acts on the answers. Pure.

    step     before every host is asked   after all have answered
    begin    update.begin                 one failed: send every host `cancel`, then update.cancel
    load     update.begin                 one did it: as after `end`; none did: update.cancel
    end                                   one did it: note its version, update.end
    cancel                                update.cancel
    set      note the version

All hosts of a request share one deadline. The reply is `Done` if all did the step, else the error that explains the
failure. A resent request joins the one in progress; a completed one gets the same reply again. Calls are resent after a
lost connection. If the broker dies, the limits of hosts and broker end the update.

A backend that registers with older weights than wanted is asked to load them from the path of its model's last load.
Frozen backends take no part. Each model has a trainer, an update and a wanted version of its own.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from ...errors import (
    FIELDS_LIMIT,
    Busy,
    InvalidWeights,
    MalformedMessage,
    NoBackend,
    ProrlError,
    RequestTimeout,
    UnknownBackend,
    UpdateNotBegun,
)
from ...metrics.catalog import WEIGHTS_REQUEST_SECONDS
from ...wire.messages.backends import TAKE_BACK_S, HoldWeights
from ...wire.messages.base import Done, Refused, new_id
from ...wire.messages.engines import WeightUpdate
from .trainer_lease import TrainerLease

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...wire.messages.backends import AnyBackendReply, Backend
    from ...wire.sockets import Frame
    from .backend_heap import BackendHeap
    from .backend_registry import BackendRegistry
    from .wanted_weights import ModelUpdates

log = logging.getLogger("prorl.backend_broker")

CATCH_UP_S = 600.0
"""How many seconds a late backend may take to load the wanted weights."""
REQUESTS_LIMIT = 256
"""Most requests in progress, and most replies of completed requests that are remembered."""
LIMIT_MOST_S = 7 * 86400.0


class Answer(NamedTuple):
    """A reply, and the envelope that routes it to its client."""

    envelope: Sequence[Frame]
    reply: AnyBackendReply


class EngineAddress(NamedTuple):
    """Where an engine host listens, and its CURVE key; empty if it has none."""

    endpoint: str
    curve_key: str


class EngineCall(NamedTuple):
    address: EngineAddress
    request: WeightUpdate


@dataclass(slots=True, eq=False)
class _UnderWay:
    request: WeightUpdate
    envelope: Sequence[Frame] | None
    """None for a backend's catch-up, which has no client."""
    since: float
    until: float
    outcomes: dict[str, ProrlError | None]
    """Per backend, the error or None; None means success unless the answer is missing."""
    missing: dict[str, str] = field(default_factory=dict)
    """Backends whose hosts have not answered, by call id."""
    failure: ProrlError | None = None
    """Why a `begin` is being cancelled."""

    def done(self) -> list[str]:
        return [backend_id for backend_id, error in self.outcomes.items() if error is None]

    def error(self) -> ProrlError | None:
        """Return the first error, preferring any other to `UpdateNotBegun`.

        For an `end` that some backends completed, `UpdateNotBegun` of a late backend is ignored: that backend is behind
        and gets no jobs until it serves the version.
        """
        errors = [error for error in self.outcomes.values() if error is not None]
        if self.request.step == "end" and self.done():
            errors = [error for error in errors if not isinstance(error, UpdateNotBegun)]
        return min(errors, key=lambda error: isinstance(error, UpdateNotBegun), default=None)


class WeightRequests:
    def __init__(self, heap: BackendHeap, registry: BackendRegistry, updates: ModelUpdates) -> None:
        self._heap = heap
        self._registry = registry
        self._updates = updates
        self._trainers: dict[str, TrainerLease] = {}
        """By model."""
        self._under_way: dict[WeightUpdate, _UnderWay] = {}
        self._ended: dict[WeightUpdate, AnyBackendReply] = {}
        self._calls: dict[str, tuple[EngineCall, _UnderWay]] = {}
        """Unanswered calls, by request id."""
        self._unsent: list[EngineCall] = []
        self._answers: list[Answer] = []

    def handle(
        self, envelope: Sequence[Frame], request: WeightUpdate | HoldWeights, now: float
    ) -> AnyBackendReply | None:
        """Begin a request; None: the reply follows through `take_answers`."""
        if isinstance(request, HoldWeights):
            if self._heap.trained(request.model):
                self._trainer(request.model).renew(request, now)
            return Done(request.request_id)
        if (request.step == "load") != bool(request.path):
            raise MalformedMessage("the step `load`, and no other one, names a `path`", field="$.path")
        if request.backend_id is not None:
            if request.step != "set":
                raise MalformedMessage("only the step `set` may name one backend", field="$.backend_id")
            backend = self._heap.member(request.backend_id).backend
            if backend.frozen:
                raise MalformedMessage(
                    f"backend {request.backend_id} is frozen: its weights stay", field="$.backend_id"
                )
            trainer = self._trainer(backend.name)
            trainer.check(request, now)
            self._updates.of(backend.name).check_none_but(request.weight_version)
            self._registry.set_weight_version(request.weight_version, request.backend_id)
            trainer.begin(request, now)
            return Done(request.request_id)
        under_way = self._under_way.get(request)
        if under_way is not None:
            under_way.envelope = envelope
            return None
        if request in self._ended:
            return self._ended[request]
        if len(self._under_way) >= REQUESTS_LIMIT:
            raise Busy("too many requests about weights are under way", retry_after_s=1.0)
        self._check_trained(request)
        trainer = self._trainer(request.model)
        trainer.check(request, now)
        self._prepare(request, now)
        trainer.begin(request, now)
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
        """Fail all calls to an address to which no connection is possible."""
        for request_id in [key for key, (call, _) in self._calls.items() if call.address == address]:
            self.engine_answered(request_id, type(error)(error.message, **error.fields), now)

    def reconnected(self, address: EngineAddress) -> None:
        """Resend the calls to an address whose lost connection is back."""
        self._unsent += [call for call, _ in self._calls.values() if call.address == address]

    def registered(self, backend: Backend, now: float) -> None:
        """Redirect a registered backend's calls to its new address, and repeat completed steps if its weights differ.

        The host may be a new process, in which the earlier steps did not happen.
        """
        address, backend_id = _address(backend), backend.backend_id
        for request_id, (call, under_way) in self._calls.items():
            if under_way.missing[request_id] == backend_id and call.address != address:
                moved = EngineCall(address, call.request)
                self._calls[request_id] = (moved, under_way)
                self._unsent.append(moved)
        for under_way in self._under_way.values():
            request = under_way.request
            taking_back = under_way.failure is not None or request.step == "cancel"
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

    def _trainer(self, model: str) -> TrainerLease:
        if model not in self._trainers:
            self._trainers[model] = TrainerLease(model)
        return self._trainers[model]

    def _check_trained(self, request: WeightUpdate) -> None:
        if self._heap.trained(request.model):
            return
        models = sorted(self._heap.models())
        if request.model in models:
            missing = f"all backends of the model {request.model} are frozen"
        elif models:
            missing = f"no backend serves the model {request.model} (there are {', '.join(models)})"
        else:
            missing = "no backend is registered"
        raise NoBackend(f"{missing}, so none has taken the weights; see `prorl backends list`")

    def _prepare(self, request: WeightUpdate, now: float) -> None:
        version, update = request.weight_version, self._updates.of(request.model)
        match request.step:
            case "begin":
                update.begin(version, request.limit_s, now)
            case "load":
                update.begin(version, min(request.timeout_s + TAKE_BACK_S, LIMIT_MOST_S), now)
            case "set":
                update.check_none_but(None)
                self._registry.set_weight_version(version, None, request.model)

    def _ask(self, under_way: _UnderWay) -> None:
        for backend_id in self._heap.trained(under_way.request.model):
            self._ask_one(under_way, backend_id)

    def _ask_one(self, under_way: _UnderWay, backend_id: str) -> None:
        step = "cancel" if under_way.failure is not None else under_way.request.step
        part = replace(under_way.request, request_id=new_id(), step=step)
        call = EngineCall(_address(self._heap.member(backend_id).backend), part)
        under_way.outcomes[backend_id] = None
        under_way.missing[call.request.request_id] = backend_id
        self._calls[call.request.request_id] = (call, under_way)
        self._unsent.append(call)

    def _catch_up(self, backend_id: str, now: float) -> None:
        """Ask a backend with older weights than wanted to load them, unless an update is in progress."""
        backend = self._heap.member(backend_id).backend
        if backend.frozen:
            return
        wanted, update = self._heap.wanted_version(backend.name), self._updates.of(backend.name)
        is_asked = any(backend_id in under_way.missing.values() for under_way in self._under_way.values())
        if update.path and backend.weight_version < wanted and not is_asked and update.version is None:
            log.info("backend %s is asked to load weights %d from %s", backend_id, wanted, update.path)
            self._heap.note_catch_up(backend_id, f"it is loading them from {update.path}")
            request = WeightUpdate(new_id(), "load", wanted, update.path, timeout_s=CATCH_UP_S, model=backend.name)
            under_way = self._under_way[request] = _UnderWay(request, None, now, now + CATCH_UP_S, {})
            self._ask_one(under_way, backend_id)

    def _caught_up(self, under_way: _UnderWay) -> None:
        del self._under_way[under_way.request]
        version, model = under_way.request.weight_version, under_way.request.model
        for backend_id, error in under_way.outcomes.items():
            if error is not None:
                log.warning("weights %d: %s", version, error.message)
                with suppress(UnknownBackend):
                    self._heap.note_catch_up(backend_id, f"loading them failed, so update it by hand: {error.message}")
            elif version == self._heap.wanted_version(model):
                with suppress(UnknownBackend):
                    self._registry.set_weight_version(version, backend_id)

    def _follow(self, under_way: _UnderWay, now: float) -> None:
        request, error = under_way.request, under_way.error()
        if under_way.envelope is None:
            self._caught_up(under_way)
            return
        if under_way.failure is not None:
            with suppress(ProrlError):
                self._cancel(request)
            error = under_way.failure
        elif error is not None and request.step == "begin":
            under_way.failure, under_way.until, under_way.outcomes = error, now + TAKE_BACK_S, {}
            self._ask(under_way)
            if under_way.missing:
                return
            self._follow(under_way, now)  # no backend is left
            return
        else:
            try:
                self._conclude(under_way)
            except ProrlError as refusal:
                error = refusal
        result = "done" if error is None else "failed"
        WEIGHTS_REQUEST_SECONDS.observe(now - under_way.since, request.step, result)
        reply = Refused(request.request_id, error.info()) if error is not None else Done(request.request_id)
        del self._under_way[request]
        self._ended[request] = reply
        if len(self._ended) > REQUESTS_LIMIT:
            del self._ended[next(iter(self._ended))]
        self._answers.append(Answer(under_way.envelope, reply))
        for backend_id in self._heap.trained(request.model):
            if not isinstance(under_way.outcomes.get(backend_id), InvalidWeights):
                self._catch_up(backend_id, now)  # the backend came or restarted meanwhile

    def _conclude(self, under_way: _UnderWay) -> None:
        request, version, done = under_way.request, under_way.request.weight_version, under_way.done()
        match request.step:
            case "end" | "load" if done:
                update = self._updates.of(request.model)
                update.check_none_but(version)
                for backend_id in done:  # heartbeats would report it a second later
                    with suppress(UnknownBackend):  # the backend has left meanwhile
                        self._registry.set_weight_version(version, backend_id)
                if update.end(version, request.path):
                    self._registry.note_all()
            case "cancel":
                self._cancel(request)
            case "load":
                with suppress(ProrlError):
                    self._cancel(request)

    def _cancel(self, request: WeightUpdate) -> None:
        if self._updates.of(request.model).cancel(request.weight_version):
            self._registry.note_all()


def _address(backend: Backend) -> EngineAddress:
    return EngineAddress(backend.endpoint, backend.curve_key)


def _named(error: ProrlError, backend_id: str) -> ProrlError:
    error.fields = {**dict(list(error.fields.items())[: FIELDS_LIMIT - 1]), "backend": backend_id}
    error.message = f"backend {backend_id}: {error.message}"
    error.args = (error.message,)
    return error
