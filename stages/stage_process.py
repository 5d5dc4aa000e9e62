"""A stage process: takes phases of one role from the rollout broker, runs them concurrently, reports their ends.

    PULL  (bound, announced)    ← rollout broker: phases to start and stop, sandboxes to close
    PUSH                        → rollout broker: reports (announcement, heartbeat and leases in one), phases ended
    DEALER                      ⇄ backend broker and engine hosts (RUN and SCORE)

The process keeps nothing on disk, and continues to work while the broker restarts. After `MAX_REPORT_FAILURES` failed
reports in a row it exits, and its supervisor restarts it. On SIGTERM it stops its phases within `SHUTDOWN_S`, closes
its resources, and exits. On SIGUSR1 it accepts no new phases, and exits once it holds none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import zmq

from ..errors import MalformedMessage, ProrlError, from_info
from ..inference.client import EngineClient
from ..metrics.catalog import PROCESS_PAUSED
from ..metrics.reporter import MetricsReporter
from ..security.keyring import WORKER, Keyring
from ..security.peer_connection import PeerConnection
from ..security.rights import Listener
from ..security.zap_authenticator import ZapAuthenticator
from ..system.logs import job_of_sandbox, of_job
from ..system.memory import give_memory_back
from ..system.node_name import place_of
from ..system.pauses import PauseWatch
from ..system.processes import stop_signals
from ..tools.node_facts import NodeFactsReader
from ..tools.sandbox.sandboxes import Sandboxes
from ..tools.sandbox.sweeping import sweep_abandoned
from ..wire import codec
from ..wire.async_socket import AsyncSocket
from ..wire.change_reports import ChangeReports
from ..wire.messages.base import PROTOCOL_VERSION, new_id
from ..wire.messages.jobs import Phase
from ..wire.messages.stages import (
    CloseSandbox,
    EventsNoted,
    ShowTurns,
    SlotDemand,
    StageCommand,
    StageLeaving,
    StageRefused,
    StageReport,
    StageWelcome,
    StartPhase,
    StopPhase,
)
from ..wire.sockets import CONTROL_FRAME_BYTES, JOB_FRAME_BYTES, endpoint_beside, open_socket
from .backend_client import BackendClient
from .event_outbox import EventOutbox
from .grading.grader_pool import GraderPool
from .other_models import ChatEndpoints
from .running_phases import RunningPhases
from .sandbox_handoff import SandboxHandoff
from .stage_services import StageServices

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
    from pathlib import Path

    from ..wire.messages.jobs import SandboxKind
    from ..wire.messages.nodes import NodeFacts
    from ..wire.messages.stages import StageEvent
    from ..wire.sockets import Frame
    from .handler import AgentHandler
    from .harness.outside_rollout import RolloutDoor

SHUTDOWN_S = 10.0
LOOPBACK = "127.0.0.1"
CLOSE_S = 5.0
"""Seconds in which all handlers and connections together must close."""
FIRST_REPORT_S = 0.5
"""Seconds between reports until the broker has answered."""
MAX_REPORT_FAILURES = 10
"""Failed reports in a row before the process exits: the jobs of a silent process are lost anyway."""
UNANSWERED_S = 5.0
"""Seconds of silence of the broker at first before a log line reports it."""

log = logging.getLogger("prorl.stage")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    role: Phase
    slots: int
    connect: str
    node: str
    run_dir: Path
    """Folder for this process's socket and its node's sandboxes."""
    bind: str = ""
    """Where to bind the PULL, as the broker reaches it; empty: see `sockets.endpoint_beside`."""
    sandbox: SandboxKind = "bubblewrap"
    image: str = ""
    """The root filesystem of sandboxes whose task names none."""
    image_folders: tuple[Path, ...] = ()
    """Folders of images that tasks may name, in addition to those of `prorl image build`."""
    mcp_keys: Mapping[str, str] = field(default_factory=dict)
    """The addresses of the MCP servers that jobs may name, with the key for each; empty: none."""
    insecure: bool = False
    """Allow plaintext TCP beyond loopback."""
    keys: Path | None = None
    """The key folder; None: that of `$PRORL_KEYS`, if set."""
    shutdown_s: float = SHUTDOWN_S
    """Seconds in which phases must stop; then the process exits without them."""


class StageProcess:
    """A stage process: `run` is a process's main, `serve` runs in any event loop.

    Args:
        options: what it serves, and where.
        handlers: the tasks that it serves, by name.
        sandboxes: makes sandboxes; the caller closes it. None: its own.
    """

    def __init__(
        self, options: StageOptions, handlers: Mapping[str, AgentHandler[Any]], sandboxes: Sandboxes | None = None
    ) -> None:
        self.stage_id = f"{options.role}-{new_id()[:12]}"
        self._options = options
        self._process = f"stage_{options.role}"
        self._handlers = handlers
        self._tasks = tuple(handler.describe() for handler in handlers.values())
        self._own_sandboxes = ExitStack()
        self._sandboxes = sandboxes or self._own_sandboxes.enter_context(closing(make_sandboxes(options)))
        self._handoff = SandboxHandoff()
        self._graders = GraderPool()
        self._endpoints = ChatEndpoints()
        self._event_outbox = EventOutbox()
        self._running = RunningPhases(handlers, self._event_outbox, self._send_all)
        self._background: set[asyncio.Task[None]] = set()
        self._heartbeat_s = FIRST_REPORT_S
        self._services: StageServices | None = None
        """Set with the broker's welcome."""
        self._report_now = asyncio.Event()
        self._door: RolloutDoor | None = None
        self._reports = ChangeReports(self.stage_id)
        self._warned = False
        self._draining = False
        self._place = place_of(options.run_dir)
        self._machine = NodeFactsReader(options.run_dir, options.image, options.image_folders)

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop`; SIGUSR1 drains. Raises the errors of `serve`."""
        give_memory_back()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.drain)
        with stop_signals(self.stop):
            await self.serve()

    async def serve(self) -> None:
        """Serve until `stop`; raise why the process cannot start or continue, such as `VersionMismatch`."""
        self._stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._open(context)
            self._in_background(asyncio.to_thread(sweep_abandoned, self._sandboxes.root))
            reporting = asyncio.create_task(self._report_forever())
            pauses = PauseWatch(self._note_pause)
            metrics = MetricsReporter(self._options.run_dir, self._process)
            counting = asyncio.create_task(metrics.report_forever())
            try:
                done, _ = await asyncio.wait((self._stopping, reporting), return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    each.result()  # raises the reason if the process cannot continue
            finally:
                pauses.close()
                reporting.cancel()
                await self._leave()
                counting.cancel()
                await asyncio.gather(counting, return_exceptions=True)
                metrics.close()
        finally:
            await asyncio.sleep(0)  # libuv aborts when a socket closes in the iteration that registered it
            context.destroy(linger=1000)

    def _note_pause(self, pause_s: float) -> None:
        log.warning("this process did not run for %.1f s, which does not count for its jobs", pause_s)
        PROCESS_PAUSED.add(self._process, amount=pause_s)
        self._running.add_time(pause_s)

    def drain(self) -> None:
        """Accept no new phases, and stop once this process holds none."""
        self._draining = True
        self._reports.want_full()
        self._report_now.set()

    def stop(self) -> None:
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
        self._broker = PeerConnection(
            context,
            zmq.PUSH,
            options.connect,
            self._keyring,
            None,
            on_connected=self._reports.connected,
            limit_bytes=CONTROL_FRAME_BYTES,
        )
        log.info("%s process %s: node %s, %d slots", options.role, self.stage_id, options.node, options.slots)

    async def _report_forever(self) -> None:
        started = time.monotonic()
        failures = 0
        while True:
            self._report_now.clear()
            try:
                self._report(time.monotonic() - started)
                failures = 0
            except Exception:  # a bug in one report must not cost the running phases
                failures += 1
                if failures == MAX_REPORT_FAILURES:
                    raise
                log.exception("a report to the rollout broker failed (%d of %d)", failures, MAX_REPORT_FAILURES)
            if self._draining and self._holds_nothing():
                self.stop()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._report_now.wait(), self._heartbeat_s)

    def _report(self, up_s: float) -> None:
        if self._services is None and not self._warned and up_s > UNANSWERED_S:
            self._warned = True
            why = self._broker.handshake.problem or "is it running there?"
            log.warning("no answer from a rollout broker at %s; %s", self._options.connect, why)
        running = self._running.attempts
        backends = self._services.backends.backends() if self._services is not None else {}
        facts = self._machine.read()
        news = ({self.stage_id: running}, backends, facts, self._addresses)
        if self._reports.is_full(*news) or self._services is None:
            self._send(self._full_report(running, backends, facts))
        else:
            self._send(self._reports.changes(*news))
        self._send_all(self._event_outbox.due(time.monotonic()))
        if self._services is not None and (self._options.role == Phase.RUN or self._services.backends.holds_some):
            self._services.backends.keep_alive()

    def _full_report(self, running: dict[str, int], backends: dict[str, str], facts: NodeFacts) -> StageReport:
        return StageReport(
            protocol=PROTOCOL_VERSION,
            stage_id=self.stage_id,
            number=self._reports.number,
            asks_answer=self._reports.is_unanswered,
            role=self._options.role,
            node=self._options.node,
            place=self._place,
            slots=self._options.slots,
            endpoint=self._endpoint,
            curve_key=self._authenticator.curve_key(self._endpoint),
            tasks=self._tasks,
            welcomed=self._services is not None,
            draining=self._draining,
            running=running,
            origins=self._event_outbox.origins | self._running.origins,
            ended=self._event_outbox.ended,
            backends=backends,
            addresses=dict(self._addresses),
            facts=facts,
        )

    def _holds_nothing(self) -> bool:
        """Return whether no phase runs, all ends are confirmed, and EVAL has attached to all sandboxes of RUN."""
        handed_on = len(self._handoff) if self._options.role == Phase.RUN else 0
        return not (self._running or self._event_outbox.ended or handed_on)

    async def _leave(self) -> None:
        with _logged("telling the rollout broker that this process leaves"):
            self._running.send_ended()
            self._send(StageLeaving(self.stage_id))
        if tasks := [*self._running.stop_all(), *self._background]:
            _, stuck = await asyncio.wait(tasks, timeout=self._options.shutdown_s)
            for task in stuck:
                log.warning("%s did not stop within %g s", task.get_name(), self._options.shutdown_s)
        with _logged("reporting the phases that have ended"):
            self._running.send_ended()
        await self._close()
        log.info("%s process %s ended", self._options.role, self.stage_id)

    async def _close(self) -> None:
        """Close all resources of this process; a failure is logged and skips nothing."""
        awaited: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("endpoints of models", self._endpoints.close),
            ("handoff of sandboxes", self._handoff.release),
            *((f"handler of the task {name}", handler.close) for name, handler in self._handlers.items()),
        ]
        if self._door is not None:
            awaited.append(("door of programs outside", self._door.close))
        tasks = {asyncio.create_task(_closed(what, close)): what for what, close in awaited}
        _, stuck = await asyncio.wait(tasks, timeout=CLOSE_S)
        for task in stuck:
            task.cancel()
            log.warning("the %s did not close within %g s", tasks[task], CLOSE_S)
        lent = [("connection to the backend broker", self._services.backends.close)] if self._services else []
        owned: list[tuple[str, Callable[[], None]]] = [
            ("sandboxes", self._own_sandboxes.close),
            ("graders", self._graders.close),
            *lent,
            ("engine client", self._engines.close),
            ("inbox", self._inbox.close),
            ("authenticator", self._authenticator.close),
            ("connection to the rollout broker", partial(self._broker.close, linger_ms=1000)),
        ]
        for what, close in owned:
            with _logged(f"closing the {what}"):
                close()

    def _receive(self, frames: list[bytes | zmq.Frame]) -> None:
        try:
            command = codec.decode(frames[0], StageCommand)  # type: ignore[arg-type]
            self._handle(command, frames[1:])
        except MalformedMessage as error:
            log.warning("dropped a malformed command: %s", error)

    def _handle(self, command: StageCommand, rest: list[bytes | zmq.Frame]) -> None:
        match command:
            case StartPhase():
                assert self._services is not None, "a phase came before the broker's welcome"
                self._running.start(command, rest, self._services)
            case StopPhase():
                self._running.stop(command)
            case ShowTurns():
                self._broker.send(self._running.turns_shown(command, self.stage_id))
            case EventsNoted():
                self._event_outbox.noted(command.numbers)
            case CloseSandbox():
                self._in_background(self._close_sandbox(command))
            case StageWelcome():
                self._heartbeat_s = command.heartbeat_s
                self._reports.answered()
                if self._services is None:
                    self._services = self._lend(command.backend_broker)
                    log.info("%s process %s joined %s", self._options.role, self.stage_id, self._options.connect)
                    self._report_now.set()  # the broker starts no phases here before a report says `welcomed`
                self._services.backends.connect(command.backend_broker)
                self._send_all(self._event_outbox.all(time.monotonic()))
            case SlotDemand():
                pass  # for nodes whose slots several brokers share
            case StageRefused():
                if not self._stopping.done():
                    self._stopping.set_exception(from_info(command.error))

    def _lend(self, backend_broker: str) -> StageServices:
        options = self._options
        return StageServices(
            self.stage_id,
            self._sandboxes,
            BackendClient(self._context, backend_broker, self.stage_id, options.node, self._keyring),
            self._engines,
            self._handoff,
            self._graders,
            self._endpoints,
            self._opened_door,
            options.mcp_keys,
        )

    def _opened_door(self) -> RolloutDoor:
        """Return the HTTP server for programs outside, made with the first rollout that one of them leads.

        Imported lazily: importing an HTTP server takes half as long as starting a process.
        """
        if self._door is None:
            from .harness.outside_rollout import RolloutDoor

            host = host_beside(self._endpoint, insecure=self._options.insecure)
            self._door = RolloutDoor(host, self._report_now.set)
        return self._door

    @property
    def _addresses(self) -> Mapping[str, str]:
        """The addresses of rollouts that programs outside lead, by job."""
        return self._door.addresses if self._door is not None else {}

    async def _close_sandbox(self, command: CloseSandbox) -> None:
        try:
            sandbox = await self._sandboxes.attach(command.sandbox)
            await sandbox.close()
        except (ProrlError, OSError) as error:
            name = PurePath(command.sandbox.path).name
            log.info("the sandbox %s was not closed: %s", name, error, extra=of_job(*job_of_sandbox(name)))

    def _in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _send(self, event: StageEvent) -> None:
        self._broker.send([codec.encode(event)])

    def _send_all(self, events: list[list[Frame]]) -> None:
        for frames in events:
            self._broker.send(frames)


def make_sandboxes(options: StageOptions) -> Sandboxes:
    """Return the factory of sandboxes for stage processes with these options; the caller closes it."""
    return Sandboxes(
        options.sandbox,
        options.run_dir / "sandboxes",
        options.node,
        options.image,
        image_folders=options.image_folders,
        keys=options.keys,
    )


def host_beside(endpoint: str, *, insecure: bool) -> str:
    """Return where to listen for programs outside: loopback, or the host of a socket that may use plaintext TCP."""
    host = urlsplit(endpoint).hostname if endpoint.startswith("tcp://") else None
    return host if host is not None and insecure else LOOPBACK


async def _closed(what: str, close: Callable[[], Awaitable[None]]) -> None:
    with _logged(f"closing the {what}"):
        await close()


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log an error of the block instead of raising it."""
    try:
        yield
    except Exception:  # a task's own handler is closed too
        log.exception("%s failed", what)
