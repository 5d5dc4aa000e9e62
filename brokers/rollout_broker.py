"""The rollout broker's process: one loop that moves frames between its sockets and the pure objects beside it.

    front door    ROUTER  ⇄ trainers (REQ and DEALER)
    stage events  PULL    ← stage processes: reports, phases done and failed
    one PUSH per stage process, connected to the PULL it announced → phases to start and stop
    DEALER        → backend broker: releases for jobs whose stage process is gone

The loop owns all state, in `JobTable`, `Outbox`, `TaskCatalog` and the journal. When a stage process dies, its lease
lapses and the table gives its jobs to others. When this process dies, what its journal keeps is all that survives;
stage processes report to the next one within a heartbeat, and are told to stop what it does not know.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq

from .. import codec
from ..errors import MalformedMessage, ProrlError, VersionMismatch
from ..messages import (
    PROTOCOL_VERSION,
    CloseSandbox,
    Job,
    Outcome,
    Phase,
    PhaseDone,
    PhaseFailed,
    Release,
    StageEvent,
    StageLeaving,
    StageRefused,
    StageReport,
    StageWelcome,
    StopPhase,
    new_id,
)
from ..sockets import NOBLOCK, bind, connect, open_socket, receive, send
from ..trajectory import block_bytes
from .actions import Action, Close, End, Start, Stop, Unassign
from .front_door import FrontDoor
from .job_table import JobTable
from .loop import Loop
from .outbox import Outbox
from .task_catalog import TaskCatalog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..config import Topology
    from ..messages import StageCommand
    from ..sockets import Frame
    from .journal import Journal

BATCH = 256
"""Messages taken from one socket before the other gets its turn."""

log = logging.getLogger("prorl.rollout_broker")


class _Line(NamedTuple):
    """The way to a stage process."""

    socket: zmq.Socket[bytes]
    since: float


class RolloutBroker:
    """The rollout broker, bound and ready to `run`.

    Args:
        topology: endpoints and limits.
        journal: where jobs and results are kept; what it holds already is taken up again.

    Raises:
        EndpointInUse, InvalidEndpoint: it could not bind.
    """

    def __init__(self, topology: Topology, journal: Journal) -> None:
        self._settings = topology.rollout_broker
        self._journal = journal
        self._loop = Loop()
        insecure = topology.service.insecure
        self._door = open_socket(self._loop.context, zmq.ROUTER)
        # A reply to a client that is gone is an error here, not silence: its results go to the next client at once.
        self._door.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._events = open_socket(self._loop.context, zmq.PULL)
        try:
            self.front_door = bind(self._door, topology.endpoint(self._settings.front_door), insecure=insecure)
            self.stage_events = bind(self._events, topology.endpoint(self._settings.stage_events), insecure=insecure)
        except ProrlError:
            self._loop.close()
            raise
        self._backend_broker = topology.endpoint(topology.backend_broker.endpoint)
        self._releases = open_socket(self._loop.context, zmq.DEALER)
        connect(self._releases, self._backend_broker)
        self._stages: dict[str, _Line] = {}
        self._table = JobTable(self._settings.lease_s, self._settings.ready_limit)
        self._outbox = Outbox()
        self._catalog = TaskCatalog()
        self._sessions_with_news: set[str] = set()
        self._requests = FrontDoor(
            self._settings,
            self._backend_broker,
            self._table,
            self._outbox,
            self._catalog,
            journal,
            self._perform,
            self._reply,
            time.monotonic(),
        )
        self._next_tick = time.monotonic()
        self._recover()

    def run(self) -> None:
        """Serve until `stop`, SIGTERM or SIGINT; then close all sockets."""
        self._loop.register(self._events, self._drain_events)
        self._loop.register(self._door, self._drain_requests)
        self._loop.register(self._releases, self._drain_release_replies)
        try:
            self._loop.run(self._housekeep, self._say_ready)
        finally:
            self._loop.close()

    def stop(self) -> None:
        """End `run`; may be called from another thread or a signal handler."""
        self._loop.stop()

    def _recover(self) -> None:
        for finished in self._journal.uncollected():
            self._outbox.put(finished)
        for accepted in self._journal.unfinished():
            job = codec.decode(accepted.packed, Job, self._settings.job_limit_bytes)
            self._perform(self._table.submit(accepted.session, job, accepted.packed, time.monotonic()))

    def _say_ready(self) -> None:
        log.info("ready: front door %s, stage events %s", self.front_door, self.stage_events)

    def _housekeep(self) -> float:
        """Do what time demands; give the seconds until it demands more."""
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + min(self._settings.heartbeat_s, self._settings.lease_s / 4)
            self._perform(self._table.tick(now))
            self._drop_silent(now)
        news, self._sessions_with_news = self._sessions_with_news, set()
        self._requests.answer_held(news, now)
        deadline = self._requests.next_deadline()
        return max(0.0, min(self._next_tick, deadline if deadline is not None else self._next_tick) - now)

    def _drop_silent(self, now: float) -> None:
        """Close the lines to processes whose leases lapsed, and to those that never took their welcome."""
        for stage_id, line in tuple(self._stages.items()):
            if stage_id not in self._table.stages and line.since + self._settings.lease_s <= now:
                log.warning("stage process %s is silent", stage_id)
                self._disconnect(stage_id)

    # Front door -------------------------------------------------------------------------------------------------------

    def _drain_requests(self) -> None:
        for _ in range(BATCH):
            try:
                frames = self._door.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._requests.handle(frames, time.monotonic())

    def _reply(self, frames: Sequence[Frame]) -> bool:
        """Send a reply; false if its client is gone or does not read."""
        try:
            send(self._door, frames, NOBLOCK)
        except zmq.ZMQError as error:
            log.info("a client did not take its reply: %s", error.strerror)
            return False
        return True

    # Stage processes --------------------------------------------------------------------------------------------------

    def _drain_events(self) -> None:
        for _ in range(BATCH):
            try:
                header, *rest = receive(self._events, copied=1)
            except zmq.Again:
                return
            try:
                event = codec.decode(header, StageEvent)  # type: ignore[arg-type]
                self._handle_event(event, _block(event, rest), time.monotonic())
            except MalformedMessage as error:
                log.warning("dropped a malformed stage event: %s", error)
            except Exception:
                log.exception("a stage event failed")  # a fault of ours must not take all jobs with it

    def _handle_event(self, event: StageEvent, block: Any, now: float) -> None:
        match event:
            case PhaseDone():
                self._perform(self._table.phase_done(event, block, now))
            case PhaseFailed():
                self._perform(self._table.phase_failed(event, block, now))
            case StageReport():
                self._handle_report(event, now)
            case StageLeaving():
                self._perform(self._table.stage_left(event.stage_id, now))
                self._disconnect(event.stage_id)

    def _handle_report(self, report: StageReport, now: float) -> None:
        if report.stage_id not in self._stages:
            self._stages[report.stage_id] = _Line(self._connect(report.endpoint), now)
            if report.protocol != PROTOCOL_VERSION:
                self._refuse(report)
                return
            self._welcome(report)
        elif not report.welcomed:
            self._welcome(report)
        if report.welcomed:
            if report.stage_id not in self._table.stages:
                where = (report.role, report.stage_id, report.node, report.slots)
                log.info("%s process %s joined: node %s, %d slots", *where)
            self._catalog.add(report.tasks)
            self._perform(self._table.stage_reported(report, now))

    def _connect(self, endpoint: str) -> zmq.Socket[bytes]:
        try:
            socket = open_socket(self._loop.context, zmq.PUSH)
        except zmq.ZMQError as error:
            raise MalformedMessage(f"no socket for {endpoint}: {error.strerror}") from error
        try:
            connect(socket, endpoint)
        except ProrlError as error:
            socket.close()
            raise MalformedMessage(f"{endpoint} cannot be reached: {error}") from error
        return socket

    def _welcome(self, report: StageReport) -> None:
        welcome = StageWelcome(backend_broker=self._backend_broker, heartbeat_s=self._settings.heartbeat_s)
        self._command(report.stage_id, welcome)

    def _refuse(self, report: StageReport) -> None:
        error = VersionMismatch(
            f"the stage process speaks protocol {report.protocol}, the broker {PROTOCOL_VERSION}; install the same "
            "version of prorl-zmq on both",
            ours=PROTOCOL_VERSION,
            theirs=report.protocol,
        )
        self._command(report.stage_id, StageRefused(error.info()))
        self._stages.pop(report.stage_id).socket.close(linger=1000)

    def _disconnect(self, stage_id: str) -> None:
        line = self._stages.pop(stage_id, None)
        if line is not None:
            line.socket.close()

    def _command(self, stage_id: str, command: StageCommand, *frames: Frame) -> None:
        line = self._stages.get(stage_id)
        if line is None:
            return
        try:
            send(line.socket, [codec.encode(command), *frames], NOBLOCK)
        except zmq.Again:
            log.warning("stage process %s does not take messages; its lease will lapse", stage_id)

    # Actions ----------------------------------------------------------------------------------------------------------

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            try:
                self._act(action)
            except MalformedMessage as error:
                log.error("an action of the job table could not be sent: %s", error)  # noqa: TRY400 - it says it all

    def _act(self, action: Action) -> None:
        match action:
            case Start():
                self._command(action.stage_id, action.command, action.packed_job)
            case End():
                self._journal.ended(action.finished)
                self._outbox.put(action.finished)
                self._sessions_with_news.add(action.finished.session)
            case Stop():
                self._command(action.stage_id, StopPhase(*action.hold))
            case Close():
                stage_id = self._table.stages.on_node(action.sandbox.node)
                if stage_id is not None:
                    self._command(stage_id, CloseSandbox(action.sandbox))
            case Unassign():
                request = Release(new_id(), *action.hold)
                try:
                    send(self._releases, [b"", codec.encode(request)], NOBLOCK)
                except zmq.Again:
                    log.warning("the backend broker does not take releases; its leases will lapse")

    def _drain_release_replies(self) -> None:
        for _ in range(BATCH):
            try:
                self._releases.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return


def _block(event: StageEvent, rest: Sequence[Frame]) -> Frame | None:
    """Give the trajectory's block behind an event, having checked that it is of the size that the event says."""
    tokens = event.tokens if isinstance(event, PhaseDone | PhaseFailed) else 0
    if len(rest) != (1 if tokens else 0):
        raise MalformedMessage(f"{type(event).__name__} of {tokens} tokens came with {len(rest)} further frames")
    if not isinstance(event, PhaseDone | PhaseFailed):
        return None
    if isinstance(event, PhaseFailed) and event.outcome == Outcome.COMPLETED:
        raise MalformedMessage(f"job {event.job_id} is said to have failed with outcome `completed`")
    if isinstance(event, PhaseDone) and event.phase == Phase.EVAL and not math.isfinite(event.reward or 0.0):
        raise MalformedMessage(f"job {event.job_id} has the reward {event.reward}")
    if not tokens:
        if event.turns:
            raise MalformedMessage(f"job {event.job_id} has {event.turns} turns and no tokens")
        return None
    if len(rest[0]) != block_bytes(tokens, event.turns):
        raise MalformedMessage(f"the trajectory of job {event.job_id} has {len(rest[0])} bytes, not what it claims")
    return rest[0]
