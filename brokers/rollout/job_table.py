"""`JobTable`: the state machine of all jobs. Pure: events and the time go in, actions come out.

A job passes INIT, RUN and EVAL, and SCORE if it has a reward and a teacher; in each phase it is queued, then held by a
stage process under a lease.

    event                        queued              held by the sender, same attempt       held, else (stale)
    ---------------------------  ------------------  -------------------------------------  ----------------------------
    credit for the phase         → held, Start
    PhaseDone                    stale               → next phase queued, or ended          drop; Close its sandbox
    PhaseFailed, no retry        stale               → ended                                drop
    PhaseFailed, retry           stale               → lost; INIT avoids that node          drop
    lease expired                                    → lost
    its connection broke                             lease ends `quiet_s` later, or now if the process was quiet
    never reported, or not in a full report          lost, a lease after its start or its last report
    limit + grace passed                             Stop → ended, `timeout`
    stage process leaves                             → given back: lost, attempt not spent
    cancel                       → ended             Stop → ended
    no live process for it       → ended, `no_stage`, or lost if it waits for its sandbox's node

    lost in INIT or RUN → INIT queued under the next attempt (RUN in a fresh sandbox: nothing of the first was observed)
    lost in EVAL        → EVAL queued under the next attempt (from RUN's recorded result, in the same sandbox; INIT if
                          the holder reports that the sandbox is gone)
    lost, no attempt left, or RUN that an outside program led → ended, `infrastructure_error`
    lost in SCORE → SCORE queued under the next attempt; failed, overdue or given up → ended as EVAL said, not scored

    last process for it on its sandbox's node left   → given back; INIT queued under the next attempt
    the same, silent with its whole node             → lost; INIT queued under the next attempt
    the same, alone, and not back within `RETURN_S`  → lost; INIT queued under the next attempt
    EVAL, then its sandbox     → one loss, which spends one attempt

    in a restored table, until the lease is over:
    its holder's first report names it, or that its phase ended   → held, with a fresh lease
    its holder's first report does not                            → given back (it may never have been sent)

The attempt is the fence: each loss increments it, and a message with an older attempt changes nothing. The holder of
INIT or RUN closes the job's sandbox unless `PhaseDone` hands it on. The table closes it after EVAL, so that a repeated
EVAL finds it as RUN left it, and for every job that it ends or restarts without its holder (closing is idempotent).
`take_changes` returns changes for the journal, and `restore` reads them into a new table.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import Cancelled
from ...wire.messages.base import ATTEMPT_LIMIT
from ...wire.messages.jobs import Outcome, Phase, SandboxHandle
from .actions import Action, Close, End, Queued, Start, Stop, Unassign
from .held_jobs import HeldJobs
from .job_counts import JobCounts
from .job_queues import JobQueues
from .job_record import NEXT_PHASE, QUEUE_TIMING, RESTART_PHASE, JobRecord, JobStatus, lease_lost, no_stage, overdue
from .stage_pool import Requirement, SlotClaim, StagePool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ...errors import ErrorInfo
    from ...wire.messages.jobs import BlockHandle, Job
    from ...wire.messages.stages import MemberAlive, PhaseDone, PhaseFailed, StageReport
    from ..journal.records import JobState
    from .job_record import LossCause
    from .stage_pool import StageProcess

SKIP_LIMIT = ATTEMPT_LIMIT // 2
"""Only smaller attempts are skipped, so attempts stay within the message limit."""


class JobTable:
    def __init__(self, lease_s: float, ready_limit: int, quiet_s: float, counts: JobCounts | None = None) -> None:
        self.stages = StagePool(lease_s, quiet_s)
        self.redelivered = 0
        """Number of phases queued again after a loss."""
        self._lease_s = lease_s
        self._ready_limit = ready_limit
        self.records: dict[str, JobRecord] = {}
        self._held = HeldJobs(lease_s)
        self.queues = JobQueues(self.records)
        self.counts = counts or JobCounts({}, {})
        self.last_sequence = 0
        """Number of the last accepted job."""
        self._changed: dict[int, JobRecord] = {}
        self._stopping: dict[str, tuple[str, SlotClaim]] = {}
        """Jobs that ended while a stage process held them, until it stops: the process and the attempt."""
        self._actions: list[Action] = []

    def __len__(self) -> int:
        return len(self.records)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self.records

    def record(self, job_id: str) -> JobRecord:
        """Return a job's record, for reading."""
        return self.records[job_id]

    def kept(self, job_id: str) -> BlockHandle | None:
        run = self.records[job_id].run if job_id in self.records else None
        return run.kept if run is not None else None

    def unfinished(self, session: str) -> int:
        return self.counts.unfinished(session)

    def working_slots(self) -> int:
        """Return the number of jobs that INIT and RUN can work on at once."""
        return self.stages.role_slots(Phase.INIT) + self.stages.role_slots(Phase.RUN)

    def room(self, task: str) -> int:
        """Return how many more jobs of a task batches may submit now."""
        return self.counts.room(task, self.stages)

    def worked_s(self, job_id: str, now: float) -> float:
        record = self.records.get(job_id)
        return record.worked_s(now) if record is not None else 0.0

    def count(self, status: JobStatus) -> dict[Phase, int]:
        return {phase: self.counts.of(phase, status) for phase in Phase}

    # What outlives the table ------------------------------------------------------------------------------------------

    def take_changes(self, history: Callable[[str], bytes] = lambda _: b"") -> list[JobState]:
        """Return the current states of unfinished jobs that moved since the last call, each with its `history`."""
        changed, self._changed = self._changed, {}
        return [record.state(history(record.job_id)) for record in changed.values()]

    def restore(self, states: Iterable[JobState], last_sequence: int, now: float) -> None:
        """Restore an earlier table's jobs, oldest first, before any event; held jobs stay held for one lease."""
        self.last_sequence = last_sequence
        for state in states:
            record = JobRecord.restored(state)
            self.records[record.job_id] = record
            self.counts.accepted(record)
            if state.stage_id:
                self._enter(record, JobStatus.HELD, now)
                self._held.add(record, state.stage_id, now)
                self.stages.expect(state.stage_id, record.claim)
            else:
                self._enter(record, JobStatus.QUEUED, now)
                self.queues.append(record)
                self.queues.watch(record.requirement)
        self._changed.clear()

    # Events -----------------------------------------------------------------------------------------------------------

    def submit(
        self, session: str, job: Job, packed: bytes, now: float, *, in_batch: bool = False, after_attempt: int = 0
    ) -> list[Action]:
        self.last_sequence += 1
        # An ended job's id may be reused while its last attempt still stops; attempts continue from there.
        _, stopping = self._stopping.pop(job.job_id, ("", SlotClaim(job.job_id, after_attempt)))
        place = (self.last_sequence, session, job.job_id, job.task, job.stage_wait_s)
        record = JobRecord(*place, packed, job, attempt=stopping.attempt + 1, in_batch=in_batch)
        record.attempts_given_back = stopping.attempt
        self.records[job.job_id] = record
        self.counts.accepted(record)
        self._queue(record, now)
        return self._take_actions(now)

    def stage_reported(self, report: StageReport, now: float) -> list[Action]:
        """Process a full report: confirm the jobs it names, and handle the claims it omits."""
        expected = self.stages.is_expected(report.stage_id)
        before = self.stages.lease(report.from_member)
        heard_at = before.heard_at if before is not None else now
        stage = self.stages.heard(report, now)
        for job_id, attempt in (*report.running.items(), *report.ended.items()):
            self._confirm(stage, SlotClaim(job_id, attempt), now, at_work=report.running.get(job_id) == attempt)
        named = {SlotClaim(*item) for item in (*report.running.items(), *report.ended.items())}
        for claim in [claim for claim in stage.stopped_at if claim not in named]:
            del stage.stopped_at[claim]
        for claim in sorted(stage.claims - named):
            # An unreported slot stays taken while its phase may still be in transit.
            record = self.records.get(claim.job_id)
            if record is None or not record.is_held_by(stage.stage_id, claim.attempt):
                self._give_back(stage.stage_id, claim)
            elif expected:
                self._give_back(stage.stage_id, claim)
                record.attempts_given_back += 1
                self._restart(record, RESTART_PHASE[record.phase], lease_lost(record, "unreported"), now)
            elif record.confirmed:
                record.confirmed, record.lease_until = False, heard_at + self._lease_s
                self._held.watch(record)
        if report.draining:
            self._give_up_nodes(now)
        self._employ(stage, now)
        return self._take_actions(now)

    def member_alive(self, alive: MemberAlive, now: float) -> tuple[list[Action], bool]:
        """Process a heartbeat; also return whether the member is known and no earlier heartbeat was lost."""
        lease = self.stages.lease(alive.member)
        if lease is None:
            return [], False
        follows, was_quiet = alive.number == lease.number + 1, lease.quiet
        self.stages.lives(lease, alive.number, now, alive.facts)
        for stage_id, began in alive.began.items():
            if (stage := lease.stages.get(stage_id)) is not None:
                for claim in began.items():
                    self._confirm(stage, SlotClaim(*claim), now, at_work=True)
        for stage in lease.stages.values() if was_quiet else ():
            self._employ(stage, now)
        return self._take_actions(now), follows

    def _confirm(self, stage: StageProcess, claim: SlotClaim, now: float, *, at_work: bool) -> None:
        """Confirm an attempt that a stage process reports, or stop one that it should not have."""
        record = self.records.get(claim.job_id)
        if record is not None and record.is_held_by(stage.stage_id, claim.attempt):
            self._held.confirm(record)
            return
        if at_work and now - stage.stopped_at.get(claim, -math.inf) >= self._lease_s:
            stage.stopped_at[claim] = now
            self._actions.append(Stop(stage.stage_id, claim))
        if record is not None and record.status == JobStatus.QUEUED and (at_work or record.phase == stage.role):
            self._skip_attempts(record, claim.attempt)

    def restart_leases(self, now: float) -> None:
        """Restart all leases after a pause in which nothing was sent."""
        self.stages.restart_leases(now)
        self._held.restart(now)

    def connection_broke(self, member: str, now: float) -> None:
        """Shorten the leases of a member that refuses connections; it may still report over another one."""
        until = self.stages.disconnected(member, now)
        for stage_id, claim in self.stages.claims_of(member):
            record = self.records.get(claim.job_id)
            if record is not None and record.is_held_by(stage_id, claim.attempt):
                record.lease_until = min(record.lease_until, until)
                self._held.watch(record)

    def stage_left(self, stage_id: str, now: float) -> list[Action]:
        """Give a leaving stage process's jobs to others without spending their attempts."""
        for record in self._held_by(stage_id, self.stages.remove(stage_id)):
            record.attempts_given_back += 1
            self._restart(record, RESTART_PHASE[record.phase], lease_lost(record, "left"), now)
        self._give_up_nodes(now)
        return self._take_actions(now)

    def phase_done(self, done: PhaseDone, block: Any, now: float) -> list[Action]:
        """Process a phase's success; `block` is the trajectory, from RUN and SCORE."""
        stage = self._give_back(done.stage_id, SlotClaim(done.job_id, done.attempt))
        record = self._current(done)
        if record is None:
            job = self.records.get(done.job_id)
            if job is None or job.sandbox != done.sandbox:
                self._close(done.sandbox)
        else:
            record.note(done, block)
            if done.phase not in NEXT_PHASE:
                self._judged(record, Outcome.COMPLETED, None, done, now)
            else:
                record.sandbox, record.phase_data = done.sandbox, done.phase_data
                self._leave(record)
                record.phase = NEXT_PHASE[done.phase]
                self._queue(record, now)
        if stage is not None:
            self._employ(stage, now)
        return self._take_actions(now)

    def phase_failed(self, failed: PhaseFailed, block: Any, now: float) -> list[Action]:
        """Process a phase's failure; `block` is the partial trajectory, if any."""
        stage = self._give_back(failed.stage_id, SlotClaim(failed.job_id, failed.attempt))
        record = self._current(failed)
        if record is not None and failed.retry:
            record.avoids = stage.node if stage is not None else ""
            phase = Phase.INIT if failed.sandbox_gone else RESTART_PHASE[record.phase]
            record.attempts_given_back += failed.given_back
            self._restart(record, phase, failed.error, now)
        elif record is not None:
            record.note(failed, block)
            if failed.phase != Phase.EVAL:
                record.sandbox = None
            self._judged(record, failed.outcome, failed.error, failed, now)
        if stage is not None:
            self._employ(stage, now)
        return self._take_actions(now)

    def cancel(self, job_id: str, now: float) -> list[Action]:
        """End an unfinished job with outcome `cancelled`."""
        record = self.records[job_id]
        self._stop_holder(record)
        record.last = None
        self._end(record, Outcome.CANCELLED, Cancelled("the job was cancelled on request").info())
        return self._take_actions(now)

    def tick(self, now: float) -> list[Action]:
        """Handle expired leases, overdue phases, and queues that no live stage process serves."""
        removed = self.stages.expire(now)
        lost = {record.sequence: record for stage in removed for record in self._held_by(stage.stage_id, stage.claims)}
        died = {stage.stage_id for stage in removed if stage.lease.disconnected}
        self._expire_expected(now)
        for record in self._held.due(now):
            if not record.confirmed and record.lease_until <= now:
                lost[record.sequence] = record
            elif record.sequence not in lost:
                self._stop_holder(record)
                self._end(record, Outcome.TIMEOUT, overdue(record))
        for _, record in sorted(lost.items()):
            self._stop_holder(record)
            cause: LossCause = "unreported" if record.stage_id in self.stages else "silent"
            error_info = lease_lost(record, "died" if record.stage_id in died else cause)
            self._restart(record, RESTART_PHASE[record.phase], error_info, now)
        self._give_up_nodes(now)
        self.queues.look_at_sessions_again()
        for record, waited_s in self.queues.overdue(self.stages.can_serve, now):
            error = no_stage(record.requirement, waited_s)
            if record.requirement.node is None:
                self._end(record, Outcome.INFRASTRUCTURE_ERROR, error)
            else:
                self._restart(record, Phase.INIT, error, now)
        return self._take_actions(now)

    def _expire_expected(self, now: float) -> None:
        """Stop expecting processes whose claims have all expired."""
        for stage_id, claims in tuple(self.stages.expected().items()):
            if not any(record.lease_until > now for record in self._held_by(stage_id, claims)):
                self.stages.expect_no_more(stage_id)

    def _held_by(self, stage_id: str, claims: set[SlotClaim]) -> list[JobRecord]:
        """Return the jobs that a removed stage process held."""
        for claim in claims:
            self._let_go(stage_id, claim)
        records = [(self.records.get(claim.job_id), claim.attempt) for claim in sorted(claims)]
        return [record for record, attempt in records if record is not None and record.is_held_by(stage_id, attempt)]

    def _give_up_nodes(self, now: float) -> None:
        """Restart jobs whose sandbox's node lost its last process for their phase, unless the process may return."""
        for requirement, in_order in self.stages.take_unserved():
            self.queues.watch(requirement)
            is_back = requirement.node is None or self.stages.can_serve(requirement)
            # A process that fell silent alone may be restarted. SCORE waits for `overdue`: its node may come back.
            is_lost = self.stages.on_node(requirement.node or "") is None and requirement.role != Phase.SCORE
            if is_back or not (in_order or is_lost):
                continue
            for record in self.queues.waiting(requirement):
                record.attempts_given_back += in_order
                self._restart(record, Phase.INIT, no_stage(requirement, 0.0), now)

    # Queues and credit ------------------------------------------------------------------------------------------------

    def _queue(self, record: JobRecord, now: float, lost_to: ErrorInfo | None = None) -> None:
        self._actions.append(Queued(record.job_id, record.attempt, record.phase, lost_to))
        is_first = record.phase != Phase.INIT and not self.queues.is_waited_for(record.requirement)
        if is_first and (stage_id := self.stages.take(record.requirement, record.claim, record.avoids)) is not None:
            self._hold(record, stage_id, now, 0.0)
            return
        self._enter(record, JobStatus.QUEUED, now)
        self.queues.push(record)
        if not self.stages.can_serve(record.requirement):
            self.queues.watch(record.requirement)
            self.stages.miss(record.requirement)
            self._give_up_nodes(now)
        if record.phase != Phase.INIT and not is_first:
            self._start_next([record.requirement], now)

    def _employ(self, stage: StageProcess, now: float) -> None:
        if stage.role != Phase.INIT:
            waited_for = partial(self.queues.requirements, stage.role, stage.requirements)
            while stage.credit > 0 and self._start_next(waited_for(), now):
                pass

    def _may_init(self) -> bool:
        ready = self.counts.of(Phase.INIT, JobStatus.HELD) + self.counts.of(Phase.RUN, JobStatus.QUEUED)
        return ready < self._ready_limit

    def _start_next(self, requirements: Iterable[Requirement], now: float) -> bool:
        free = filter(self.stages.has_free, requirements)
        heads = [record for requirement in free if (record := self.queues.head(requirement)) is not None]
        if len(heads) > 1:
            heads.sort(key=lambda record: (record.flow.turn(record.phase), record.sequence))
        for record in heads:
            stage_id = self.stages.take(record.requirement, record.claim, record.avoids)
            if stage_id is not None:
                self.queues.pop(record)
                self._start(record, stage_id, now)
                return True
        return False

    # Transitions ------------------------------------------------------------------------------------------------------

    def _enter(self, record: JobRecord, status: JobStatus, now: float) -> None:
        record.status = status
        record.since = now
        self.counts.moved(record, 1)
        if record.sandbox is not None:
            self._count_on_node(record, record.sandbox, 1)
        self._changed[record.sequence] = record

    def _leave(self, record: JobRecord) -> None:
        self._held.discard(record)
        self.counts.moved(record, -1)
        if record.sandbox is not None:
            self._count_on_node(record, record.sandbox, -1)
        record.status = JobStatus.MOVING

    def _count_on_node(self, record: JobRecord, sandbox: SandboxHandle, change: int) -> None:
        if record.status == JobStatus.QUEUED:
            self.stages.wait_on(sandbox.node, record.task, change)

    def _start(self, record: JobRecord, stage_id: str, now: float) -> None:
        self._leave(record)
        self._hold(record, stage_id, now, now - record.since)

    def _hold(self, record: JobRecord, stage_id: str, now: float, waited_s: float) -> None:
        timing = QUEUE_TIMING[record.phase]
        record.timings[timing] = record.timings.get(timing, 0.0) + waited_s
        self._enter(record, JobStatus.HELD, now)
        self._held.add(record, stage_id, now)
        stage = self.stages.get(stage_id)
        self._actions.append(Start(stage_id, record.start_command(), record.packed, stage.node if stage else ""))

    def _restart(self, record: JobRecord, phase: Phase, error: ErrorInfo, now: float) -> None:
        """Restart a lost job with `phase` under the next attempt, or end it with `error`."""
        if phase == Phase.INIT and record.run is not None and record.run.attempt < record.attempt:
            record.attempts_given_back += 1  # EVAL's holder and the sandbox were lost together: one attempt
        spent = record.attempt - record.attempts_given_back
        program_began = record.phase == Phase.RUN and record.confirmed and record.job.outside is not None
        is_over = phase == Phase.INIT and record.phase == Phase.SCORE  # its trajectory's node cannot score it
        if is_over or program_began or spent >= record.job.max_attempts or record.attempt >= ATTEMPT_LIMIT:
            self._end(record, Outcome.INFRASTRUCTURE_ERROR, error)
            return
        self._unassign(record)
        self._leave(record)
        if phase == Phase.INIT:
            self._close(record.sandbox)
            record.forget_phases()
        self.redelivered += 1
        record.attempt += 1
        record.phase = phase
        self._queue(record, now, error)

    def _judged(
        self, record: JobRecord, outcome: Outcome, error: ErrorInfo | None, last: PhaseDone | PhaseFailed, now: float
    ) -> None:
        """End a job, once its teacher has scored what has a reward."""
        if not record.is_for_teacher(last):
            self._end(record, outcome, error, last)
            return
        self._unassign(record)
        self._leave(record)
        self._close(record.sandbox)
        record.sandbox, record.phase_data, record.last, record.phase = None, {}, last, Phase.SCORE
        self._queue(record, now)

    def _end(
        self,
        record: JobRecord,
        outcome: Outcome,
        error: ErrorInfo | None,
        last: PhaseDone | PhaseFailed | None = None,
    ) -> None:
        self._unassign(record)
        if record.status == JobStatus.HELD and self.stages.holds(record.stage_id, record.claim):
            self._stopping[record.job_id] = (record.stage_id, record.claim)
        self._leave(record)
        self._close(record.sandbox)
        del self.records[record.job_id]
        self._changed.pop(record.sequence, None)
        self.counts.ended(record)
        self._actions.append(End(record.finished(outcome, error, last)))

    def _skip_attempts(self, record: JobRecord, attempt: int) -> None:
        """Skip attempts of an earlier job of this id that a silent process still works on."""
        if not record.attempt <= attempt < SKIP_LIMIT:  # no job has so many: the report is wrong
            return
        record.attempts_given_back += attempt + 1 - record.attempt
        record.attempt = attempt + 1
        self._changed[record.sequence] = record
        self.queues.push(record)

    def _give_back(self, stage_id: str, claim: SlotClaim) -> StageProcess | None:
        self._let_go(stage_id, claim)
        return self.stages.give_back(stage_id, claim)

    def _let_go(self, stage_id: str, claim: SlotClaim) -> None:
        if self._stopping.get(claim.job_id) == (stage_id, claim):
            del self._stopping[claim.job_id]

    def _current(self, event: PhaseDone | PhaseFailed) -> JobRecord | None:
        """Return the job of an event; None if the event is stale."""
        record = self.records.get(event.job_id)
        return record if record is not None and record.is_current(event) else None

    def _stop_holder(self, record: JobRecord) -> None:
        if record.status == JobStatus.HELD and record.stage_id in self.stages:
            self._actions.append(Stop(record.stage_id, record.claim))

    def _unassign(self, record: JobRecord) -> None:
        if record.status == JobStatus.HELD and record.phase in (Phase.RUN, Phase.SCORE):
            self._actions.append(Unassign(record.claim))

    def _close(self, sandbox: SandboxHandle | None) -> None:
        if sandbox is not None:
            self._actions.append(Close(sandbox))

    def _take_actions(self, now: float) -> list[Action]:
        """Start INIT phases that the event made possible, and return all actions."""
        while self._may_init() and self._start_next(self.queues.requirements(Phase.INIT), now):
            pass
        actions, self._actions = self._actions, []
        return actions
