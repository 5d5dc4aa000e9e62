"""A stage process: takes phases of one role from the rollout broker, runs them side by side, reports how they ended.

    PULL  (bound, announced)    ← rollout broker: phases to start and stop, sandboxes to close
    PUSH                        → rollout broker: reports (announcement, heartbeat and leases in one), phases ended
    DEALER                      ⇄ backend broker and engine hosts (RUN)

It keeps nothing on disk. When the broker dies it goes on working and reporting, tells the next one again what that may
not have in its journal (`EventOutbox`), and is told what is not wanted any more. When this process dies, its leases
lapse and the broker gives its jobs to others. On SIGTERM it says that it leaves, stops its phases (tool calls and
generations included) within `SHUTDOWN_S`, and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import zmq

from ..errors import MalformedMessage, ProrlError, from_info
from ..inference.client import EngineClient
from ..security.keyring import WORKER, Keyring
from ..security.peer_connection import PeerConnection
from ..security.rights import Listener
from ..security.zap_authenticator import ZapAuthenticator
from ..system.logs import about_job, job_of_sandbox, of_job
from ..system.memory import give_memory_back
from ..system.processes import stop_signals
from ..tools.sandbox.sandboxes import Sandboxes
from ..tools.sandbox.sweeping import sweep_abandoned
from ..wire import codec
from ..wire.async_socket import AsyncSocket
from ..wire.messages.base import new_id
from ..wire.messages.jobs import Job, Phase
from ..wire.messages.stages import (
    CloseSandbox,
    EventsNoted,
    PhaseDone,
    StageCommand,
    StageLeaving,
    StageRefused,
    StageReport,
    StageWelcome,
    StartPhase,
    StopPhase,
)
from ..wire.sockets import CONTROL_FRAME_BYTES, JOB_FRAME_BYTES, MAX_FRAME_BYTES, endpoint_beside, open_socket
from .backend_client import BackendClient
from .event_outbox import EventOutbox
from .grading.grader_pool import GraderPool
from .phase_runner import PhaseRunner
from .sandbox_handoff import SandboxHandoff

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from ..wire.messages.jobs import SandboxKind
    from ..wire.messages.stages import StageEvent
    from ..wire.sockets import Frame
    from .handler import AgentHandler

SHUTDOWN_S = 10.0
"""How long phases may take to stop before the process ends without them."""
FIRST_REPORT_S = 0.5
"""How often to report until the broker has answered."""
UNANSWERED_S = 5.0
"""How long the broker may be silent at first before the log says so."""

log = logging.getLogger("prorl.stage")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """What a stage process is started with."""

    role: Phase
    slots: int
    connect: str
    """The rollout broker's endpoint for stage events."""
    node: str
    run_dir: Path
    """Folder for this process's socket and its node's sandboxes."""
    bind: str = ""
    """Where to bind the PULL, as the broker reaches it; empty: see `sockets.endpoint_beside`."""
    sandbox: SandboxKind = "bubblewrap"
    image: str = ""
    """The root filesystem of sandboxes whose task names none."""
    image_folders: tuple[Path, ...] = ()
    """Where the images are that tasks may name, beside those of `prorl image build`."""
    insecure: bool = False
    """Allow plaintext TCP beyond loopback."""
    keys: Path | None = None
    """The key folder; None: that of `$PRORL_KEYS`, or none."""


@dataclass(slots=True)
class _Running:
    """A phase under way."""

    attempt: int
    task: asyncio.Task[None] = field(init=False)

    def stop(self) -> None:
        """Cancel it once it has begun: a task that is cancelled before its first step ends without a word."""
        asyncio.get_running_loop().call_soon(self._cancel)

    def _cancel(self) -> None:
        if not self.task.cancelling():  # a second time would break into the closing of what it holds
            self.task.cancel()


class StageProcess:
    """One stage process; `run` serves until SIGTERM, SIGINT or `stop`.

    Args:
        options: what it was started with.
        handlers: the tasks that it serves, by name.
    """

    def __init__(self, options: StageOptions, handlers: dict[str, AgentHandler[Any]]) -> None:
        self.stage_id = f"{options.role}-{new_id()[:12]}"
        self._options = options
        self._handlers = handlers
        self._tasks = tuple(handler.describe() for handler in handlers.values())
        self._sandboxes = Sandboxes(
            options.sandbox,
            options.run_dir / "sandboxes",
            options.node,
            options.image,
            image_folders=options.image_folders,
            keys=options.keys,
        )
        self._custody = SandboxHandoff()
        self._graders = GraderPool()
        self._running: dict[str, _Running] = {}
        self._unacknowledged = EventOutbox()
        self._errands: set[asyncio.Task[None]] = set()
        self._heartbeat_s = FIRST_REPORT_S
        self._backends: BackendClient | None = None
        self._report_now = asyncio.Event()
        self._warned = False

    async def run(self) -> None:
        """Serve until stopped.

        Raises:
            EndpointInUse, InvalidEndpoint: a socket could not be bound or connected.
            ConfigError: the key folder is not private, or lacks a key.
            VersionMismatch: the broker speaks another protocol version.
        """
        self._stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        give_memory_back()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            with stop_signals(self.stop):
                self._open(context)
                self._errand(asyncio.to_thread(sweep_abandoned, self._sandboxes.root))
                reporting = asyncio.create_task(self._report_forever())
                try:
                    await self._stopping
                finally:
                    reporting.cancel()
                    await self._leave()
        finally:
            context.destroy(linger=1000)

    def stop(self) -> None:
        """End `run` in good order."""
        if not self._stopping.done():
            self._stopping.set_result(None)

    def _open(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        options = self._options
        self._keyring = Keyring.load(options.keys, WORKER)
        self._authenticator = ZapAuthenticator(context, self._keyring, insecure=options.insecure)
        inbox = open_socket(context, zmq.PULL, JOB_FRAME_BYTES)
        where = options.bind or endpoint_beside(options.connect, f"{options.run_dir}/{self.stage_id}")
        self._endpoint = self._authenticator.bind(inbox, where, Listener.STAGE_INBOX)
        self._authenticator.attend()
        self._context = context
        self._engines = EngineClient(context, keyring=self._keyring)
        self._inbox = AsyncSocket(inbox, self._receive, copied=2)
        self._outbox = PeerConnection(
            context, zmq.PUSH, options.connect, self._keyring, None, limit_bytes=CONTROL_FRAME_BYTES
        )
        log.info("%s process %s: node %s, %d slots", options.role, self.stage_id, options.node, options.slots)

    async def _report_forever(self) -> None:
        started = time.monotonic()
        while True:
            self._report_now.clear()
            if self._backends is None and not self._warned and time.monotonic() - started > UNANSWERED_S:
                self._warned = True
                why = self._outbox.handshake.problem or "is it running there?"
                log.warning("no answer from a rollout broker at %s; %s", self._options.connect, why)
            report = StageReport(
                stage_id=self.stage_id,
                role=self._options.role,
                node=self._options.node,
                slots=self._options.slots,
                endpoint=self._endpoint,
                curve_key=self._authenticator.curve_key(self._endpoint),
                tasks=self._tasks,
                welcomed=self._backends is not None,
                running={job_id: running.attempt for job_id, running in self._running.items()},
                ended=self._unacknowledged.ended,
                backends=self._backends.backends() if self._backends is not None else {},
            )
            self._send(report)
            self._resend(self._unacknowledged.due(time.monotonic()))
            if self._backends is not None and self._options.role == Phase.RUN:
                self._backends.keep_alive()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._report_now.wait(), self._heartbeat_s)

    async def _leave(self) -> None:
        self._send(StageLeaving(self.stage_id))
        tasks = [running.task for running in self._running.values()]
        for running in self._running.values():
            running.stop()
        tasks += self._errands
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=SHUTDOWN_S)
            if stuck:
                log.warning("%d phases did not stop within %g s", len(stuck), SHUTDOWN_S)
        await self._custody.release()
        self._sandboxes.close()
        self._graders.close()
        for handler in self._handlers.values():
            await handler.close()
        if self._backends is not None:
            self._backends.close()
        self._engines.close()
        self._inbox.close()
        self._authenticator.close()
        self._outbox.close(linger_ms=1000)
        log.info("%s process %s ended", self._options.role, self.stage_id)

    # What the broker sends --------------------------------------------------------------------------------------------

    def _receive(self, frames: list[bytes | zmq.Frame]) -> None:
        try:
            command = codec.decode(frames[0], StageCommand)  # type: ignore[arg-type]
            self._handle(command, frames[1:])
        except MalformedMessage as error:
            log.warning("dropped a malformed command: %s", error)

    def _handle(self, command: StageCommand, rest: list[bytes | zmq.Frame]) -> None:
        match command:
            case StartPhase():
                if len(rest) != 1:
                    raise MalformedMessage(f"start_phase came with {len(rest)} further frames, not 1")
                self._start(command, rest[0])
            case StopPhase():
                running = self._running.get(command.job_id)
                if running is not None and running.attempt == command.attempt:
                    running.stop()
            case EventsNoted():
                self._unacknowledged.noted(command.numbers)
            case CloseSandbox():
                self._errand(self._close_sandbox(command))
            case StageWelcome():
                self._heartbeat_s = command.heartbeat_s
                if self._backends is None:
                    self._backends = BackendClient(
                        self._context, command.backend_broker, self.stage_id, self._options.node, self._keyring
                    )
                    log.info("%s process %s joined %s", self._options.role, self.stage_id, self._options.connect)
                    self._report_now.set()  # it takes no jobs before it has said that the welcome arrived
                self._resend(self._unacknowledged.all(time.monotonic()))
            case StageRefused():
                if not self._stopping.done():
                    self._stopping.set_exception(from_info(command.error))

    def _start(self, command: StartPhase, packed: bytes | zmq.Frame) -> None:
        job = codec.decode(packed if isinstance(packed, bytes) else packed.bytes, Job, limit_bytes=MAX_FRAME_BYTES)
        before = self._running.get(command.job_id)
        if before is not None:
            before.stop()  # nobody waits for it, or the broker would not have started the job again
        self._unacknowledged.started(command.job_id, command.attempt)
        running = self._running[command.job_id] = _Running(command.attempt)
        running.task = asyncio.create_task(self._run_phase(command, job, running))

    async def _run_phase(self, command: StartPhase, job: Job, running: _Running) -> None:
        if self._backends is None:
            raise AssertionError("a phase came before the broker's welcome")
        handler = self._handlers[job.task]
        runner = PhaseRunner(
            self.stage_id,
            command,
            job,
            handler,
            self._sandboxes,
            self._backends,
            self._engines,
            self._custody,
            self._graders,
        )
        with about_job(command.job_id, command.attempt, command.phase):
            log.debug("%s began", command.phase)
            try:
                event, block = await runner.run()
            finally:  # what is not reported any more is not held either, whatever went wrong
                is_wanted = self._running.get(command.job_id) is running
                if is_wanted:
                    del self._running[command.job_id]
            log.debug("%s %s", command.phase, "is done" if isinstance(event, PhaseDone) else "failed")
        if is_wanted:
            data = None if block is None else block.data
            self._outbox.send(self._unacknowledged.keep(event, data, time.monotonic()))

    async def _close_sandbox(self, command: CloseSandbox) -> None:
        try:
            sandbox = await self._sandboxes.attach(command.sandbox)
            await sandbox.close()
        except (ProrlError, OSError) as error:
            name = PurePath(command.sandbox.path).name
            log.info("the sandbox %s was not closed: %s", name, error, extra=of_job(*job_of_sandbox(name)))

    def _errand(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    def _send(self, event: StageEvent) -> None:
        self._outbox.send([codec.encode(event)])

    def _resend(self, events: list[list[Frame]]) -> None:
        for frames in events:
            self._outbox.send(frames)
