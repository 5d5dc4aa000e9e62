"""`prorl serve`: starts the processes of a topology on this node, starts again what dies, and ends them in order.

The supervisor owns the run folder (private, locked) and its children; it holds no job and no message, so a child that
is started again finds its work through the brokers. Children die with the supervisor, however it ends. A child that
ends because of a wrong setting (exit code 2) before the service was ready once ends the service; any other is started
again after a pause that doubles up to `MAX_PAUSE_S` while it keeps dying young.

It stays in the foreground, ends on SIGTERM or SIGINT, stages first and brokers last, each rank within its `STOP_S`, and
at once on a second signal; what does not end by itself is killed with all that it started. systemd is told by
`Notifier` when the service is ready, what it waits for, and that it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ..client.async_client import AsyncRolloutClient
from ..config import SERVICE_VARIABLE, own_run_dir
from ..errors import ConfigError, EndpointInUse, InvalidEndpoint, ProrlError
from ..security.keyring import BROKER, WORKER, Keyring
from ..security.zap_authenticator import PLAINTEXT
from ..system.processes import ISOLATED, begin_session, stop_signals
from ..tools.sandbox.sweeping import sweep
from ..wire.messages.base import new_id
from ..wire.sockets import check_private, endpoint_beside, is_loopback
from .notify import Notifier

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

    from ..config import BackendSettings, Topology
    from ..wire.messages.backends import BackendStatus
    from ..wire.messages.front_door import ServiceStatus

LOCK = "serve.lock"
USAGE_ERROR = 2
"""Exit code of a child that cannot work with the settings it was given."""
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
GROWN_UP_S = 30.0
"""A child that lived for so long starts again without a longer pause."""
STOP_S = (5.0, 20.0, 15.0)
"""How long the children of each rank may take to end before they are killed; vLLM takes up to ten seconds."""
PATIENCE_S = 2.0
"""Children that take longer to end are named in the log."""
TWICE_S = 0.5
"""A second signal within this time is the first one, which came twice: from a terminal and from a program above us."""

log = logging.getLogger("prorl.serve")


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """One process to start."""

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
            name = f"engine-{sum(plan.rank == 1 for plan in plans)}"
            place = ["--connect", backend_broker, "--name", name, "--node", service.node, *shared]
            arguments = ["prorl-engine", *place, *_engine_arguments(backends, index)]
            plans.append(ChildPlan(name, tuple(arguments), 1, backends.python or sys.executable))
    for stage in topology.stage:
        for _ in range(stage.processes):
            name = f"{stage.role}-{sum(plan.name.startswith(stage.role) for plan in plans)}"
            arguments = ["prorl-stage", "--role", stage.role, "--slots", str(stage.slots), "--connect", stage_events]
            place = ["--node", service.node, "--sandbox", topology.sandbox.kind, "--image", topology.sandbox.image]
            folders = [part for folder in topology.sandbox.image_folders for part in ("--image-folder", folder)]
            plans.append(ChildPlan(name, (*arguments, *place, *folders, *shared), 2))
    return plans


def _engine_arguments(backends: BackendSettings, index: int) -> list[str]:
    """Give the flags of `prorl-engine` for one engine of a kind."""
    flags = {
        "--engine": backends.kind,
        "--model": backends.model,
        "--url": backends.urls[index] if backends.urls else "",
        "--api": backends.api,
        "--tokenizer": backends.tokenizer,
        "--tool-calls": backends.tool_calls,
        "--history": backends.history,
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
    """The service of one topology on this node.

    Args:
        topology: what to start.
        config: the file that it came from, which the brokers read too.
        log_dir: folder for one log file per child; None: they write to this process's standard error.
    """

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
        self._notifier = Notifier()
        self._environment = {**os.environ, SERVICE_VARIABLE: new_id()}

    async def run(self, on_startup: Callable[[Startup], None], on_ready: Callable[[], None]) -> None:
        """Serve until SIGTERM, SIGINT or `stop`.

        Args:
            on_startup: called while processes are missing, whenever that changes.
            on_ready: called once everything has reported.

        Raises:
            ConfigError: a child cannot work with its settings or keys, or an interpreter is none.
            InvalidEndpoint: an endpoint lacks a key, or our own stage processes or engine hosts could not reach it.
            EndpointInUse: another service runs in this run folder.
        """
        _check_connections(self._topology)
        for python in {plan.python for plan in self._plans} - {sys.executable}:
            await _check_python(python)
        async with _run_dir(self._topology.run_dir):
            with stop_signals(self.stop):
                await self._serve(on_startup, on_ready)
        if self._usage_error:
            raise ConfigError(f"{self._usage_error} cannot work with its settings; its log says why")

    async def _serve(self, on_startup: Callable[[Startup], None], on_ready: Callable[[], None]) -> None:
        watchdog = asyncio.create_task(self._feed_watchdog())
        tasks = [asyncio.create_task(self._keep(plan)) for plan in self._plans]
        tasks.append(asyncio.create_task(self._announce(on_startup, on_ready)))
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
        """End `run` in good order; called again, at once."""
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

    async def _keep(self, plan: ChildPlan) -> None:
        """Start a child, and again whenever it ends."""
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE_S
        while True:
            started = loop.time()
            child = await self._start(plan)
            code = await child.wait()
            if code == USAGE_ERROR and not self._was_ready:
                self._usage_error = plan.name
                self.stop()
                return
            lived = loop.time() - started
            pause = FIRST_PAUSE_S if lived >= GROWN_UP_S else min(2 * pause, MAX_PAUSE_S)
            log.warning("%s ended with code %d after %.1f s; starting it again in %g s", plan.name, code, lived, pause)
            self._notifier.status(f"starting {plan.name} again, which ended with code {code}")
            await asyncio.sleep(pause)

    async def _start(self, plan: ChildPlan) -> asyncio.subprocess.Process:
        with contextlib.ExitStack() as stack:
            stderr = None
            if self._log_dir is not None:
                self._log_dir.mkdir(parents=True, exist_ok=True)
                stderr = stack.enter_context((self._log_dir / f"{plan.name}.log").open("ab"))
            # From here on the child is ours even if this task is cancelled while it starts.
            starting = asyncio.ensure_future(
                asyncio.create_subprocess_exec(
                    *(plan.python, *ISOLATED, "-m", "prorl_zmq.cli", *plan.arguments),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
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

    async def _announce(self, on_startup: Callable[[Startup], None], on_ready: Callable[[], None]) -> None:
        async for startup in self._startup():
            self._notifier.status(f"waiting for {startup.missing}")
            on_startup(startup)
        self._was_ready = True
        self._notifier.ready()
        on_ready()

    async def _startup(self) -> AsyncIterator[Startup]:
        """Say what is missing, whenever that changes, until every process has reported to its broker."""
        door = self._topology.endpoint(self._topology.rollout_broker.front_door)
        said: Startup | None = None
        async with AsyncRolloutClient(door, timeout_s=MAX_PAUSE_S, keys=self._topology.security.keys) as client:
            while True:
                try:
                    startup = self._compared(await client.status(), await client.backends.list())
                except ProrlError:
                    startup = Startup(0, len(self._plans), "the brokers")
                if startup.there == startup.total:
                    return
                if startup != said:
                    said = startup
                    yield startup
                await asyncio.sleep(FIRST_PAUSE_S / 5)

    def _compared(self, status: ServiceStatus, backends: tuple[BackendStatus, ...]) -> Startup:
        """Compare what has reported with what was planned."""
        wanted = {plan.name for plan in self._plans if plan.rank == 1} - {one.backend.backend_id for one in backends}
        parts = sorted(wanted)
        missing = len(wanted)
        for role in dict.fromkeys(stage.role for stage in self._topology.stage):
            planned = sum(one.processes for one in self._topology.stage if one.role == role)
            lacking = planned - sum(one.role == role for one in status.stages)
            if lacking > 0:
                missing += lacking
                parts.append(f"{lacking} {role} process{'es' if lacking > 1 else ''}")
        return Startup(len(self._plans) - missing, len(self._plans), ", ".join(parts))

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
        """Wait until children have ended, `limit_s` have passed, or somebody is in a hurry; give those that live."""
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


def _check_connections(topology: Topology) -> None:
    """Raise what each child would: about its keys, its endpoints, and where stages and engines reach the brokers."""
    stages, backends = topology.rollout_broker.stage_events, topology.backend_broker.endpoint
    keyring = Keyring.load(topology.security.keys, BROKER)
    if topology.stage or topology.backends:
        Keyring.load(topology.security.keys, WORKER)
    endpoints = [topology.endpoint(template) for template in (topology.rollout_broker.front_door, stages, backends)]
    if keyring is None:
        for endpoint in endpoints:
            if not topology.service.insecure:
                check_private(endpoint)
            elif endpoint.startswith("tcp://") and not is_loopback(endpoint):
                log.warning(PLAINTEXT, endpoint)
                break
    for template, users in ((stages, topology.stage), (backends, topology.backends)):
        endpoint = topology.endpoint(template)
        try:
            endpoint_beside(endpoint, "")
        except InvalidEndpoint:
            if users:
                raise InvalidEndpoint(
                    f"{endpoint} is no address of this machine to which the service's own processes could connect; "
                    "name one, such as tcp://10.0.0.1:5556",
                    endpoint=endpoint,
                ) from None


async def _check_python(python: str) -> None:
    """Raise unless another environment's interpreter has what an engine host needs."""
    null = asyncio.subprocess.DEVNULL
    try:
        child = await asyncio.create_subprocess_exec(
            *(python, *ISOLATED, "-c", "import prorl_zmq.cli"), stdin=null, stdout=null, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise ConfigError(
            f"backends.python: {python} cannot be started ({error.strerror}); `make vllm` makes .vllm/bin/python, and "
            "a relative path is seen from the current folder",
            key="backends.python",
        ) from error
    _, said = await child.communicate()
    if child.returncode:
        words = said.decode(errors="replace").strip().rpartition("\n")[2]
        raise ConfigError(
            f"backends.python: {python} has no prorl-zmq: `{python} -m pip install 'prorl-zmq[server]'` ({words})",
            key="backends.python",
        )


@contextlib.asynccontextmanager
async def _run_dir(path: Path) -> AsyncIterator[None]:
    """Own the run folder: private to this user, held by one service at a time, and without sandboxes afterwards."""
    with _locked(path):
        await sweep(path / "sandboxes")  # of a service that was killed
        _clear(path)
        try:
            yield
        finally:
            await sweep(path / "sandboxes")
            _clear(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        own_run_dir(path)
        lock = (path / LOCK).open("w")
    except OSError as error:
        raise ConfigError(f"the run folder {path} cannot be used: {error.strerror}", key="run_dir") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise EndpointInUse(
                f"another service runs in {path}; stop it, or name another folder with --run-dir", endpoint=str(path)
            ) from None
        yield


def _clear(path: Path) -> None:
    """Remove the sockets that a service leaves in its run folder."""
    for left in path.iterdir():
        if left.is_socket() or (left.name.endswith(".lock") and left.name != LOCK):
            left.unlink(missing_ok=True)
