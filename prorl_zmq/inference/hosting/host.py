"""The engine host: one engine behind a ROUTER, and its registration with the backend broker.

    clients ⇄ ROUTER, bound here          `AnyEngineRequest` / `AnyEngineReply`
    DEALER ⇄ backend broker's ROUTER      see `registration`

A client that reconnects resends its requests. The host keeps running generations by request id: a repeated request gets
the answer of the running one, and an unknown request is run, since engines keep no state between requests. On SIGTERM
or SIGINT the host deregisters, answers running generations with `EngineFailed`, waits `UPDATES_S` for updates, and
exits with 0. If it is killed, the broker's lease expires and its clients' sockets notice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from operator import index
from typing import TYPE_CHECKING, Any, cast

import msgspec
import zmq

from ...errors import EngineFailed, ErrorInfo, InternalError, MalformedMessage, ProrlError
from ...metrics import catalog
from ...metrics.reporter import MetricsReporter
from ...security.keyring import WORKER, Keyring
from ...security.rights import Listener
from ...security.zap_authenticator import ZapAuthenticator
from ...system.logs import about_job
from ...system.traces import span
from ...wire import codec
from ...wire.async_socket import AsyncSocket
from ...wire.messages.backends import Backend
from ...wire.messages.base import POLICY, Refused, WeightVersion, new_id
from ...wire.messages.engines import (
    Abort,
    AnyEngineRequest,
    EngineHealth,
    EngineReady,
    Generate,
    Parked,
    Score,
    UpdateTimes,
    WeightUpdate,
)
from ...wire.request_routing import ENGINE_HOST, convert_request
from ...wire.sockets import PROMPT_FRAME_BYTES, open_socket, split_envelope
from ..engine import Wanted, as_plain
from ..records import asked_records
from .engine_figures import EngineFigures
from .engine_updates import EngineUpdates
from .frames import add_envelope, frame_bytes, generated, token_array
from .host_relay import open_relay
from .hosted_adapters import HostedAdapters
from .kv_event_reader import KvEventReader
from .parked_turns import ParkedTurns
from .registration import Registration
from .score_queue import ScoreQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from ...wire.messages.engines import AnyEngineReply
    from ...wire.messages.jobs import RecordName
    from ...wire.sockets import Frame
    from ..engine import Engine, Generation

    _Answer = tuple[AnyEngineReply, Sequence[Frame]] | None
    """A reply and its arrays; None: the generation was aborted."""

HEARTBEAT_S = 1.0
HEALTH_S = 5.0
"""Longest health check of an engine, in seconds; the broker's lease must be longer."""
UPDATES_S = 2.0
"""Longest wait, when closing, for a read of new weights to end."""

CANNOT_START = "cannot start: "
"""The prefix of the last line of a host whose engine cannot start; the root cause follows."""

log = logging.getLogger("prorl.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """The engine host's endpoint, registration and limits."""

    endpoint: str
    """Where to bind (`ipc://PATH` or `tcp://HOST:PORT`, where PORT may be `*`)."""
    backend_broker: str
    find_backend_broker: Callable[[], str] | None = None
    """Returns its current endpoint, or nothing; None: it does not move."""
    backend_id: str
    """The name to register under."""
    name: str = POLICY
    """The model that it serves, as in `Backend`."""
    frozen: bool = False
    """As in `Backend`."""
    node: str = "local"
    weight: float = 1.0
    """Relative load: a backend with weight 2 gets twice as many jobs."""
    max_in_flight: int = 0
    """Jobs at once beyond which it counts as full, and the most of an engine that reports on its KV cache; 0: the
    engine's own number."""
    heartbeat_s: float = HEARTBEAT_S
    insecure: bool = False
    """Allow plaintext TCP beyond loopback."""
    keys: Path | None = None
    """The key folder; None: that of `$PRORL_KEYS`, if set."""
    run_dir: Path | None = None
    """The run folder whose collector gets metrics; None: none."""
    warning: str = ""
    """A limitation of the chat format of the engine's model; empty: none."""
    adapters: Path | None = None
    """The folder for copies of adapters, which the engine sees at the same path; None: the engine gets none."""
    weights: Path | None = None
    """The folder for the copy of the model's weights, which all its engines on this machine share and see at the same
    path; None: the engine takes no deltas."""
    copies_all: bool = False
    """Whether full versions go through the copy too, and not only deltas. An engine on another machine must see it."""


class EngineHost:
    """Serves one engine until it is closed; made and used on a running loop.

    Raises:
        InvalidEndpoint, EndpointInUse: the endpoint cannot be bound, or one of the broker or the engine is malformed.
        ConfigError: the key folder is not private, or a key is missing.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], engine: Engine, options: HostOptions) -> None:
        self._engine = engine
        self._options = options
        self._life = new_id()
        keyring = Keyring.load(options.keys, WORKER)
        self._authenticator = ZapAuthenticator(context, keyring, insecure=options.insecure)
        with ExitStack() as stack:  # closes what is open if the rest fails
            stack.callback(self._authenticator.close)
            router = stack.enter_context(open_socket(context, zmq.ROUTER, PROMPT_FRAME_BYTES))
            self.endpoint = self._authenticator.bind(router, options.endpoint, Listener.ENGINE)
            self._authenticator.attend()
            backend = self._backend()
            self._figures = EngineFigures(engine, backend, time.monotonic())
            self._router = AsyncSocket(router, self._receive, copied=0)  # only a frame has the sender's envelope
            stack.callback(self._router.close)
            self._generations: dict[str, asyncio.Task[_Answer]] = {}
            self._envelopes: dict[str, list[Sequence[Frame]]] = {}
            """The envelopes for the answer to each generation (see `add_envelope`)."""
            self._parked = ParkedTurns(self._figures.parking, self._note_parked)
            self._scores = ScoreQueue(engine, lambda: self._running > 0, self._using, self._send, self._refuse)
            relay = None
            if options.weights is not None and (options.copies_all or engine.description.reads_here):
                about = options.weights, options.backend_id, engine.description, self.endpoint, keyring
                relay = open_relay(*about, self._authenticator.allow_list, insecure=options.insecure)
            if relay is not None:
                stack.callback(relay.close)
            self._updates = EngineUpdates(engine, options.weights, copies_all=options.copies_all, relay=relay)
            self._events: KvEventReader | None = None
            if engine.description.kv_events is not None:
                self._events = KvEventReader(context, engine.description.kv_events)
                stack.callback(self._events.close)
            self._adapters = HostedAdapters(engine, options.adapters)
            self._updating: set[asyncio.Task[None]] = set()
            self._problem = ""
            self._closing = False
            self._reporter: MetricsReporter | None = None
            if options.run_dir is not None:
                self._reporter = MetricsReporter(options.run_dir, "engine", self._set_gauges)
                stack.callback(self._reporter.close)
            self._registration = Registration(
                context,
                options.backend_broker,
                backend,
                keyring,
                self._authenticator.allow_list,
                options.find_backend_broker,
                self._figures.note_held,
            )
            stack.pop_all()

    async def run(self, stop: asyncio.Event) -> None:
        """Register, serve until `stop` is set, and close.

        Raises:
            EngineFailed: the engine will never serve again.
            ConfigError, InvalidEndpoint: the backend broker refuses such a backend, as one with an adapter's name.
        """
        metrics = asyncio.create_task(self._reporter.report_forever()) if self._reporter is not None else None
        try:
            await self._adapters.restore()
            while not stop.is_set():
                problem = await self._ask_health()
                now = time.monotonic()
                self._parked.release(self._figures.measure(now, updating=self._updates.under_way))
                prefixes = self._events.index if self._events is not None else None
                lacks_events = prefixes is not None and prefixes.lacks_events(now)
                load = self._figures.load(self._running, now, lacks_events=lacks_events)
                state = load, problem, self._adapters.loaded, self._figures.room, self._updates.copy_state
                resident = prefixes.resident_jobs() if prefixes is not None else None
                self._registration.announce(self._weight_version(), *state, resident)
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), self._options.heartbeat_s)
                if self._registration.refusal is not None:
                    raise self._registration.refusal
        finally:
            if metrics is not None:
                metrics.cancel()
            await self.close()

    async def close(self) -> None:
        """Deregister, refuse running requests, and close the engine and the sockets. May be repeated."""
        if self._closing:
            return
        self._closing = True
        self._parked.close()
        await self._engine.close()
        await self._updates.close()
        tasks = [*self._generations.values(), *self._scores.close(), *self._updating]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=UPDATES_S)
            for task in late:
                task.cancel()
            await asyncio.wait(tasks, timeout=UPDATES_S)
        await self._adapters.close()
        await self._registration.close()
        if self._events is not None:
            self._events.close()
        self._router.close(linger_ms=200)
        self._authenticator.close()
        if self._reporter is not None:
            self._reporter.close()

    def _set_gauges(self) -> None:
        catalog.ENGINE_RUNNING.set(self._running, self._options.backend_id)
        catalog.ENGINE_UNWELL.set(bool(self._problem), self._options.backend_id)
        self._figures.set_gauges()

    def _backend(self) -> Backend:
        options, engine = self._options, self._engine.description
        backend = Backend(
            backend_id=options.backend_id,
            endpoint=self.endpoint,
            curve_key=self._authenticator.curve_key(self.endpoint),
            model=engine.model,
            name=options.name,
            frozen=options.frozen,
            chat=engine.chat,
            weight_version=self._weight_version(),
            node=options.node,
            weight=options.weight,
            max_in_flight=options.max_in_flight or engine.max_in_flight,
            context_tokens=engine.context_tokens,
            logprobs_mode=engine.logprobs_mode,
            scores=engine.scores,
            records=cast("tuple[RecordName, ...]", engine.records),  # checked below
            adapter_slots=engine.adapter_slots if options.adapters is not None else 0,
            transfer=engine.transfer,
            transfer_ranks=engine.transfer_ranks,
            top_limit=engine.top_limit,
            unrecorded=cast("dict[RecordName, str]", dict(engine.unrecorded)),
            life=self._life,
            version=version("prorl-zmq"),
            warning=options.warning,
        )
        try:
            checked: Backend = codec.decode(codec.encode(backend), Backend)
        except MalformedMessage as error:
            message = f"{CANNOT_START}the engine describes itself wrongly: {error.message}"
            raise EngineFailed(message, starting=True) from error
        return checked

    def _weight_version(self) -> int:
        """Return the engine's own weight version.

        Raises:
            EngineFailed: it is not a version, so its tokens could not be attributed.
        """
        version = self._engine.weight_version
        try:
            return msgspec.convert(index(version), WeightVersion)
        except (TypeError, msgspec.ValidationError) as error:
            raise EngineFailed(
                f"the engine says that its weight version is {version!r}: {error}", fatal=True
            ) from error

    async def _ask_health(self) -> str:
        """Return why the engine cannot serve; empty if it can. An unhealthy engine is listed, but gets no jobs."""
        problem = ""
        try:
            async with asyncio.timeout(HEALTH_S):
                await self._engine.check_health()
        except EngineFailed as error:
            if error.fields.get("fatal"):
                raise
            problem = error.message
        except TimeoutError:
            problem = f"the engine did not say within {HEALTH_S:g} s whether it is well"
        except Exception as error:  # noqa: BLE001 - an engine may be of another package
            problem = f"the engine's health check failed: {type(error).__name__}: {error}"
        if problem and not self._problem:
            log.warning("the engine is not well: %s", problem)
        elif self._problem and not problem:
            log.info("the engine is well again")
        self._problem = problem
        return problem

    # Requests ---------------------------------------------------------------------------------------------------------

    def _receive(self, frames: list[bytes | zmq.Frame]) -> None:
        try:
            envelope, message = split_envelope(frames)
        except MalformedMessage as error:
            log.warning("dropped a message: %s", error)
            return
        request_id = "unknown"
        try:
            content = codec.unpack(frame_bytes(message[0]))
            request_id = codec.request_id(content)
            request: AnyEngineRequest = convert_request(content, AnyEngineRequest, ENGINE_HOST)
            self._authenticator.sender(frames[0]).check(request)
            expected = 2 if isinstance(request, Generate | Score) else 1
            if len(message) != expected:
                raise MalformedMessage(f"{type(request).__name__} has {expected} frames, not {len(message)}")
            if self._closing:
                raise EngineFailed("the engine host is stopping", unreachable=True)
            self._serve(envelope, request, message)
        except ProrlError as error:
            self._send([envelope], Refused(request_id, error.info()))

    def _serve(
        self, envelope: Sequence[Frame], request: AnyEngineRequest, message: Sequence[bytes | zmq.Frame]
    ) -> None:
        if isinstance(request, Generate | Score) and request.life not in ("", self._life):
            raise EngineFailed("the engine host was restarted, maybe with older weights", unreachable=True)
        match request:
            case Generate():
                token_ids = token_array(message[1])  # first: a malformed request must leave nothing behind
                add_envelope(self._envelopes.setdefault(request.request_id, []), envelope)
                self._parked.tell(request.request_id)
                if request.request_id not in self._generations:
                    with about_job(request.job_id):  # adds the job to the task's log records
                        task = asyncio.create_task(self._generate(request, token_ids))
                    self._generations[request.request_id] = task
                    # Not in the task: one that is cancelled before it begins never runs, and a request may be repeated
                    # until it is forgotten.
                    task.add_done_callback(partial(self._ended, request.request_id))
            case Score():
                self._scores.add(envelope, request, token_array(message[1]))
            case Abort():
                self._scores.abort(request.request_id)
                task_or_none = self._generations.get(request.request_id)
                if task_or_none is not None:
                    task_or_none.cancel()
            case EngineHealth():
                self._send([envelope], self._ready(request.request_id))
            case WeightUpdate():
                update = asyncio.create_task(self._update(envelope, request))
                self._updating.add(update)
                update.add_done_callback(self._updating.discard)

    async def _generate(self, request: Generate, token_ids: NDArray[np.int32]) -> _Answer:
        request_id, backend_id, began = request.request_id, self._options.backend_id, time.monotonic()
        result: str = "failed"
        try:
            with span("generate", kind="server", parent=request.traceparent) as traced:
                if traced is not None:
                    attributes = {"prorl.job.id": request.job_id, "prorl.backend": self._options.backend_id}
                    traced.set_attributes(attributes | {"prorl.engine.running": self._running})
                async with self._parked.turn(request, len(token_ids)) as parked_s:
                    done = await self._answer(request, token_ids)
            done = as_plain(done, len(token_ids))
            again_tokens = self._figures.note_turn(request.job_id, token_ids, done, time.monotonic())
            if self._events is not None and request.model in ("", self._options.name):
                self._events.index.note_turn(request.job_id, token_ids, time.monotonic())
            answer, result = generated(request_id, done, again_tokens, parked_s), done.finish_reason
        except asyncio.CancelledError:
            result = "cancelled"
            log.debug("generation %s was aborted", request_id)
            return None
        except Exception as error:  # noqa: BLE001 - reported to the client; the host continues
            return Refused(request_id, _describe(error)), ()
        else:
            return answer
        finally:
            catalog.ENGINE_REQUESTS.add(backend_id, result)
            catalog.ENGINE_SECONDS.observe(time.monotonic() - began, backend_id)

    async def _answer(self, request: Generate, token_ids: NDArray[np.int32]) -> Generation:
        asked = token_ids, request.sampling, request.stop_token_ids, request.job_id
        with self._using(request) as adapter:
            wanted = Wanted(request.record, request.rows_known, adapter)
            if request.record:
                asked_records(wanted, len(token_ids), request.sampling, self._engine.description)
            more: dict[str, Any] = {"wanted": wanted} if request.record or adapter else {}
            return await self._engine.generate(*asked, **more)

    def _using(self, request: Generate | Score) -> AbstractContextManager[tuple[str, int] | None]:
        own = request.model in ("", self._options.name)
        return nullcontext() if own else self._adapters.using(request.model, request.weight_version)

    def _ended(self, request_id: str, task: asyncio.Task[_Answer]) -> None:
        """Answer all who asked for a generation, and forget it."""
        envelopes = self._envelopes.pop(request_id)
        del self._generations[request_id]
        answer = task.result() if not task.cancelled() else None
        if answer is not None:
            self._send(envelopes, *answer)
        if not self._running:
            self._scores.generations_ended()

    @property
    def _running(self) -> int:
        return len(self._generations) - len(self._parked)

    def _note_parked(self, request_id: str, limit_s: float) -> None:
        """Tell those who asked for a turn that it is parked."""
        self._send(self._envelopes[request_id], Parked(request_id, limit_s))
        if not self._running:
            self._scores.generations_ended()

    async def _update(self, envelope: Sequence[Frame], request: WeightUpdate) -> None:
        began, digest, times = time.monotonic(), "", None
        try:
            if request.model != self._options.name:
                if request.step == "load":
                    self._updates.check_none()
                digest = await self._adapters.update(request)
                times = UpdateTimes(load_s=time.monotonic() - began) if request.step == "load" else None
            else:
                if request.step in ("load", "begin", "set"):
                    self._adapters.check_none()
                times = await self._updates.update(request)
                if request.step in ("load", "end", "set"):
                    await self._adapters.weights_changed()
        except asyncio.CancelledError:
            stopped = EngineFailed(f"the engine host stopped before it served weights {request.weight_version}")
            self._send([envelope], Refused(request.request_id, stopped.info()))
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._refuse([envelope], request.request_id, error)
        else:
            if request.step != "fetch":
                catalog.ENGINE_UPDATE_SECONDS.observe(time.monotonic() - began, self._options.backend_id)
            if request.step in ("load", "end", "set"):
                self._figures.note_weights(time.monotonic())
                if self._events is not None:
                    self._events.index.note_weights()
            self._registration.announce(self._weight_version(), adapters=self._adapters.loaded)
            self._send([envelope], self._ready(request.request_id, request.model, digest, times))

    def _ready(
        self, request_id: str, model: str = "", digest: str = "", times: UpdateTimes | None = None
    ) -> EngineReady:
        version = self._adapters.current.get(model, self._weight_version())
        return EngineReady(request_id, version, self._running, digest, times)

    def _refuse(self, envelopes: Sequence[Sequence[Frame]], request_id: str, error: Exception) -> None:
        self._send(envelopes, Refused(request_id, _describe(error)))

    def _send(self, envelopes: Sequence[Sequence[Frame]], reply: AnyEngineReply, arrays: Sequence[Frame] = ()) -> None:
        for envelope in envelopes:
            self._router.send([*envelope, codec.encode(reply), *arrays])


def _describe(error: Exception) -> ErrorInfo:
    if isinstance(error, ProrlError):
        return error.info()
    log.error("the engine failed", exc_info=error)
    return InternalError(f"the engine failed: {type(error).__name__}: {error}").info()
