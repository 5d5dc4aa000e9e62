"""The rollout broker's process: one loop that moves frames between its sockets and pure objects.

    front door    ROUTER  ⇄ trainers (REQ and DEALER)
    stage events  PULL    ← stage processes: reports, phases done and failed
    one PUSH per stage process (`StageConnections`) → phases to start and stop
    DEALER        ⇄ backend broker: releases, and the list of models (`BackendLink`)

A round of the loop, from socket to journal to action:

1. Receive a request or a stage event. `FrontDoor`, `JobTable` and `BatchRunner` change their state and append actions
   to `Jobs.queue`.
2. Perform the queue until it is empty (`perform_queue`). Messages to send are queued in `WriteAhead`.
3. After all messages of the round, handle deadlines and start jobs of batches; perform the queue.
4. Write all changes of the round to the journal in one transaction, then send the queued messages
   (`WriteAhead.settle`).
5. Answer the held polls (`FrontDoor.answer_held`).

When a stage process dies, its lease expires and the table gives its jobs to others. When this process dies, the next
one continues from the journal: stage processes report their work within a heartbeat, undisturbed, and resend the ends
of phases that were not confirmed (`EventsNoted`).
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

import zmq

from ...data.trajectory import block_bytes
from ...errors import JournalFailed, MalformedMessage, ProrlError
from ...security.keyring import BROKER, Keyring
from ...security.rights import Listener
from ...security.zap_authenticator import ZapAuthenticator
from ...system.logs import of_job
from ...wire import codec
from ...wire.messages.base import PROTOCOL_VERSION, UNSAID_PROTOCOL
from ...wire.messages.blocks import is_block
from ...wire.messages.jobs import Phase
from ...wire.messages.stages import (
    BlockSent,
    CloseSandbox,
    ForgetBlocks,
    MemberAlive,
    PhaseDone,
    PhaseEnd,
    PhaseFailed,
    StageEvent,
    StageLeaving,
    StageReport,
    StageWelcome,
    StopPhase,
    TurnsShown,
)
from ...wire.sockets import CONTROL_FRAME_BYTES, NOBLOCK, NODE_PING_S, open_socket, send
from ..loop import Loop
from .action_queue import perform_queue
from .actions import Action, Close, Start, Stop, Unassign
from .backend_link import BackendLink
from .batch_runner import BatchRunner
from .broker_gauges import set_gauges
from .event_blocks import checked_block, stored_end, token_ids
from .front_door import FrontDoor
from .job_counts import JobCounts
from .job_table import JobTable
from .job_tracer import JobTracer
from .jobs import Jobs
from .kept_blocks import KeptBlocks
from .quota import Quota
from .result_store import ResultStore
from .sized_cache import SizedCache
from .stage_connections import StageConnections
from .task_catalog import TaskCatalog
from .transition_log import TransitionLog
from .write_ahead import WriteAhead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...config import RolloutBrokerSettings, Topology
    from ...wire.messages.jobs import BlockHandle
    from ...wire.sockets import Frame
    from ..journal.journal import Journal
    from ..journal.records import Finished, JobState

BATCH = 256
"""Most messages that are read from one socket before the next socket is served."""

QUIET_HEARTBEATS = 2.5
"""Heartbeats after which a silent stage process gets no new jobs; one whose connection broke must report by then."""

log = logging.getLogger("prorl.rollout_broker")


class RolloutBroker:
    """The rollout broker, bound, with its journal's content restored, and ready to `run`.

    Raises:
        EndpointInUse, InvalidEndpoint: the broker could not bind.
        ConfigError: the key folder is not private, or lacks the service's key.
    """

    def __init__(self, topology: Topology, journal: Journal) -> None:
        self._run_dir = topology.run_dir
        self._settings = topology.rollout_broker
        keyring = Keyring.load(topology.security.keys, BROKER)
        self._loop = Loop()
        self._authenticator = ZapAuthenticator(self._loop.context, keyring, insecure=topology.service.insecure)
        door_limit = max(CONTROL_FRAME_BYTES, self._settings.job_limit_bytes)
        self._door = open_socket(self._loop.context, zmq.ROUTER, door_limit)
        # Sending to a client that is gone raises, so its results go to the next client at once.
        self._door.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._events = open_socket(self._loop.context, zmq.PULL, ping_s=NODE_PING_S)
        try:
            front_door, stage_events = self._settings.front_door, self._settings.stage_events
            self.front_door = self._authenticator.bind(self._door, topology.endpoint(front_door), Listener.FRONT_DOOR)
            self.stage_events = self._authenticator.bind(
                self._events, topology.endpoint(stage_events), Listener.STAGE_EVENTS
            )
            backend_broker = topology.endpoint(topology.backend_broker.endpoint)
            self._catalog = TaskCatalog((one.name for one in topology.backends), (one.role for one in topology.stage))
            self._backends = BackendLink(self._loop, backend_broker, keyring, self._catalog)
            welcome = StageWelcome(
                backend_broker=backend_broker, heartbeat_s=self._settings.heartbeat_s, keep=self._settings.keep
            )
            self._stages = StageConnections(self._loop.context, keyring, welcome)
            self._jobs = _make_jobs(self._settings, journal, self._act)
            self._batches = BatchRunner(self._jobs, self._catalog, self._settings.job_limit_bytes)
            self._requests = FrontDoor(
                self._settings,
                backend_broker,
                self._jobs,
                self._catalog,
                self._batches,
                self._reply,
                self._authenticator.look_again,
                self._stages.send,
                started_at=self._loop.clock.now(),
            )
            self._next_tick = self._loop.clock.now()
            self._stood_still = False
            """Whether the journal could not be written at the last tick."""
            self._read_all_at = self._next_tick
            self._recover(journal)
        except ProrlError:
            self._loop.close()
            raise

    def run(self) -> None:
        """Serve until `stop`, SIGTERM or SIGINT; then close all sockets."""
        self._loop.report_metrics(self._run_dir, "rollout_broker", lambda: set_gauges(self._jobs, self._batches))
        self._loop.register(self._events, self._drain_events)
        self._loop.register(self._door, self._drain_requests)
        self._backends.register()
        self._authenticator.register(self._loop.register)
        try:
            self._loop.run(self._housekeep, self._say_ready)
            self._jobs.writes.then(self._stages.say_noted)
            self._jobs.writes.settle(self._loop.clock.now(), everything=True)
        finally:
            self._stages.close()
            self._loop.close()
            if self._jobs.transitions.tracer is not None:
                self._jobs.transitions.tracer.close()

    def stop(self) -> None:
        """Make `run` return; may be called from another thread or a signal handler."""
        self._loop.stop()

    def _recover(self, journal: Journal) -> None:
        recovered = journal.recover()
        jobs, at, now = self._jobs, time.time(), self._loop.clock.now()
        for finished in recovered.uncollected:
            jobs.results.put(finished)
            jobs.quota.recovered(finished)
            jobs.transitions.restore_ended(finished.result.job_id, finished.history)
            jobs.blocks.restore(finished.result.job_id, finished.result.kept, now)
        self._requests.remember(recovered.submissions)
        for state in recovered.unfinished:
            _restore(jobs, state, at)
            if state.run is not None:
                jobs.blocks.restore(state.job_id, state.run.kept, now)
        jobs.table.restore(recovered.unfinished, recovered.last_sequence, now)
        for state in recovered.unfinished:
            if state.phase == Phase.SCORE:
                jobs.count_in_score(state.job_id)
        notes = self._requests.sessions.restore(recovered.notes, now)
        self._batches.recover(notes, recovered.unfinished, recovered.uncollected, now)
        self._perform(now)
        if recovered.unfinished or recovered.uncollected:
            counts = (len(recovered.unfinished), len(recovered.uncollected))
            log.info("took up %d jobs and %d uncollected results from the journal", *counts)

    def _say_ready(self) -> None:
        log.info("ready: front door %s, stage events %s", self.front_door, self.stage_events)

    def _perform(self, now: float) -> None:
        while self._jobs.queue:
            try:
                perform_queue(self._jobs, self._batches, now, time.time())
            except Exception:
                log.exception("an action failed")  # a bug must not prevent the other actions

    # Requests ---------------------------------------------------------------------------------------------------------

    def _drain_requests(self) -> None:
        for _ in range(BATCH):
            try:
                sender, frames = self._authenticator.receive(self._door)
            except zmq.Again:
                break
            except MalformedMessage as error:
                log.warning("dropped a request: %s", error.message)
                continue
            now = self._loop.clock.now()
            self._requests.handle(frames, now, sender)  # type: ignore[arg-type]
            self._perform(now)
        if self._catalog.wants_models:
            self._backends.ask_models()

    def _reply(self, frames: Sequence[Frame]) -> bool:
        """Send a reply; return False if the client is gone or does not read."""
        try:
            send(self._door, frames, NOBLOCK)
        except zmq.ZMQError as error:
            log.info("a client did not take its reply: %s", error.strerror)
            return False
        return True

    # Stage events -----------------------------------------------------------------------------------------------------

    def _drain_events(self) -> None:
        for _ in range(BATCH):
            try:
                sender, (header, *rest) = self._authenticator.receive(self._events, copied=1)
            except zmq.Again:
                break
            except MalformedMessage as error:
                log.warning("dropped a stage event: %s", error.message)
                continue
            now = self._loop.clock.now()
            try:
                event = codec.decode(header, StageEvent)  # type: ignore[arg-type]
                if sender.revoked:
                    who = event.member if isinstance(event, MemberAlive) else self._stages.member_of(event.stage_id)
                    self._stages.turn_away(who, sender)
                else:
                    block = checked_block(event, rest)
                    if isinstance(event, PhaseEnd) and event.records and event.kept is None:
                        event, block = stored_end(self._jobs, event, block)
                    self._handle_event(event, block, now, sender.user_id)
                    self._perform(now)
                    if isinstance(event, PhaseEnd) and event.kept is not None:
                        self._note_kept(event.job_id, event.kept)
            except MalformedMessage as error:
                log.warning("dropped a malformed stage event: %s", error)
                self._note_malformed(header, now, sender.user_id)
            except JournalFailed as error:
                log.warning("scores wait until they are sent again: %s", error.message)
            except Exception:
                log.exception("a stage event failed")  # a bug must not affect all jobs

    def _handle_event(self, event: StageEvent, block: Any, now: float, key: str) -> None:
        queue, table = self._jobs.queue, self._jobs.table
        match event:
            case PhaseDone():
                self._note_backend(event.job_id, event.attempt, event.backend)
                queue.extend(table.phase_done(event, block, now))
                self._note(event.stage_id, event.number, now)
            case PhaseFailed():
                self._note_backend(event.job_id, event.attempt, event.backend)
                queue.extend(table.phase_failed(event, block, now))
                self._note(event.stage_id, event.number, now)
            case StageReport():
                if self._stages.reported(event, key, now, table.stages):
                    self._handle_report(event, now)
            case MemberAlive():
                for job_id, (attempt, backend) in event.backends.items():
                    self._note_backend(job_id, attempt, backend)
                self._jobs.transitions.opened(event.addresses)
                actions, follows = table.member_alive(event, now)
                queue.extend(actions)
                if not follows:
                    self._stages.welcome(event.member)
                if event.asks_demand:
                    self._stages.send(event.member, table.counts.demand(table.stages.members))
            case StageLeaving():
                queue.extend(table.stage_left(event.stage_id, now))
                self._stages.left(event.stage_id)
            case BlockSent():
                self._take_block(event, block)
            case TurnsShown():
                self._requests.turns.shown(event, block)

    def _handle_report(self, report: StageReport, now: float) -> None:
        if report.stage_id not in self._jobs.table.stages:
            where = (report.role, report.stage_id, report.node, report.slots)
            log.info("%s process %s joined: node %s, %d slots", *where)
        self._catalog.add(report.tasks, report.role)
        self._jobs.blocks.reported(report)
        for job_id, backend in report.backends.items():
            self._note_backend(job_id, report.running.get(job_id, 0), backend)
        self._jobs.transitions.opened({one: (report.running.get(one, 0), at) for one, at in report.addresses.items()})
        self._jobs.queue.extend(self._jobs.table.stage_reported(report, now))

    def _note_kept(self, job_id: str, handle: BlockHandle) -> None:
        """Record the handle of an ended phase; release its block if that end was stale."""
        ended = self._jobs.results.get(job_id)
        if handle in (self._jobs.table.kept(job_id), ended.result.kept if ended is not None else None):
            self._jobs.blocks.add(job_id, handle)
        elif self._jobs.blocks.job_of(handle.node, handle.block_id) is None:
            self._jobs.blocks.release_block(handle)

    def _take_block(self, event: BlockSent, block: Frame | None) -> None:
        """Store a block that its node sent because a client cannot fetch it or the node shuts down."""
        stage = self._jobs.table.stages.get(event.stage_id)
        job_id = self._jobs.blocks.job_of(stage.node, event.block_id) if stage is not None else None
        finished = self._jobs.results.get(job_id) if job_id is not None else None
        if job_id is None or finished is None:
            return  # unwanted; an unfinished job is lost with its sandbox if the node leaves
        result = finished.result
        size_bytes, handle = block_bytes(result.tokens, result.turns, result.records), result.kept
        if block is None or handle is None or len(block) != size_bytes or not is_block(block, handle):
            self._jobs.blocks.lose([job_id])
            return
        self._jobs.take_block(finished, block)
        self._jobs.writes.then(lambda: self._stages.send(event.stage_id, ForgetBlocks((event.block_id,))))

    def _run_lost_again(self, now: float) -> None:
        for finished, handle in self._jobs.blocks.take_lost(self._jobs.results.get):
            job_id = finished.result.job_id
            where = f"the trajectory was lost with node {handle.node} before it was fetched"
            log.warning("%s; the job runs again", where, extra=of_job(job_id, finished.result.attempt))
            try:
                if finished.in_batch:
                    self._batches.block_lost(finished, now)
                else:
                    self._jobs.run_again(finished, now)
                self._jobs.blocks.lost += 1
            except JournalFailed:
                self._jobs.blocks.lose([job_id])  # retry at the next tick
            except MalformedMessage:
                self._jobs.give_up(finished)

    def _note_backend(self, job_id: str, attempt: int, backend: str) -> None:
        if backend:
            self._jobs.transitions.assigned(job_id, attempt, backend, time.time())

    def _note(self, stage_id: str, number: int, now: float) -> None:
        """Confirm an event to its stage process after the journal has its changes."""
        if number:
            self._stages.note(stage_id, number, now)

    def _note_malformed(self, header: bytes | zmq.Frame, now: float, key: str) -> None:
        """Refuse a process of another protocol version; otherwise confirm the event, which a resend cannot repair."""
        try:
            content = codec.unpack(header if isinstance(header, bytes) else header.bytes)
        except MalformedMessage:
            return
        if not isinstance(content, dict):
            return
        is_report = content.get("type") == StageReport.__struct_config__.tag
        if is_report and content.get("protocol", UNSAID_PROTOCOL) != PROTOCOL_VERSION:
            self._stages.refuse_version(content, key, now)
            return
        stage_id, number = content.get("stage_id"), content.get("number")
        if isinstance(stage_id, str) and isinstance(number, int) and stage_id in self._stages:
            self._note(stage_id, number, now)

    # Time -------------------------------------------------------------------------------------------------------------

    def _housekeep(self) -> float:
        """Handle deadlines, write and send; return the seconds until the next deadline."""
        now = self._loop.clock.now()
        if now >= self._next_tick and self._has_read_all(now):
            self._next_tick = now + min(self._settings.heartbeat_s, self._settings.lease_s / 4)
            for member in self._stages.refusing(self._jobs.table.stages.quiet()):
                self._jobs.table.connection_broke(member, now)
            self._watch_time(now)
            self._catalog.tick()
        self._batches.launch(now)
        self._perform(now)
        if self._jobs.transitions.tracer is not None:
            self._jobs.transitions.tracer.flush()
        writes = self._jobs.writes
        if self._stages.say_noted_at is not None and self._stages.say_noted_at <= now:
            self._stages.say_noted_at = None
            writes.then(self._stages.say_noted)
        writes.settle(now)
        self._requests.answer_held(writes.take_news(), now)
        tick = self._next_tick if self._loop.has_read_all else math.inf  # unread messages end the wait at once
        deadlines = (tick, self._requests.next_deadline(), writes.retry_at, self._stages.say_noted_at)
        return max(0.0, min(deadline for deadline in deadlines if deadline is not None) - now)

    def _has_read_all(self, now: float) -> bool:
        if self._loop.has_read_all:
            self._read_all_at = now
            return True
        if now - self._read_all_at > self._settings.lease_s:
            log.warning(
                "messages have waited here for %.0f s: this broker has more to do than it can", self._settings.lease_s
            )
            self._read_all_at = now
        return False

    def _watch_time(self, now: float) -> None:
        """Handle expired deadlines; deadlines pause while the journal cannot be written, since nothing is sent then."""
        table = self._jobs.table
        if self._jobs.writes.is_stuck:
            self._stood_still = True
            return
        if self._stood_still:
            self._stood_still = False
            table.restart_leases(now)
            self._requests.sessions.restart_leases(now)
        self._jobs.queue.extend(table.tick(now))
        self._batches.tick(now)
        self._requests.sessions.tick(now)
        self._jobs.blocks.gone(table.stages.take_gone(), now)
        self._run_lost_again(now)
        for stage_id, command in self._jobs.blocks.tick(now):
            self._stages.send(stage_id, command)
        self._perform(now)
        self._stages.drop_silent(table.stages, now - self._settings.lease_s)

    # What leaves, once it is in the journal ---------------------------------------------------------------------------

    def _act(self, action: Action) -> None:
        try:
            if isinstance(action, Start):
                tracer = self._jobs.transitions.tracer
                command = action.command if tracer is None else tracer.below(action.command)
                self._stages.send(action.stage_id, command, action.packed_job, *token_ids(self._jobs, command))
            else:
                self._send_action(action)
        except JournalFailed as error:  # the phase stays unconfirmed, so it starts again after a lease
            log.warning("a trajectory is not scored yet: %s", error.message)
        except MalformedMessage as error:
            log.error("an action of the job table could not be sent: %s", error)  # noqa: TRY400 - it says it all

    def _send_action(self, action: Action) -> None:
        match action:
            case Stop():
                self._stages.send(action.stage_id, StopPhase(*action.claim))
            case Close():
                stage_id = self._jobs.table.stages.on_node(action.sandbox.node)
                if stage_id is not None:
                    self._stages.send(stage_id, CloseSandbox(action.sandbox))
            case Unassign():
                self._backends.release(action.claim)


def _make_jobs(settings: RolloutBrokerSettings, journal: Journal, act: Any) -> Jobs:
    quiet_s = min(QUIET_HEARTBEATS * settings.heartbeat_s, settings.lease_s)
    counts = JobCounts(settings.session_weights, settings.session_priorities)
    table = JobTable(settings.lease_s, settings.ready_limit, quiet_s, counts)
    results, transitions = ResultStore(), TransitionLog(table.stages.losses, JobTracer.start())
    quota = Quota(settings.max_jobs, settings.max_held_bytes, settings.max_session_share)
    blocks = KeptBlocks(settings.lease_s)
    recent: SizedCache[Finished] = SizedCache(settings.keep_collected_bytes)
    writes = WriteAhead(journal, table, results, transitions, act)
    return Jobs(table, results, transitions, quota, writes, blocks, recent)


def _restore(jobs: Jobs, state: JobState, at: float) -> None:
    jobs.quota.submitted(state.holder, state.job_id, len(state.packed))
    jobs.transitions.restore(state.job_id, state.history, at)
