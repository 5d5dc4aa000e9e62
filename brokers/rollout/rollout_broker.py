"""The rollout broker's process: one loop that moves frames between its sockets and the pure objects beside it.

    front door    ROUTER  ⇄ trainers (REQ and DEALER)
    stage events  PULL    ← stage processes: reports, phases done and failed
    one PUSH per stage process, connected to the PULL it announced → phases to start and stop
    DEALER        → backend broker: releases for jobs whose stage process is gone

The loop owns all state, in `JobTable`, `ResultStore`, `TaskCatalog` and the journal. It handles a round of messages,
has the journal note what has changed, and then sends what follows from it (`WriteAhead`). When a stage process dies,
its lease expires and the table gives its jobs to others. When this process dies, the next one goes on from the journal:
stage processes report within a heartbeat what they work on, which goes on undisturbed, and send again the ends of
phases that nobody told them were noted.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import zmq

from ...data.trajectory import block_bytes
from ...errors import MalformedMessage, NotAllowed, ProrlError, VersionMismatch
from ...security.keyring import BROKER, Keyring, connect_to_service
from ...security.rights import Listener
from ...security.zap_authenticator import ZapAuthenticator
from ...wire import codec
from ...wire.messages.backends import Release
from ...wire.messages.base import PROTOCOL_VERSION, new_id
from ...wire.messages.jobs import Outcome, Phase
from ...wire.messages.stages import (
    CloseSandbox,
    EventsNoted,
    PhaseDone,
    PhaseFailed,
    StageEvent,
    StageLeaving,
    StageRefused,
    StageReport,
    StageWelcome,
    StopPhase,
)
from ...wire.sockets import CONTROL_FRAME_BYTES, NOBLOCK, open_socket, receive, send
from ..batches.batch_runner import BatchRunner
from ..journal.write_ahead import WriteAhead
from ..loop import Loop
from .actions import Action, Close, End, Start, Stop, Unassign
from .front_door import FrontDoor
from .job_history import JobHistory
from .job_log import log_actions
from .job_table import JobTable
from .quota import Quota
from .result_store import ResultStore
from .stage_connection import StageConnection
from .task_catalog import TaskCatalog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...config import Topology
    from ...security.rights import Sender
    from ...wire.messages.stages import StageCommand
    from ...wire.sockets import Frame
    from ..journal.journal import Journal

BATCH = 256
"""Messages taken from one socket before the other gets its turn."""

QUIET_HEARTBEATS = 2.5
"""A stage process that has not reported for so long gets nothing new; one whose line broke has so long to report."""

log = logging.getLogger("prorl.rollout_broker")


class RolloutBroker:
    """The rollout broker, bound and ready to `run`.

    Args:
        topology: endpoints and limits.
        journal: where jobs and results are kept; what it holds already is taken up again.

    Raises:
        EndpointInUse, InvalidEndpoint: it could not bind.
        ConfigError: the key folder is not private, or lacks the service's key.
    """

    def __init__(self, topology: Topology, journal: Journal) -> None:
        self._settings = topology.rollout_broker
        self._keyring = Keyring.load(topology.security.keys, BROKER)
        self._loop = Loop()
        self._authenticator = ZapAuthenticator(self._loop.context, self._keyring, insecure=topology.service.insecure)
        door_limit = max(CONTROL_FRAME_BYTES, self._settings.job_limit_bytes)
        self._door = open_socket(self._loop.context, zmq.ROUTER, door_limit)
        # A reply to a client that is gone is an error here, not silence: its results go to the next client at once.
        self._door.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._events = open_socket(self._loop.context, zmq.PULL)
        try:
            front_door, stage_events = self._settings.front_door, self._settings.stage_events
            self.front_door = self._authenticator.bind(self._door, topology.endpoint(front_door), Listener.FRONT_DOOR)
            self.stage_events = self._authenticator.bind(
                self._events, topology.endpoint(stage_events), Listener.STAGE_EVENTS
            )
        except ProrlError:
            self._loop.close()
            raise
        self._backend_broker = topology.endpoint(topology.backend_broker.endpoint)
        self._releases = open_socket(self._loop.context, zmq.DEALER, CONTROL_FRAME_BYTES)
        connect_to_service(self._releases, self._backend_broker, self._keyring)
        self._lines: dict[str, StageConnection] = {}
        quiet_s = min(QUIET_HEARTBEATS * self._settings.heartbeat_s, self._settings.lease_s)
        self._table = JobTable(self._settings.lease_s, self._settings.ready_limit, quiet_s)
        self._outbox = ResultStore()
        self._history = JobHistory()
        self._catalog = TaskCatalog()
        settings = self._settings
        self._quota = Quota(settings.max_jobs, settings.max_held_bytes, settings.max_session_share)
        self._table.queues.may_start = self._quota.may_start
        self._writes = WriteAhead(journal, self._table, self._outbox, self._history, self._act)
        self._batches = BatchRunner(
            self._table,
            self._outbox,
            self._history,
            self._catalog,
            self._quota,
            self._writes,
            self._perform,
            self._settings.job_limit_bytes,
        )
        self._noted: defaultdict[str, set[int]] = defaultdict(set)
        """Events that each stage process may forget once they are in the journal."""
        self._requests = FrontDoor(
            self._settings,
            self._backend_broker,
            self._table,
            self._outbox,
            self._history,
            self._catalog,
            self._quota,
            self._writes,
            self._perform,
            self._reply,
            self._authenticator.look_again,
            self._batches,
            time.monotonic(),
        )
        self._next_tick = time.monotonic()
        self._stood_still = False
        """The journal could not be written at the last tick."""
        try:
            self._recover(journal)
        except ProrlError:
            self._loop.close()
            raise

    def run(self) -> None:
        """Serve until `stop`, SIGTERM or SIGINT; then close all sockets."""
        self._loop.register(self._events, self._drain_events)
        self._loop.register(self._door, self._drain_requests)
        self._loop.register(self._releases, self._drain_release_replies)
        self._authenticator.register(self._loop.register)
        try:
            self._loop.run(self._housekeep, self._say_ready)
            self._writes.settle(time.monotonic(), everything=True)
        finally:
            for line in self._lines.values():
                line.close()
            self._loop.close()

    def stop(self) -> None:
        """End `run`; may be called from another thread or a signal handler."""
        self._loop.stop()

    def _recover(self, journal: Journal) -> None:
        recovered = journal.recover()
        at = time.time()
        for finished in recovered.uncollected:
            self._outbox.put(finished)
            self._quota.recovered(finished)
            self._history.restore_ended(finished.result.job_id, finished.history)
        for state in recovered.unfinished:
            self._quota.submitted(state.session, state.job_id, len(state.packed))
            self._history.restore(state.job_id, state.history, at)
        now = time.monotonic()
        self._table.restore(recovered.unfinished, recovered.last_sequence, now)
        self._batches.recover(recovered.notes, recovered.unfinished, recovered.uncollected, now)
        if recovered.unfinished or recovered.uncollected:
            counts = (len(recovered.unfinished), len(recovered.uncollected))
            log.info("took up %d jobs and %d uncollected results from the journal", *counts)

    def _say_ready(self) -> None:
        log.info("ready: front door %s, stage events %s", self.front_door, self.stage_events)

    def _housekeep(self) -> float:
        """Do what time demands; give the seconds until it demands more."""
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + min(self._settings.heartbeat_s, self._settings.lease_s / 4)
            self._note_broken_lines(now)
            self._watch_time(now)
        self._batches.launch(now)
        self._writes.settle(now)
        self._requests.answer_held(self._writes.take_news(), now)
        deadlines = (self._next_tick, self._requests.next_deadline(), self._writes.retry_at)
        return max(0.0, min(deadline for deadline in deadlines if deadline is not None) - now)

    def _watch_time(self, now: float) -> None:
        """End what is overdue. Time stands still while the journal cannot be written, since nothing is sent then."""
        if self._writes.is_stuck:
            self._stood_still = True
            return
        if self._stood_still:
            self._stood_still = False
            self._table.begin_leases_anew(now)
        self._perform(self._table.tick(now))
        self._batches.tick(now)
        self._drop_silent(now)

    def _note_broken_lines(self, now: float) -> None:
        for stage_id, line in self._lines.items():
            if line.has_died():
                log.warning("the connection to stage process %s ended, and another one is refused", stage_id)
                self._table.line_broke(stage_id, now)

    def _drop_silent(self, now: float) -> None:
        """Close the lines to processes whose leases lapsed, and to those that never took their welcome."""
        for stage_id, line in tuple(self._lines.items()):
            if stage_id not in self._table.stages and line.since + self._settings.lease_s <= now:
                log.warning("stage process %s is silent", stage_id)
                self._disconnect(stage_id)

    # Front door -------------------------------------------------------------------------------------------------------

    def _drain_requests(self) -> None:
        for _ in range(BATCH):
            try:
                sender, frames = self._authenticator.receive(self._door)
            except zmq.Again:
                return
            except MalformedMessage as error:
                log.warning("dropped a request: %s", error.message)
                continue
            self._requests.handle(frames, time.monotonic(), sender)  # type: ignore[arg-type]

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
                sender, (header, *rest) = self._authenticator.receive(self._events, copied=1)
            except zmq.Again:
                return
            except MalformedMessage as error:
                log.warning("dropped a stage event: %s", error.message)
                continue
            try:
                event = codec.decode(header, StageEvent)  # type: ignore[arg-type]
                if sender.revoked:
                    self._turn_away(event.stage_id, sender)
                else:
                    self._handle_event(event, _block(event, rest), time.monotonic(), sender.user_id)
            except MalformedMessage as error:
                log.warning("dropped a malformed stage event: %s", error)
                self._note_malformed(header)
            except Exception:
                log.exception("a stage event failed")  # a fault of ours must not take all jobs with it

    def _turn_away(self, stage_id: str, sender: Sender) -> None:
        """Tell a process whose key was revoked, and have its lease lapse."""
        line = self._lines.get(stage_id)
        if line is not None and line.key == sender.user_id:
            log.warning("the key of stage process %s was revoked", stage_id)
            self._refuse(stage_id, NotAllowed(f"the key of stage process {stage_id} was revoked", key=sender.name))

    def _handle_event(self, event: StageEvent, block: Any, now: float, key: str) -> None:
        match event:
            case PhaseDone():
                self._note_backend(event.job_id, event.attempt, event.backend)
                self._perform(self._table.phase_done(event, block, now))
                self._note(event.stage_id, event.number)
            case PhaseFailed():
                self._note_backend(event.job_id, event.attempt, event.backend)
                self._perform(self._table.phase_failed(event, block, now))
                self._note(event.stage_id, event.number)
            case StageReport():
                self._handle_report(event, now, key)
            case StageLeaving():
                self._perform(self._table.stage_left(event.stage_id, now))
                self._disconnect(event.stage_id)

    def _note(self, stage_id: str, number: int) -> None:
        """Have a stage process told that it may forget an event, once what that changed is in the journal."""
        if number:
            if not self._noted:
                self._writes.then(self._say_noted)
            self._noted[stage_id].add(number)

    def _note_malformed(self, header: bytes | zmq.Frame) -> None:
        """Let an event go that would be as malformed if it was sent again."""
        try:
            content = codec.unpack(header if isinstance(header, bytes) else header.bytes)
        except MalformedMessage:
            return
        if not isinstance(content, dict):
            return
        stage_id, number = content.get("stage_id"), content.get("number")
        if isinstance(stage_id, str) and isinstance(number, int) and stage_id in self._lines:
            self._note(stage_id, number)

    def _say_noted(self) -> None:
        for stage_id, numbers in self._noted.items():
            self._command(stage_id, EventsNoted(tuple(sorted(numbers))))
        self._noted.clear()

    def _handle_report(self, report: StageReport, now: float, key: str) -> None:
        if report.stage_id not in self._lines:
            self._lines[report.stage_id] = StageConnection(self._loop.context, report, key, self._keyring, now)
            if report.protocol != PROTOCOL_VERSION:
                self._refuse(report.stage_id, _mismatch(report))
                return
            self._welcome(report)
        elif not report.welcomed:
            self._welcome(report)
        if report.welcomed:
            if report.stage_id not in self._table.stages:
                where = (report.role, report.stage_id, report.node, report.slots)
                log.info("%s process %s joined: node %s, %d slots", *where)
            self._catalog.add(report.tasks)
            for job_id, backend in report.backends.items():
                self._note_backend(job_id, report.running.get(job_id, 0), backend)
            self._perform(self._table.stage_reported(report, now))

    def _note_backend(self, job_id: str, attempt: int, backend: str) -> None:
        if backend:
            self._history.assigned(job_id, attempt, backend, time.time())

    def _welcome(self, report: StageReport) -> None:
        welcome = StageWelcome(backend_broker=self._backend_broker, heartbeat_s=self._settings.heartbeat_s)
        self._command(report.stage_id, welcome)

    def _refuse(self, stage_id: str, error: ProrlError) -> None:
        self._command(stage_id, StageRefused(error.info()))
        self._lines.pop(stage_id).close(linger_ms=1000)

    def _disconnect(self, stage_id: str) -> None:
        line = self._lines.pop(stage_id, None)
        if line is not None:
            line.close()

    def _command(self, stage_id: str, command: StageCommand, *frames: Frame) -> None:
        line = self._lines.get(stage_id)
        if line is not None and not line.send([codec.encode(command), *frames]):
            log.warning("stage process %s does not take messages; its lease will lapse", stage_id)

    # Actions ----------------------------------------------------------------------------------------------------------

    def _perform(self, actions: list[Action]) -> None:
        log_actions(actions)
        at = time.time()
        for action in actions:
            stage = self._table.stages.get(action.stage_id) if isinstance(action, Start) else None
            self._history.note(action, at, stage.node if stage is not None else "")
            if isinstance(action, End):
                self._quota.ended(action.finished)
        self._writes.perform(actions)
        self._batches.follow(actions, time.monotonic())

    def _act(self, action: Action) -> None:
        try:
            self._send_action(action)
        except MalformedMessage as error:
            log.error("an action of the job table could not be sent: %s", error)  # noqa: TRY400 - it says it all

    def _send_action(self, action: Action) -> None:
        match action:
            case Start():
                self._command(action.stage_id, action.command, action.packed_job)
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
                receive(self._releases, copied=2)
            except zmq.Again:
                return


def _mismatch(report: StageReport) -> VersionMismatch:
    return VersionMismatch(
        f"the stage process speaks protocol {report.protocol}, the broker {PROTOCOL_VERSION}; install the same version "
        "of prorl-zmq on both",
        ours=PROTOCOL_VERSION,
        theirs=report.protocol,
    )


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
