"""`prorl serve`: starts the processes of a topology on this node, restarts what dies, and ends them in order.

The supervisor owns the run folder (private, locked) and its children. It holds no job and no message, so a restarted
child finds its work through the brokers. Children die with the supervisor, however it ends. A child that ends because
of a wrong setting (exit code 2) before the service was ready once ends the service. An engine that was never ready is
started at most `MAX_STARTS` times (see `engine_starts`). Any other child is restarted after a pause that doubles up to
`MAX_PAUSE_S` while it keeps dying young.

While an engine is not ready, the supervisor reports it to the backend broker every `REPORT_S` and at each change
(`ReportStarts`): jobs wait for engines that start, and lists show the reason of those that failed.

The supervisor stays in the foreground and ends on SIGTERM or SIGINT: stages first and brokers last, each rank within
its `STOP_S`, at once on a second signal. A child that does not end by itself is killed with all that it started.
`Notifier` tells systemd when the service is ready, what it waits for, and that it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq

from ..client.asynchronous.client import AsyncRolloutClient
from ..client.asynchronous.connection import AsyncRequestConnection
from ..config import SERVICE_VARIABLE
from ..errors import ConfigError, ProrlError
from ..security.keyring import BROKER, Keyring
from ..system.logs import one_line
from ..system.processes import ISOLATED, begin_session, stop_signals
from ..wire.messages.backends import ListBackends, ReportStarts
from ..wire.messages.base import new_id
from .checks import check_connections, check_python
from .child_output import ChildOutput, reason_of
from .engine_starts import MAX_STARTS, EngineStarts
from .notify import Notifier
from .run_dir import held_run_dir

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from ..config import BackendSettings, GatewaySettings, Topology
    from ..wire.messages.backends import BackendList, BackendStatus
    from ..wire.messages.front_door import ServiceStatus

USAGE_ERROR = 2
"""Exit code of a child that cannot work with its settings."""
ENGINE_RANK = 1
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
GROWN_UP_S = 30.0
"""A child that lived for so long is restarted without a longer pause."""
REPORT_S = 1.0
REPORT_TIMEOUT_S = 5.0
REASON_LENGTH = 500
"""Most characters of an engine's last line; the log has all of it."""
STOP_S = (5.0, 20.0, 15.0)
"""How long the children of each rank may take to end before they are killed; vLLM takes up to ten seconds."""
PATIENCE_S = 2.0
"""Children that take longer to end are named in the log."""
TWICE_S = 0.5
"""A second signal within this time is the first one, which came twice: from a terminal and from a program above us."""

log = logging.getLogger("prorl.serve")


@dataclass(frozen=True, slots=True)
class ChildPlan:
    name: str
    arguments: tuple[str, ...]
    """Of `python -m prorl_zmq.cli`."""
    rank: int
    """Children end in descending order of rank: first those that work, last the brokers."""
    python: str = sys.executable


class Startup(NamedTuple):
    """How far a service's start has come."""

    there: int
    """Processes that have reported to their broker; the brokers count once they answer."""
    total: int
    missing: str
    """What is waited for, for people."""


def plan_children(topology: Topology, config: Path | None) -> list[ChildPlan]:
    """List the processes of a topology, in the order in which they start."""
    run_dir = str(topology.run_dir)
    service = topology.service
    logs = ["--log-format", service.log_format, "--log-level", service.log_level]
    keys = ["--keys", topology.security.keys] if topology.security.keys else []
    shared = ["--run-dir", run_dir, *logs, *keys, *(["--insecure"] if service.insecure else [])]
    broker = [*(["--config", str(config)] if config is not None else []), *shared]
    stage_events = topology.endpoint(topology.rollout_broker.stage_events)
    backend_broker = topology.endpoint(topology.backend_broker.endpoint)
    plans = [
        ChildPlan("backend-broker", ("prorl", "broker", "backend", *broker), 0),
        ChildPlan("rollout-broker", ("prorl", "broker", "rollout", *broker), 0),
    ]
    for backends in topology.backends:
        for index in range(backends.engines):
            name = f"engine-{sum(plan.rank == ENGINE_RANK for plan in plans)}"
            place = ["--connect", backend_broker, "--name", name, "--node", service.node, *shared]
            arguments = ["prorl-engine", *place, *_engine_arguments(backends, index)]
            plans.append(ChildPlan(name, tuple(arguments), ENGINE_RANK, backends.python or sys.executable))
    for stage in topology.stage:
        for _ in range(stage.processes):
            name = f"{stage.role}-{sum(plan.name.startswith(stage.role) for plan in plans)}"
            arguments = ["prorl-stage", "--role", stage.role, "--slots", str(stage.slots), "--connect", stage_events]
            place = ["--node", service.node, "--sandbox", topology.sandbox.kind, "--image", topology.sandbox.image]
            folders = [part for folder in topology.sandbox.image_folders for part in ("--image-folder", folder)]
            plans.append(ChildPlan(name, (*arguments, *place, *folders, *shared), 2))
    if topology.gateway.bind:
        front_door = topology.endpoint(topology.rollout_broker.front_door)
        flags = ["--front-door", front_door, *_gateway_flags(topology.gateway)]
        plans.append(ChildPlan("gateway", ("prorl", "gateway", *flags, *shared), 2))
    return plans


def _gateway_flags(settings: GatewaySettings) -> list[str]:
    """Return the flags of `prorl gateway`."""
    flags = {
        "--bind": settings.bind,
        "--tls-cert": settings.tls_cert,
        "--tls-key": settings.tls_key,
        "--tokenizer": settings.tokenizer,
    }
    given = [part for flag, value in flags.items() if value for part in (flag, value)]
    return [*given, *([] if settings.use_llm_servers else ["--no-llm-servers"])]


def _engine_arguments(backends: BackendSettings, index: int) -> list[str]:
    """Return the flags of `prorl-engine` for one engine of a kind."""
    flags = {
        "--engine": backends.kind,
        "--model": backends.model,
        "--url": backends.urls[index] if backends.urls else "",
        "--api": backends.api,
        "--tokenizer": backends.tokenizer,
        "--tool-calls": backends.tool_calls,
        "--history": backends.history,
        "--parser-url": backends.parser_url,
        "--gpus": ",".join(map(str, backends.share(backends.gpus, index))),
        "--cores": ",".join(map(str, backends.share(backends.cores, index))),
        "--weight": str(backends.weight),
        "--max-in-flight": str(backends.max_in_flight),
        "--context-tokens": str(backends.context_tokens),
    }
    given = [part for flag, value in flags.items() if value for part in (flag, value)]
    given += [part for name, value in backends.options.items() for part in ("--option", f"{name}={json.dumps(value)}")]
    return [*given, *(["--", *backends.arguments] if backends.arguments else [])]


class Supervisor:
    def __init__(self, topology: Topology, config: Path | None, log_dir: Path | None = None) -> None:
        self._topology = topology
        self._plans = plan_children(topology, config)
        self._log_dir = log_dir
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()
        self._stopped_at = 0.0
        self._was_ready = False
        self._usage_error = ""
        engines = [plan.name for plan in self._plans if plan.rank == ENGINE_RANK]
        self._engines = EngineStarts(engines, topology.backend_broker.lease_s)
        self._engines_changed = asyncio.Event()
        self._backend_ids: set[str] = set()
        """As the backend broker listed them last."""
        self._failure: BaseException | None = None
        """What ended a task of ours that only a stop should end."""
        self._notifier = Notifier()
        self._environment = {**os.environ, SERVICE_VARIABLE: new_id()}

    async def run(self, on_startup: Callable[[Startup], None], on_ready: Callable[[], None]) -> None:
        """Serve until SIGTERM, SIGINT or `stop`."""
        check_connections(self._topology)
        for python in {plan.python for plan in self._plans} - {sys.executable}:
            await check_python(python)
        async with held_run_dir(self._topology.run_dir):
            with stop_signals(self.stop):
                await self._serve(on_startup, on_ready)
        if self._failure is not None:
            raise self._failure
        if self._usage_error:
            raise ConfigError(f"{self._usage_error} cannot work with its settings; its log says why")

    async def _serve(self, on_startup: Callable[[Startup], None], on_ready: Callable[[], None]) -> None:
        watchdog = asyncio.create_task(self._feed_watchdog())
        watchdog.add_done_callback(self._note_failure)
        tasks = [asyncio.create_task(self._keep(plan)) for plan in self._plans]
        tasks.append(asyncio.create_task(self._announce(on_startup, on_ready)))
        if self._engines.report():
            tasks.append(asyncio.create_task(self._report_starts()))
        for task in tasks:
            task.add_done_callback(self._note_failure)
        try:
            await self._stopping.wait()
        finally:
            self._notifier.stopping()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end_children()
            watchdog.cancel()

    def stop(self) -> None:
        """End `run` in good order; a second call ends it at once."""
        now = asyncio.get_running_loop().time()
        if not self._stopping.is_set():
            self._stopped_at = now
            self._stopping.set()
        elif now - self._stopped_at > TWICE_S:
            self._hurrying.set()

    async def _feed_watchdog(self) -> None:
        while self._notifier.watchdog_s is not None:
            self._notifier.watchdog()
            await asyncio.sleep(self._notifier.watchdog_s)

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._stopping.set()

    async def _keep(self, plan: ChildPlan) -> None:
        """Start a child, and restart it whenever it ends."""
        loop = asyncio.get_running_loop()
        is_engine = plan.name in self._engines
        pause = FIRST_PAUSE_S
        while True:
            started = loop.time()
            if is_engine:
                self._engines.started(plan.name, started)
                self._engines_changed.set()
            problem = await self._run_child(plan)
            if problem is None:
                return
            lived = loop.time() - started
            grew_up = lived >= GROWN_UP_S and (not is_engine or self._engines.is_ready(plan.name))
            pause = FIRST_PAUSE_S if grew_up else min(2 * pause, MAX_PAUSE_S)
            if is_engine:
                self._engines_changed.set()
                if not self._engines.ended(plan.name, problem):
                    self._say_failed(plan.name)
                    return
            log.warning("%s %s, after %.1f s; restarting it in %g s", plan.name, problem, lived, pause)
            self._notifier.status(f"restarting {plan.name}, which {problem}")
            await asyncio.sleep(pause)

    async def _run_child(self, plan: ChildPlan) -> str | None:
        """Run a child until it ends; return how it ended, or None if that ends the service."""
        try:
            output = self._output(plan)
            with contextlib.closing(output) if output is not None else contextlib.nullcontext():
                child = await self._start(plan, output)
        except (OSError, subprocess.SubprocessError) as error:
            return f"could not be started: {error}"
        code = await child.wait()
        if code == USAGE_ERROR and not self._was_ready:
            self._usage_error = plan.name
            self._stopping.set()
            return None
        how = f"ended with code {code}" if code >= 0 else f"was ended by a signal ({signal.strsignal(-code)})"
        if output is None or plan.name not in self._engines:
            return how
        reason = reason_of(await asyncio.to_thread(output.tail))
        return f"{how}: {one_line(reason, REASON_LENGTH)} (log: {output.name})"

    def _output(self, plan: ChildPlan) -> ChildOutput | None:
        """Return where a child writes to; None: to our standard error, without a look at it."""
        if self._log_dir is not None:
            return ChildOutput(self._log_dir / f"{plan.name}.log")
        return ChildOutput(None) if plan.name in self._engines else None

    async def _start(self, plan: ChildPlan, output: ChildOutput | None) -> asyncio.subprocess.Process:
        write_end = output.write_end if output is not None else None
        # From here on the child is ours even if this task is cancelled while it starts.
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *(plan.python, *ISOLATED, "-m", "prorl_zmq.cli", *plan.arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env=self._environment,
                start_new_session=True,
                preexec_fn=partial(begin_session, os.getpid()),
            )
        )
        try:
            child = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._children[plan.name] = await starting
            raise
        self._children[plan.name] = child
        return child

    def _say_failed(self, name: str) -> None:
        reason = self._engines.failed()[name]
        log.error("%s failed: it %s; it was started %d times and never ready, and stays off", name, reason, MAX_STARTS)
        self._notifier.status(f"{name} failed: it {reason}")
        if self._engines.all_failed() and not self._backend_ids:
            log.error(
                "no inference backend is left, and jobs end as `no_backend`: mend what the reasons name and restart "
                "`prorl serve`, or start another engine with `prorl-engine`"
            )

    async def _report_starts(self) -> None:
        """Report engines that are not ready to the backend broker; learn from its list which are."""
        endpoint = self._topology.endpoint(self._topology.backend_broker.endpoint)
        owner = self._environment[SERVICE_VARIABLE]
        with zmq.Context() as context:
            broker = AsyncRequestConnection(context, endpoint, Keyring.load(self._topology.security.keys, BROKER))
            try:
                while True:
                    self._engines_changed.clear()
                    report = self._engines.report()
                    with contextlib.suppress(ProrlError):
                        await self._ask(broker, ReportStarts(new_id(), owner, report))
                        listed: BackendList = await self._ask(broker, ListBackends(new_id()))
                        self._note_backends(listed.backends)
                        if not report:
                            await self._engines_changed.wait()
                            continue
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._engines_changed.wait(), REPORT_S)
            finally:
                broker.close()

    async def _ask(self, broker: AsyncRequestConnection, request: ReportStarts | ListBackends) -> Any:
        return await broker.ask(request, time.monotonic() + REPORT_TIMEOUT_S)

    def _note_backends(self, backends: tuple[BackendStatus, ...]) -> None:
        self._backend_ids = {one.backend.backend_id for one in backends}
        self._engines.listed(self._backend_ids, asyncio.get_running_loop().time())

    async def _announce(self, on_startup: Callable[[Startup], None], on_ready: Callable[[], None]) -> None:
        async for startup in self._startup():
            self._notifier.status(f"waiting for {startup.missing}")
            with contextlib.suppress(OSError):  # a service continues without its terminal
                on_startup(startup)
        self._was_ready = True
        self._notifier.ready()
        with contextlib.suppress(OSError):
            on_ready()

    async def _startup(self) -> AsyncIterator[Startup]:
        """Say what is missing, whenever that changes, until every process has reported to its broker."""
        front_door = self._topology.endpoint(self._topology.rollout_broker.front_door)
        said: Startup | None = None
        async with AsyncRolloutClient(front_door, timeout_s=MAX_PAUSE_S, keys=self._topology.security.keys) as client:
            while True:
                try:
                    status = await client.status()
                    self._note_backends(await client.backends.list())
                    startup = self._compared(status)
                except ProrlError:
                    startup = Startup(0, len(self._plans), "the brokers")
                if startup.there == startup.total:
                    return
                if startup != said:
                    said = startup
                    yield startup
                await asyncio.sleep(FIRST_PAUSE_S / 5)

    def _compared(self, status: ServiceStatus) -> Startup:
        """Compare what has reported with what was planned; engines that failed are not waited for."""
        failed = self._engines.failed()
        planned = [plan.name for plan in self._plans if plan.name not in failed]
        wanted = {name for name in planned if name in self._engines} - self._backend_ids
        parts = sorted(wanted)
        missing = len(wanted)
        for role in dict.fromkeys(stage.role for stage in self._topology.stage):
            processes = sum(one.processes for one in self._topology.stage if one.role == role)
            lacking = processes - sum(one.role == role for one in status.stages)
            if lacking > 0:
                missing += lacking
                parts.append(f"{lacking} {role} process{'es' if lacking > 1 else ''}")
        return Startup(len(planned) - missing, len(planned), ", ".join(parts))

    async def _end_children(self) -> None:
        for rank in sorted({plan.rank for plan in self._plans}, reverse=True):
            living = {
                asyncio.create_task(child.wait()): plan.name
                for plan in self._plans
                if plan.rank == rank and (child := self._children.get(plan.name)) and child.returncode is None
            }
            for name in living.values():
                self._children[name].terminate()
                self._children[name].send_signal(signal.SIGCONT)  # one that was stopped could not end in good order
            for name in await self._wait_for(living, STOP_S[rank]):
                log.warning("%s did not end in time; killing it", name)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._children[name].pid, signal.SIGKILL)  # it leads a session of its own
            if living:
                await asyncio.wait(living)

    async def _wait_for(self, ends: dict[asyncio.Task[int], str], limit_s: float) -> list[str]:
        """Wait until children have ended, `limit_s` have passed, or a second signal came; return those that live."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        patience, deadline = now + PATIENCE_S, now + limit_s
        hurry = asyncio.create_task(self._hurrying.wait())
        living = set(ends)
        while living and not hurry.done() and (now := loop.time()) < deadline:
            if now >= patience:
                self._say_waiting(sorted(ends[task] for task in living), deadline - now)
                patience = deadline
            done, _ = await asyncio.wait(
                {*living, hurry}, timeout=min(patience, deadline) - now, return_when=asyncio.FIRST_COMPLETED
            )
            living -= done
        hurry.cancel()
        return sorted(ends[task] for task in living)

    def _say_waiting(self, names: Sequence[str], left_s: float) -> None:
        log.warning(
            "waiting for %s to end, to be killed in %.0f s; a second signal kills now", ", ".join(names), left_s
        )
        self._notifier.status(f"stopping, waiting for {', '.join(names)}")
