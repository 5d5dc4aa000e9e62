"""`Supervisor`: starts the planned processes of a run folder, restarts those that exit, and ends them in order.

It owns the run folder (private, locked) and its children, which the kernel kills if it dies. A child that exits with
code 2 before the service was ready ends the service. An engine that was never ready is started at most `MAX_STARTS`
times; other children are restarted after a pause, which doubles up to `MAX_PAUSE_S` while they die early. On SIGTERM or
SIGINT, stages end first and brokers last, each rank within its `STOP_S`; a second signal kills at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq

from ..client.asynchronous.client import AsyncRolloutClient
from ..client.requests import read_reply
from ..config import SERVICE_VARIABLE
from ..errors import ConfigError, EndpointInUse, ProrlError
from ..security.keyring import Keyring
from ..security.request_connection import AsyncRequestConnection
from ..system.logs import one_line
from ..system.open_files import raise_open_files
from ..system.processes import listens_at_tcp, stop_signals
from ..wire.messages.backends import ListBackends, ReportStarts
from ..wire.messages.base import new_id
from .checks import check_python
from .child_output import ChildOutput, reason_of
from .engine_starts import MAX_STARTS, EngineStarts
from .notify import Notifier
from .process_plans import STAGE_RANK, EnginePlan
from .process_starter import ProcessStarter
from .run_dir import held_run_dir

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from ..config import Topology
    from ..system.fork_server import ForkServer
    from ..wire.messages.backends import BackendList, BackendStatus
    from ..wire.messages.front_door import ServiceStatus
    from .broker_places import BrokerPlaces
    from .metrics_inbox import MetricsInbox
    from .process_plans import AnyPlan

USAGE_ERROR = 2
"""Exit code of a child with invalid settings."""
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
STARTUP_LOOK_S = 0.05
"""Interval at which the brokers are queried until all processes have reported."""
GROWN_UP_S = 30.0
"""A child that lived this long is restarted after the first pause."""
REPORT_S = 1.0
LOSS_S = 5.0
"""Interval of the check whether another supervisor has taken over."""
SILENT_SIGNALS = (signal.SIGKILL, signal.SIGTERM)
"""From outside: the last lines of a child's log do not say why."""
DRAIN_LOOK_S = 1.0
REPORT_TIMEOUT_S = 5.0
REASON_LENGTH = 500
"""Most characters of an engine's last line; the log has all of it."""
STOP_S = (15.0, 20.0, 15.0)
"""How long the children of each rank may take to exit before they are killed. vLLM takes up to ten seconds, and a
node's broker sends its trajectories first."""
PATIENCE_S = 2.0
"""Children that take longer to exit are logged."""
TWICE_S = 0.5
"""A second signal within this time counts as the first: it may arrive from the terminal and from a parent program."""

log = logging.getLogger("prorl.serve")


class Startup(NamedTuple):
    """Progress of a service's start."""

    there: int
    """Processes that have reported to their broker, or listen if they are HTTP servers; brokers count once they answer.
    """
    total: int
    missing: str
    """What is still missing, for people."""


class Drain(NamedTuple):
    """How a node is drained: by `prorl drain`, and by signals if the supervisor runs nothing else."""

    is_asked: Callable[[], bool]
    """Called every second."""
    limit_s: float
    """Longest time for the node's jobs to end."""
    ends: bool
    """The supervisor exits with its node; otherwise brokers and HTTP servers stay."""


class Supervisor:
    """Owns the processes of one run folder.

    Args:
        topology: with the settings of the run folder.
        plans: what to start.
        places: where the brokers are.
        server: forks the processes that can be forks; closed when `run` ends.
        log_dir: for one log file per process; None: this process's standard error.
        is_lost: returns whether another supervisor has taken over; called every `LOSS_S`.
        drain: how its node is drained; None: there is no node.
    """

    def __init__(
        self,
        topology: Topology,
        plans: Sequence[AnyPlan],
        places: BrokerPlaces,
        server: ForkServer,
        log_dir: Path | None = None,
        *,
        is_lost: Callable[[], bool] | None = None,
        drain: Drain | None = None,
    ) -> None:
        self._topology = topology
        self._plans = plans
        self._places = places
        self._is_lost = is_lost
        self._node_drain = drain
        self._drains_on_stop = drain is not None and drain.ends
        self._keeping: dict[str, asyncio.Task[None]] = {}
        """The task that restarts each child."""
        self._log_dir = log_dir
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()
        self._stopped_at = 0.0
        self._was_ready = False
        self._usage_error = ""
        engines = {plan.name: plan.backend.name for plan in self._plans if isinstance(plan, EnginePlan)}
        self._engines = EngineStarts(engines, topology.backend_broker.lease_s)
        self._engines_changed = asyncio.Event()
        self._backend_ids: set[str] = set()
        """From the backend broker's last list."""
        self._failure: BaseException | None = None
        """The error of a task that should run until the stop."""
        self._notifier = Notifier()
        self._metrics: MetricsInbox | None = None
        if topology.gateway.bind or topology.metrics.bind:
            from .metrics_inbox import MetricsInbox  # imports prometheus_client

            self._metrics = MetricsInbox(topology.run_dir)
        self._starter = ProcessStarter({**os.environ, SERVICE_VARIABLE: places.service_id}, server)
        self._children = self._starter.processes

    async def run(self, on_startup: Callable[[Startup], None], on_ready: Callable[[], None]) -> None:
        """Serve until SIGTERM, SIGINT or `stop`; `on_startup` gets the progress, `on_ready` is called once."""
        raise_open_files()
        metrics = self._metrics.open() if self._metrics is not None else contextlib.nullcontext()
        async with self._starter, held_run_dir(self._topology.run_dir), metrics:
            for python in {plan.python for plan in self._plans} - {sys.executable}:
                await check_python(python)
            with stop_signals(self.stop, *((signal.SIGUSR1,) if self._drains_on_stop else ())):
                await self._serve(on_startup, on_ready)
        if self._failure is not None:
            raise self._failure
        if self._usage_error:
            raise ConfigError(f"{self._usage_error} cannot work with its settings; its log says why")

    async def _serve(self, on_startup: Callable[[Startup], None], on_ready: Callable[[], None]) -> None:
        watchdog = asyncio.create_task(self._feed_watchdog())
        watchdog.add_done_callback(self._note_failure)
        self._keeping = {plan.name: asyncio.create_task(self._keep(plan)) for plan in self._plans}
        tasks = list(self._keeping.values())
        tasks.append(asyncio.create_task(self._announce(on_startup, on_ready)))
        if self._engines.report():
            tasks.append(asyncio.create_task(self._report_starts()))
        if self._is_lost is not None:
            tasks.append(asyncio.create_task(self._watch_loss(self._is_lost)))
        if self._node_drain is not None:
            tasks.append(asyncio.create_task(self._watch_drain(self._node_drain)))
        for task in tasks:
            task.add_done_callback(self._note_failure)
        try:
            await self._stopping.wait()
        finally:
            self._notifier.stopping()
            for task in tasks:
                task.cancel()
            await self._starter.close()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._failure is None and not self._usage_error:
                await self._drain(self._node_drain.limit_s if self._node_drain and self._drains_on_stop else 0.0)
            await self._end_children(self._plans)
            watchdog.cancel()

    def stop(self) -> None:
        """End `run` in order; a second call ends it at once."""
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

    async def _watch_loss(self, is_lost: Callable[[], bool]) -> None:
        await _until(is_lost, LOSS_S)
        raise EndpointInUse("another `prorl serve` has taken this service's folder over, or removed it; this one ends")

    async def _watch_drain(self, drain: Drain) -> None:
        """Wait for a drain request, then end the node's processes or the supervisor."""
        await _until(drain.is_asked, DRAIN_LOOK_S)
        log.info("asked to drain")
        if drain.ends:
            self.stop()
            return
        leaving = [plan for plan in self._plans if plan.of_node]
        keeping = [self._keeping.pop(plan.name) for plan in leaving]
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        self._engines.forget()
        self._engines_changed.set()
        await self._drain(drain.limit_s)
        await self._end_children(leaving)
        log.info("the node has drained and ended; the brokers live on. Restart this command to have it back")
        self._notifier.status("the node has drained")

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._stopping.set()

    async def _keep(self, plan: AnyPlan) -> None:
        """Start a child, and restart it whenever it exits."""
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
            if self._metrics is not None:
                self._metrics.restarted(plan.process)
            await asyncio.sleep(pause)

    async def _run_child(self, plan: AnyPlan) -> str | None:
        """Run a child until it exits; return how it ended, or None if that ends the service."""
        try:
            output = self._output(plan)
            with contextlib.closing(output) if output is not None else contextlib.nullcontext():
                child = await self._starter.start(plan, output.write_end if output is not None else None)
        except OSError as error:
            return f"could not be started: {error}"
        code = await child.wait()
        if self._metrics is not None:
            self._metrics.ended(child.pid)
        if code == USAGE_ERROR and not self._was_ready:
            self._usage_error = plan.name
            self._stopping.set()
            return None
        how = f"ended with code {code}" if code >= 0 else f"was ended by a signal ({signal.strsignal(-code)})"
        if output is None or plan.name not in self._engines:
            return how
        if -code in SILENT_SIGNALS:
            return f"{how} (log: {output.name})"
        reason = reason_of(await asyncio.to_thread(output.tail))
        return f"{how}: {one_line(reason, REASON_LENGTH)} (log: {output.name})"

    def _output(self, plan: AnyPlan) -> ChildOutput | None:
        """Return a child's output; None: this process's standard error, unread."""
        if self._log_dir is not None:
            return ChildOutput(self._log_dir / f"{plan.name}.log")
        return ChildOutput(None) if plan.name in self._engines else None

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
        """Report engines that are not ready to the backend broker, and update their states from its list."""
        owner = self._places.service_id
        while not (endpoint := self._places.backend_broker()):  # noqa: ASYNC110 - as above
            await asyncio.sleep(REPORT_S)
        keyring = Keyring.load(self._places.keys, self._places.roles)
        with zmq.Context() as context:
            broker = AsyncRequestConnection(context, endpoint, keyring, self._places.backend_broker)
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
        return read_reply(await broker.ask_frames(request, time.monotonic() + REPORT_TIMEOUT_S))

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
        """Yield the progress, when it changes, until every process has reported to its broker or listens."""
        said = nothing = Startup(0, len(self._plans), "the brokers")
        yield said
        clients: list[AsyncRolloutClient] = []
        keys = self._places.client_keys
        async with AsyncExitStack() as opened:
            while True:
                try:
                    for door in [] if clients else self._places.front_doors():
                        client = AsyncRolloutClient(door, timeout_s=MAX_PAUSE_S, keys=keys)
                        clients.append(await opened.enter_async_context(client))
                    statuses = [await client.status() for client in clients]
                    self._note_backends(await clients[0].backends.list())
                    startup = self._compared(statuses)
                except ProrlError:
                    startup = nothing
                if startup.there == startup.total:
                    return
                if startup != said:
                    said = startup
                    yield startup
                await asyncio.sleep(STARTUP_LOOK_S)

    def _compared(self, statuses: Sequence[ServiceStatus]) -> Startup:
        """Compare the reported processes with the planned ones, without failed engines."""
        failed = self._engines.failed()
        planned = [plan for plan in self._plans if plan.name not in failed and plan.name in self._keeping]
        engines = {plan.name for plan in planned if plan.name in self._engines}
        wanted = (engines - self._backend_ids) | {plan.name for plan in planned if self._is_silent(plan)}
        parts = sorted(wanted)
        missing = len(wanted)
        for role, count in Counter(plan.stage_role for plan in planned if plan.stage_role).items():
            lacking = count - self._reported(role, count, statuses)
            if lacking > 0:
                missing += lacking
                parts.append(f"{lacking} {role} process{'es' if lacking > 1 else ''}")
        return Startup(len(planned) - missing, len(planned), ", ".join(parts))

    def _is_silent(self, plan: AnyPlan) -> bool:
        """Return whether a child is an HTTP server that does not accept connections yet."""
        child = self._children.get(plan.name)
        return plan.serves_http and (child is None or not listens_at_tcp(child.pid))

    def _reported(self, role: str, count: int, statuses: Sequence[ServiceStatus]) -> int:
        """Return how many stage processes of a role have reported; a node reports its own as one, to each broker."""
        if not self._places.node_id:
            return sum(one.role == role for status in statuses for one in status.stages)
        pool = f"{role}-{self._places.node_id}"
        there = all(any(one.stage_id == pool for one in status.stages) for status in statuses)
        return count if there else 0

    async def _drain(self, limit_s: float) -> None:
        """Have stage processes finish their jobs: EVAL after RUN, whose jobs it continues, and SCORE last."""
        until = asyncio.get_running_loop().time() + limit_s
        for roles in ({"init", "run"}, {"eval"}, {"score"}):
            living = {plan.name for plan in self._living(STAGE_RANK) if plan.stage_role in roles}
            left_s = until - asyncio.get_running_loop().time()
            if not living or left_s <= 0 or self._hurrying.is_set():
                continue
            log.info("draining %s for up to %.0f s; a second signal ends them now", ", ".join(sorted(living)), left_s)
            self._notifier.status(f"draining {', '.join(sorted(living))}")
            for name in living:
                self._children[name].signal(signal.SIGUSR1)
            ends = {asyncio.create_task(self._children[name].wait()): name for name in living}
            late = await self._wait_for(ends, left_s, patience_s=left_s)
            for task in ends:
                task.cancel()
            if late:
                log.warning("%s had not ended all; the rest goes to other nodes", ", ".join(late))

    def _living(self, rank: int) -> list[AnyPlan]:
        return [
            plan
            for plan in self._plans
            if plan.rank == rank and (child := self._children.get(plan.name)) and not child.has_ended
        ]

    async def _end_children(self, plans: Sequence[AnyPlan]) -> None:
        for rank in sorted({plan.rank for plan in plans}, reverse=True):
            ending = [plan.name for plan in self._living(rank) if plan in plans]
            living = {asyncio.create_task(self._children[name].wait()): name for name in ending}
            for name in living.values():
                self._children[name].signal(signal.SIGTERM)
                self._children[name].signal(signal.SIGCONT)  # a stopped process could not exit in order
            for name in await self._wait_for(living, STOP_S[rank]):
                log.warning("%s did not end in time; killing it", name)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._children[name].pid, signal.SIGKILL)  # it leads its own session
            if living:
                await asyncio.wait(living)

    async def _wait_for(
        self, ends: dict[asyncio.Task[int], str], limit_s: float, patience_s: float = PATIENCE_S
    ) -> list[str]:
        """Wait until children have exited, `limit_s` has passed, or a second signal came; return those still alive."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        patience, deadline = now + patience_s, now + limit_s
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


async def _until(is_so: Callable[[], bool], look_s: float) -> None:
    """Poll until true: files have no events on network file systems."""
    while not await asyncio.to_thread(is_so):  # noqa: ASYNC110
        await asyncio.sleep(look_s)
