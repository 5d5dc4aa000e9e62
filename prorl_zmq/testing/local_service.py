"""`LocalService`: a whole service in one process, for tests.

The brokers run in threads of their own; the stage processes and the engine host share one asyncio loop in a third. They
are the service's own classes on its own sockets; sandboxes and graders are processes. Differences: signals are left to
the caller's process, a handler that blocks the loop blocks all stages, and the journal is in memory.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, cast

import msgspec
import zmq

from ..client.asynchronous.client import AsyncRolloutClient
from ..client.blocking.client import RolloutClient
from ..config import parse_topology
from ..errors import ConfigError
from ..inference.engine import Engine
from ..inference.hosting.host import EngineHost, HostOptions
from ..stages.handler import load_handlers, make_handler
from ..stages.stage_process import StageOptions, StageProcess, make_sandboxes
from ..system.run_folder import own_run_dir
from ..tools.sandbox.sweeping import sweep
from ..wire.messages.base import POLICY, ModelName
from ..wire.messages.jobs import Phase
from ..wire.sockets import endpoint_beside, free_ipc_paths
from .broker_threads import BrokerThreads
from .loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine
    from types import TracebackType
    from typing import Self

    from ..stages.handler import AgentHandler

    Handlers = Mapping[str, AgentHandler[Any] | type[AgentHandler[Any]]]

START_LIMIT_S = 20.0
STOP_LIMIT_S = 20.0
PARTS_LIMIT_S = 10.0
PHASES_LIMIT_S = 5.0
"""How long phases may take to stop."""
SPAWNER_LIMIT_S = 5.0
"""How long the process may take to end that started the sandboxes."""
LOOK_S = 0.002
TABLES = {"service", "rollout_broker", "backend_broker", "sandbox"}
ROLLOUT_BROKER = {"heartbeat_s": 0.2, "journal": ""}
"""Settings that differ from a service's."""
BACKEND_ID = "local"

log = logging.getLogger("prorl.testing")


class NotReady(TimeoutError):
    """A `LocalService` was not ready in time, such as for an engine that did not start."""


class NotStopped(TimeoutError):
    """Something in a `LocalService` did not stop, such as a handler that blocks the event loop; the text says where."""


class LocalService:
    """A service that runs inside a `with` block; several can run at once, also where an asyncio loop runs.

    At the block's end all that is its own is gone: threads, sockets, sandboxes, child processes, and `run_dir`.

    Args:
        handlers: the tasks that it serves, by name: classes, of which each stage gets an instance, as in a
            service; or instances, which they share. None: the tasks of the installed packages.
        engine: what talks, such as `say("4")`; anything that is an `Engine`, or a function that starts one on the
            service's loop. None: a job that wants to talk ends with `no_backend`.
        models: engines of other models than the policy, by name, for `Job.model`, `Job.models` and `Job.teacher`. With
            one of them there is a stage SCORE too.
        sandbox: what the jobs' tools act in: `process` isolates nothing; `bubblewrap` and others, if the machine has
            them, as in a service.
        slots: jobs that each stage works on at a time.
        topology: tables of a topology file, for what else is to differ, such as
            `{"rollout_broker": {"max_jobs": 10}}`.
        start_limit_s: how long the service may take until it is ready; an engine with a model takes its time.

    Raises:
        ConfigError: a handler, the engine, the kind of sandbox or a setting is wrong (`key`).
        TimeoutError: at the block's end, something of it did not stop within seconds; the message says where it is.
            If the block raised, this is a note of that error.
    """

    def __init__(
        self,
        *,
        handlers: Handlers | None = None,
        engine: Engine | Callable[[], Awaitable[Engine]] | None = None,
        models: Mapping[str, Engine] | None = None,
        sandbox: str = "process",
        slots: int = 8,
        topology: Mapping[str, Mapping[str, Any]] | None = None,
        start_limit_s: float = START_LIMIT_S,
    ) -> None:
        self._engine: Engine | None = None
        self._begin_engine: Callable[[], Awaitable[Engine]] | None = None
        if isinstance(engine, FunctionType | MethodType | partial):
            self._begin_engine = engine
        elif engine is not None:
            self._engine = cast("Engine", engine)
            _check_engine(self._engine)
        self._models = dict(models or {})
        for name, other in self._models.items():
            _check_model(name)
            _check_engine(other)
        self._start_limit_s = start_limit_s
        roles = [role for role in Phase if role != Phase.SCORE or self._models]
        self._handlers = {role: _made(handlers) for role in roles}
        if type(slots) is not int or slots < 1:
            raise ConfigError(f"slots has to be a number of jobs, at least 1; not {slots!r}", key="slots")
        self._slots = slots
        tables = _tables(topology or {})
        if others := sorted(tables.keys() - TABLES):
            words = f"LocalService takes the tables {', '.join(sorted(TABLES))} of a topology; not {', '.join(others)}"
            raise ConfigError(words, key=others[0])
        self.run_dir = own_run_dir(Path(tempfile.mkdtemp(prefix="prorl-local-")))
        """Its private folder of sockets and sandboxes."""
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self.run_dir, ignore_errors=True)
        try:
            tables["service"] = {"run_dir": str(self.run_dir), **tables.get("service", {}), "name": ""}
            tables["rollout_broker"] = ROLLOUT_BROKER | tables.get("rollout_broker", {})
            tables["sandbox"] = {"kind": sandbox, **tables.get("sandbox", {})}
            self._topology = parse_topology(dict(tables), "LocalService")
            if self._topology.journal is not None:
                raise ConfigError("the journal of a LocalService is in memory", key="rollout_broker.journal")
            self._options = self._stage_options()
            self._sandboxes = make_sandboxes(self._options)
        except BaseException:
            self._remove_folder()
            raise
        self.front_door = self._topology.endpoint(self._topology.rollout_broker.front_door)
        """Where clients connect."""
        self.brokers = BrokerThreads(self._topology)
        """Stops and starts the brokers, to test what outlives a restart."""
        self._loop: LoopThread | None = None
        self._stages: list[StageProcess] = []
        self._stop = asyncio.Event()
        """Ends the engine host."""
        self._parts: list[asyncio.Task[None]] = []

    def __enter__(self) -> Self:
        if not self._remove_folder.alive:
            raise ConfigError("a LocalService runs once: make another one for the next `with` block", key="service")
        for engine in (self._engine, *self._models.values()):
            if engine is not None:
                _take_engine(engine)
        try:
            self.brokers.start_backend_broker()
            self.brokers.start_rollout_broker()
            self._loop = LoopThread("local-service")
            self._loop.call(self._start_parts(), START_LIMIT_S)
            self._wait_ready()
        except BaseException:
            self._close(0.0)  # what has not started yet would not hear that it has to stop
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if stuck := self._close():
            words = f"of the LocalService this did not stop: {'; '.join(stuck)}"
            if error is None:
                raise NotStopped(words)
            error.add_note(words)

    def client(self, **options: Any) -> RolloutClient:
        """Return a client of the service with a session of its own; it takes `RolloutClient`'s options."""
        return RolloutClient(self.front_door, **options)

    def async_client(self, **options: Any) -> AsyncRolloutClient:
        """Return a client for asyncio with a session of its own; it takes `AsyncRolloutClient`'s options."""
        return AsyncRolloutClient(self.front_door, **options)

    def _stage_options(self) -> StageOptions:
        topology = self._topology
        return StageOptions(
            role=Phase.RUN,
            slots=self._slots,
            connect=topology.endpoint(topology.rollout_broker.stage_events),
            node=topology.node,
            run_dir=self.run_dir,
            sandbox=topology.sandbox.kind,
            image=topology.sandbox.image,
            image_folders=tuple(map(Path, topology.sandbox.image_folders)),
            mcp_keys={each.url: each.key() for each in topology.mcp},
            shutdown_s=PHASES_LIMIT_S,
        )

    async def _start_parts(self) -> None:
        if self._has_engine:
            self._start_part("the engine host", self._serve_engine())
        for name, engine in self._models.items():
            self._start_part(f"the engine host of {name}", self._host(engine, f"{BACKEND_ID}-{name}", name))
        for role, handlers in self._handlers.items():
            stage = StageProcess(replace(self._options, role=role), handlers, self._sandboxes)
            self._stages.append(stage)
            self._start_part(f"the {role} process", stage.serve())

    @property
    def _has_engine(self) -> bool:
        return self._engine is not None or self._begin_engine is not None

    async def _serve_engine(self) -> None:
        engine = self._engine if self._begin_engine is None else await self._begin_engine()
        assert engine is not None, "it is started only if there is one"
        await self._host(engine, BACKEND_ID)

    async def _host(self, engine: Engine, backend_id: str, model: str = POLICY) -> None:
        broker = self._topology.endpoint(self._topology.backend_broker.endpoint)
        options = HostOptions(
            endpoint=endpoint_beside(broker, f"{self.run_dir}/{backend_id}"),
            backend_broker=broker,
            backend_id=backend_id,
            name=model,
            node=self._options.node,
            run_dir=self.run_dir,
            weights=self.run_dir / "weights" / model,
        )
        with zmq.Context() as context:
            await EngineHost(context, engine, options).run(self._stop)

    def _start_part(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        part = asyncio.create_task(coroutine, name=name)
        part.add_done_callback(_log_failure)
        self._parts.append(part)

    def _wait_ready(self) -> None:
        until = time.monotonic() + self._start_limit_s
        with self.client(timeout_s=START_LIMIT_S) as client:
            engines = self._has_engine + len(self._models)
            while len(client.status().stages) < len(self._handlers) or len(client.backends.list()) < engines:
                for part in self._parts:
                    if part.done():
                        part.result()
                if time.monotonic() > until:
                    raise NotReady(f"the LocalService was not ready within {self._start_limit_s:g} s")
                time.sleep(LOOK_S)

    def _close(self, parts_limit_s: float = PARTS_LIMIT_S) -> list[str]:
        """Stop everything, and cancel parts that take longer than their limit; return what did not stop."""
        stuck: list[str] = []
        if self._loop is not None:
            stuck = self._loop.close(self._stop_parts(parts_limit_s), STOP_LIMIT_S)
        try:
            self.brokers.close()
        except TimeoutError as error:
            stuck.append(str(error))
        free_ipc_paths(self.run_dir)
        self._remove_folder()
        return stuck

    async def _stop_parts(self, limit_s: float) -> None:
        for stage in self._stages:
            stage.stop()
        self._stop.set()
        if self._parts:
            await asyncio.wait(self._parts, timeout=limit_s)
        await sweep(self._sandboxes.root)
        await asyncio.to_thread(self._sandboxes.close, SPAWNER_LIMIT_S)


def _made(handlers: Handlers | None) -> dict[str, AgentHandler[Any]]:
    if handlers is None:
        return load_handlers()
    if not isinstance(handlers, Mapping) or not handlers:
        raise ConfigError(
            f"handlers has to be one or more handlers by their tasks' names; not {handlers!r}", key="handlers"
        )
    made = {task: make_handler(task, given) for task, given in handlers.items()}
    for handler in made.values():
        handler.file_tasks = made
    return made


def _check_model(name: str) -> None:
    try:
        msgspec.convert(name, ModelName)
    except msgspec.ValidationError:
        raise ConfigError(f"models has engines by the names of models, which {name!r} is not", key="models") from None
    if name == POLICY:
        raise ConfigError("the policy is `engine`, and not one of `models`", key="models")


def _check_engine(engine: Engine) -> None:
    wanted = [name for name in vars(Engine) if not name.startswith("_")]
    if isinstance(engine, type) or (missing := [name for name in wanted if not hasattr(engine, name)]):
        lacks = "it is a class" if isinstance(engine, type) else f"it has no {', '.join(missing)}"
        raise ConfigError(f"{engine!r} is no Engine: {lacks}; say(…) makes one", key="engine")


_taken_engines: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()
"""By their addresses. Each serves one service, whose end closes it."""


def _take_engine(engine: Engine) -> None:
    if _taken_engines.get(id(engine)) is engine:
        raise ConfigError(
            "this engine has served a LocalService, which closes it at its end: make another one, such as say(…), for "
            "each service",
            key="engine",
        )
    with suppress(TypeError):  # of a class without weak references
        _taken_engines[id(engine)] = engine


def _tables(topology: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    if not isinstance(topology, Mapping) or not all(isinstance(table, Mapping) for table in topology.values()):
        words = f"topology has to be tables by their names, such as {{'rollout_broker': {{…}}}}; not {topology!r}"
        raise ConfigError(words, key="topology")
    return {name: dict(table) for name, table in topology.items()}


def _log_failure(part: asyncio.Task[None]) -> None:
    if not part.cancelled() and part.exception() is not None:
        log.error("%s ended: %s", part.get_name(), part.exception())
