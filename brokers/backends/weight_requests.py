"""`WeightRequests`: forwards each `WeightUpdate` to every engine host of its model and acts on the answers. Pure.

    step     before every host is asked   after all have answered
    begin    update.begin                 one failed: send every host `cancel`, then update.cancel
    fetch                                 one did it: load, by those that did it
    load     update.begin                 one did it: as after `end`; none did: update.cancel
    end                                   one did it: note its version, update.end
    cancel                                update.cancel
    set      note the version
    remove                                ask for it again whenever a host has the adapter

A client's `load` begins with a `fetch`, during which engines generate and get jobs. It ends when all hosts have the
weights, or after half of the time. All hosts of a request share one deadline. A backend that leaves the list ends
its part at the next tick. The reply is `Done` if all others did the step, else the error that explains the failure; a
`begin` fails also if a backend left. A resent request joins the one in progress; a completed one gets the same reply
again. Calls are resent after a lost connection. If the broker dies, the limits of hosts and broker end the update.

A backend with older weights than wanted is asked to load them from the path of its model's last load, and again if
that fails. Frozen backends take no part. Each model has a trainer, an update and a wanted version of its own. A model
that is no backend's own is an adapter, of which hosts keep earlier versions until nothing needs them (see
`adapter_models`).
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ...errors import (
    Busy,
    EngineFailed,
    InvalidWeights,
    MalformedMessage,
    NoBackend,
    ProrlError,
    UnknownBackend,
)
from ...metrics.catalog import WEIGHTS_REQUEST_SECONDS
from ...wire.messages.backends import TAKE_BACK_S, HoldWeights
from ...wire.messages.base import Done, new_id
from ...wire.messages.engines import WeightUpdate
from .engine_calls import EngineCalls
from .relay_tree import relay_for
from .trainer_lease import TrainerLease
from .weight_calls import (
    FETCH_SHARE,
    Answer,
    CatchUpRetries,
    EngineAddress,
    EngineCall,
    UnderWay,
    address_of,
    as_new_adapter,
    catch_up_note,
    check_form,
    check_own,
    check_transfer,
    name_backend,
    served_version,
    too_late,
)
from .weight_fetches import abandoned_fetches, check_not_loading, ended_fetches, versions_fetched

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...wire.messages.backends import AnyBackendReply, Backend
    from ...wire.messages.engines import EngineReady
    from ...wire.sockets import Frame
    from .backend_heap import BackendHeap
    from .backend_registry import BackendRegistry
    from .engine_starts import EngineStarts
    from .wanted_weights import ModelUpdates

log = logging.getLogger("prorl.backend_broker")

CATCH_UP_S = 600.0
"""How many seconds a late backend may take to load the wanted weights."""
REQUESTS_LIMIT = 256
"""Most requests in progress, and most replies of completed requests that are remembered."""
LIMIT_MOST_S = 7 * 86400.0


class WeightRequests:
    def __init__(
        self,
        heap: BackendHeap,
        registry: BackendRegistry,
        updates: ModelUpdates,
        starts: EngineStarts,
        lease_s: float = 0.0,
    ) -> None:
        self._heap = heap
        self._registry = registry
        self._updates = updates
        self._starts = starts
        self._lease_s = lease_s
        """After this time a new broker has heard from all stage processes."""
        self._informed_at: float | None = None
        self._is_informed = False
        """Whether it is known to which versions of adapters jobs are pinned."""
        self._trainers: dict[str, TrainerLease] = {}
        """By model."""
        self._retries = CatchUpRetries()
        self._under_way: dict[WeightUpdate, UnderWay] = {}
        self._ended: dict[WeightUpdate, AnyBackendReply] = {}
        self._calls = EngineCalls()
        self._answers: list[Answer] = []

    def handle(
        self, envelope: Sequence[Frame], request: WeightUpdate | HoldWeights, now: float
    ) -> AnyBackendReply | None:
        """Begin a request; None: the reply follows through `take_answers`."""
        if isinstance(request, HoldWeights):
            if self._heap.trained(request.model):
                self._trainer(request.model).renew(request, now)
            return Done(request.request_id)
        check_form(request)
        if request.backend_id is not None:
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
        base = self._base(request)
        trainer = self._trainer(request.model)
        trainer.check(request, now)
        if base and request.step == "load":
            self._heap.adapters.update_begins(request.model, base, self._registry.loaded(request.model))
            self._drop_unprompted(request.model)
        self._prepare(request, now)
        trainer.begin(request, now)
        fetching = request.step == "load" and request.model not in self._heap.adapters
        until = now + request.timeout_s * (FETCH_SHARE if fetching else 1)
        under_way = self._under_way[request] = UnderWay(request, envelope, now, until, {}, fetching=fetching)
        self._ask(under_way)
        if request.step == "remove":
            self._updates.forget(request.model)
            del self._trainers[request.model]
            if not under_way.missing:
                self._follow(under_way, now)
        return None

    def engine_answered(
        self, request_id: str, error: ProrlError | None, now: float, ready: EngineReady | None = None
    ) -> None:
        known = self._calls.pop(request_id)
        if known is not None:
            call, under_way, backend_id = known
            model = under_way.request.model
            if error is None:
                self._did(call.request, backend_id)
            if isinstance(error, InvalidWeights) and model in self._heap.adapters.unpublished():
                error = as_new_adapter(error, model)
            under_way.note_outcome(backend_id, error)
            if ready is not None:
                under_way.note_times(backend_id, ready.times)
            if ready is not None and ready.digest and model in self._heap.adapters:
                under_way.digests[backend_id] = ready.digest
                self._heap.serve(self._heap.adapters.agree(model, under_way.agreed()))
            if under_way.is_over():
                self._follow(under_way, now)

    def _did(self, request: WeightUpdate, backend_id: str) -> None:
        """Record what a backend's adapters are after it completed a step."""
        self._heap.adapters.answered(request, backend_id)
        if request.step == "remove":
            with suppress(UnknownBackend):  # the backend has left meanwhile
                self._registry.adapter_unloaded(backend_id, request.model, request.keep)

    def unreachable(self, address: EngineAddress, error: ProrlError, now: float) -> None:
        """Fail all calls to an address to which no connection is possible."""
        for request_id in self._calls.at(address):
            self.engine_answered(request_id, type(error)(error.message, **error.fields), now)

    def reconnected(self, address: EngineAddress) -> None:
        """Resend the calls to an address whose lost connection is back."""
        self._calls.resend(address)

    def registered(self, backend: Backend, now: float) -> None:
        """Redirect a registered backend's calls to its new address, and repeat completed steps if its weights differ.

        The host may be a new process, in which the earlier steps did not happen.
        """
        backend_id = backend.backend_id
        self._calls.redirect(backend)
        for under_way in self._under_way.values():
            request = under_way.request
            taking_back = under_way.failure is not None or request.step == "cancel"
            has_answered = backend_id in under_way.done() and backend_id not in under_way.missing.values()
            if has_answered and not taking_back and served_version(backend, request.model) != request.weight_version:
                self._ask_one(under_way, backend_id)
        self._retries.forget(backend_id)
        self._catch_up(backend_id, now)
        member = self._heap.member(backend_id)
        if member.state == "behind" and not member.catch_up:
            log.warning("backend %s gets no jobs: %s", backend_id, member.trouble)

    def tick(self, now: float) -> None:
        for fetch, error in abandoned_fetches(self._under_way.values(), self._trainers, self._updates, now):
            self._end_fetch(fetch, error, now)
        for under_way in tuple(self._under_way.values()):
            for request_id, backend_id in tuple(under_way.missing.items()):
                is_late = under_way.until <= now
                if is_late or backend_id not in self._heap:
                    gone = NoBackend("it was removed, or its host fell silent")
                    self._calls.pop(request_id)
                    under_way.note_outcome(backend_id, too_late(under_way) if is_late else gone)
            if under_way.is_over():
                self._follow(under_way, now)
        for backend_id in self._retries.due(now):
            member = self._heap.member(backend_id) if backend_id in self._heap else None
            if member is not None and (member.needed_version or member.adapter_notes):
                member.adapter_notes.clear()
                self._catch_up(backend_id, now)
            else:
                self._retries.forget(backend_id)
        if self._informed_at is None:
            self._informed_at = now + self._lease_s
        self._is_informed = self._informed_at <= now
        for backend in self._heap.backends():
            if backend.adapters or backend.adapter_slots:
                self._catch_up_adapters(backend.backend_id, now)

    def next_deadline(self) -> float | None:
        return min((one.until for one in self._under_way.values()), default=None)

    def fetched(self) -> dict[str, int]:
        """Return the versions that hosts fetch now, by backend."""
        return versions_fetched(self._under_way.values())

    def take_calls(self) -> list[EngineCall]:
        return self._calls.take()

    def take_answers(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    def addresses(self) -> set[EngineAddress]:
        return self._calls.addresses()

    def _trainer(self, model: str) -> TrainerLease:
        return self._trainers.setdefault(model, TrainerLease(model))

    def _base(self, request: WeightUpdate) -> str:
        """Check that a request has backends; return the base if it is about an adapter, else an empty text."""
        model, own = request.model, self._heap.models() | self._starts.models() | self._registry.lost_models()
        if model in self._heap.adapters or model not in own:
            loaded = self._registry.loaded(model)
            return self._heap.adapters.find_base(request, self._heap.backends(), own, loaded)
        check_own(request, trained=bool(self._heap.trained(model)), frozen=model in self._heap.models())
        return ""

    def _prepare(self, request: WeightUpdate, now: float) -> None:
        version, update = request.weight_version, self._updates.of(request.model)
        is_begun = update.version is not None
        for fetch, error in ended_fetches(self._under_way.values(), request, now, begun=is_begun):
            self._end_fetch(fetch, error, now)
        match request.step:
            case "begin":
                update.begin(version, request.limit_s, now)
            case "load" if request.model in self._heap.adapters:
                self._begin_load(request, now, request.timeout_s)
            case "load":  # it begins once the weights are fetched
                update.check_none_but(version)
            case "cancel":
                check_not_loading(self._under_way.values(), request, now)
            case "transfer":
                check_transfer(request, update.version, self._heap.trained(request.model))
            case "remove" | "set":
                update.check_none_but(None)
                if request.step == "set":
                    self._registry.set_weight_version(version, None, request.model)

    def _end_fetch(self, fetch: UnderWay, error: ProrlError, now: float) -> None:
        """Answer a `load` whose weights are being fetched; engines generate and keep the weights that they have."""
        log.warning("%s", error.message)
        self._calls.drop(fetch)
        fetch.failure = error
        self._follow(fetch, now)

    def _begin_load(self, request: WeightUpdate, now: float, left_s: float) -> None:
        limit_s = min(left_s + TAKE_BACK_S, LIMIT_MOST_S)
        self._updates.of(request.model).begin(request.weight_version, limit_s, now)

    def _load_fetched(self, under_way: UnderWay, now: float) -> None:
        """Ask the backends that have fetched the weights, and those that came meanwhile, to load them."""
        request = under_way.request
        under_way.fetching, under_way.until = False, under_way.since + request.timeout_s
        under_way.outcomes = {key: error for key, error in under_way.outcomes.items() if error is not None}
        ready = [one for one in self._heap.trained(request.model) if one not in under_way.outcomes]
        try:
            if not ready and not under_way.outcomes:
                raise NoBackend(f"all backends of the model {request.model} left before they had the weights")
            if ready:
                self._begin_load(request, now, under_way.until - now)
        except ProrlError as refusal:
            under_way.outcomes[""] = refusal
        else:
            for backend_id in ready:
                self._ask_one(under_way, backend_id)

    def _ask(self, under_way: UnderWay) -> None:
        for backend_id in under_way.receivers() or self._heap.trained(under_way.request.model):
            self._ask_one(under_way, backend_id)

    def _ask_one(self, under_way: UnderWay, backend_id: str) -> None:
        part = under_way.part(backend_id, self._kept(under_way, backend_id))
        if part.step == "load" and part.model in self._heap.adapters:
            part = replace(part, digest=self._updates.of(part.model).digest(part.weight_version))
        if part.relay is not None:
            part = replace(part, relay=relay_for(part, backend_id, self._registry.copies(part.model)))
        call = EngineCall(address_of(self._heap.member(backend_id).backend), part)
        under_way.outcomes[backend_id] = None
        self._calls.add(call, under_way, backend_id)

    def _kept(self, under_way: UnderWay, backend_id: str) -> tuple[int, ...]:
        """Return the versions of a request's adapter that a backend must not unload."""
        request = under_way.request
        if request.step == "remove" and under_way.envelope is not None:
            return ()
        backend, informed = self._heap.member(backend_id).backend, self._is_informed
        needed = self._heap.adapters.needed_by(backend, request.model, informed=informed)
        return tuple(sorted(needed - self._heap.adapters.wrong(backend_id, request.model)))

    def _catch_up(self, backend_id: str, now: float) -> None:
        """Ask a backend to load the weights and adapters that it lacks, unless an update of them is in progress."""
        backend = self._heap.member(backend_id).backend
        wanted = self._heap.wanted_version(backend.name)
        if not backend.frozen and backend.weight_version < wanted and self._load(backend, backend.name, wanted, now):
            path = self._updates.of(backend.name).path
            self._heap.note_catch_up(backend_id, f"it is loading them from {path}")
        self._catch_up_adapters(backend_id, now)

    def _catch_up_adapters(self, backend_id: str, now: float) -> None:
        """Ask a backend to load adapters once it has the weights that they adapt, and to unload unneeded versions."""
        member = self._heap.member(backend_id)
        backend, adapters = member.backend, self._heap.adapters
        for model in adapters.to_unload(backend):  # before it can load the right files
            wrong = max(adapters.wrong(backend_id, model))
            self._ask_alone(backend, WeightUpdate(new_id(), "remove", wrong, model=model), now)
        if not member.needed_version and member.awaited is None:
            for model, version in adapters.missing(backend).items():
                if model not in member.adapter_notes and not adapters.wrong(backend_id, model):
                    self._load(backend, model, version, now)
        for model, versions in backend.adapters.items():
            if not adapters.needed_by(backend, model, informed=self._is_informed).issuperset(versions):
                self._ask_alone(backend, WeightUpdate(new_id(), "remove", 0, model=model), now)

    def _load(self, backend: Backend, model: str, version: int, now: float) -> bool:
        """Ask a backend to load a model's wanted weights again; return whether it is asked."""
        update = self._updates.of(model)
        if not update.path or update.version is not None:
            return False
        if not self._ask_alone(backend, update.load(version, CATCH_UP_S), now):
            return False
        of_model = "" if model == backend.name else f" of the model {model}"
        log.info("backend %s is asked to load weights %d%s from %s", backend.backend_id, version, of_model, update.path)
        return True

    def _drop_unprompted(self, model: str) -> None:
        """Drop the broker's own calls about a model: resending them would undo the client's update."""
        for under_way in [one for one in self._under_way.values() if one.envelope is None]:
            if under_way.request.model == model:
                del self._under_way[under_way.request]
                self._calls.drop(under_way)

    def _ask_alone(self, backend: Backend, request: WeightUpdate, now: float) -> bool:
        """Ask one backend, without a client; return False if a request for the model is unanswered there."""
        unanswered = [one for one in self._under_way.values() if one.request.model == request.model]
        if any(backend.backend_id in one.missing.values() for one in unanswered):
            return False
        under_way = self._under_way[request] = UnderWay(request, None, now, now + request.timeout_s, {})
        self._ask_one(under_way, backend.backend_id)
        return True

    def _caught_up(self, under_way: UnderWay, now: float) -> None:
        request = under_way.request
        del self._under_way[request]
        version, model, is_adapter = request.weight_version, request.model, request.model in self._heap.adapters
        for backend_id, error in under_way.outcomes.items():
            with suppress(UnknownBackend):  # the backend has left meanwhile
                if request.step == "remove":
                    continue
                if error is not None and is_adapter:
                    self._heap.note_adapter(backend_id, model, f"loading version {version} failed: {error.message}")
                    self._retries.failed(backend_id, now)
                elif error is not None:
                    self._retry(backend_id, error, now)
                elif version == self._heap.wanted_version(model):
                    self._note_loaded(backend_id, model, version)

    def _retry(self, backend_id: str, error: ProrlError, now: float) -> None:
        member = self._heap.member(backend_id)
        if member.needed_version:
            member.catch_up = catch_up_note(error, member.backend.name, self._retries.failed(backend_id, now))

    def _note_loaded(self, backend_id: str, model: str, version: int) -> None:
        """Record what a heartbeat would report a second later."""
        if model in self._heap.adapters:
            self._registry.adapter_loaded(backend_id, model, version)
        else:
            self._registry.set_weight_version(version, backend_id)

    def _unload_others(self, under_way: UnderWay, now: float) -> None:
        """Have backends unload a version of an adapter whose digest differs from the majority's."""
        request, digest = under_way.request, under_way.digest()
        for backend_id in [one for one, found in under_way.digests.items() if found != digest]:
            message = f"the files in {request.path} changed while hosts read them; this host unloads its own"
            under_way.outcomes[backend_id] = name_backend(EngineFailed(message), backend_id)
            with suppress(UnknownBackend):  # the backend has left meanwhile
                self._heap.adapters.note_wrong(backend_id, request.model, request.weight_version)
                self._heap.serve([backend_id])
                self._catch_up_adapters(backend_id, now)

    def _follow(self, under_way: UnderWay, now: float) -> None:
        self._unload_others(under_way, now)
        request, error = under_way.request, under_way.error()
        self._calls.drop(under_way)  # of a transfer that failed
        if under_way.envelope is None:
            self._caught_up(under_way, now)
            return
        if under_way.fetching and under_way.failure is None:
            self._load_fetched(under_way, now)
            if under_way.missing:
                return
            error = under_way.error()
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
        WEIGHTS_REQUEST_SECONDS.observe(now - under_way.since, request.step, "failed" if error else "done")
        reply = under_way.reply(error)
        del self._under_way[request]
        if request.step != "transfer":  # its info is large, and a repeated one only begins the transfer again
            self._ended[request] = reply
        if len(self._ended) > REQUESTS_LIMIT:
            del self._ended[next(iter(self._ended))]
        self._answers.append(Answer(under_way.envelope, reply))
        for backend_id in self._heap.trained(request.model):
            if isinstance(error := under_way.outcomes.get(backend_id), InvalidWeights):
                self._retry(backend_id, error, now)
            else:
                self._catch_up(backend_id, now)  # the backend came or restarted meanwhile

    def _conclude(self, under_way: UnderWay) -> None:
        request, version, done = under_way.request, under_way.request.weight_version, under_way.done()
        match request.step:
            case "end" | "load" if done:
                update = self._updates.of(request.model)
                update.check_none_but(version)
                for backend_id in done:
                    with suppress(UnknownBackend):  # the backend has left meanwhile
                        self._note_loaded(backend_id, request.model, version)
                if update.end(version, request.path, under_way.digest() or request.digest, request.relay):
                    self._registry.note_all()
                if request.model in self._heap.adapters:
                    self._note_failures(under_way)
            case "cancel":
                self._cancel(request)
            case "load":
                with suppress(ProrlError):
                    self._cancel(request)

    def _cancel(self, request: WeightUpdate) -> None:
        if self._updates.of(request.model).cancel(request.weight_version):
            self._registry.note_all()
        self._updates.forget_unpublished(request.model)

    def _note_failures(self, under_way: UnderWay) -> None:
        for backend_id, error in under_way.outcomes.items():
            stays = error is not None and backend_id not in under_way.digests  # otherwise it loads other files next
            with suppress(UnknownBackend):
                self._heap.note_adapter(backend_id, under_way.request.model, error.message if error and stays else "")
