"""The job table against a plain model of it, under every order of events that Hypothesis can think of.

The model keeps one record per job and one per stage process, and predicts what each event does to them. It leaves open
only which of the waiting jobs starts where, and checks there that the table's choice was allowed: the oldest job of the
session that uses the fewest slots, the least loaded process with credit, the right task, node and role, and no job
waiting while someone could take it.

A crash is an event like any other: a new table takes up what the journal has. What the killed broker had read and not
written down is told again by the stage processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.machines import few_and_many

from prorl_zmq.brokers.rollout.actions import Close, End, Start, Stop, Unassign
from prorl_zmq.brokers.rollout.held_jobs import STOP_GRACE_S
from prorl_zmq.brokers.rollout.job_record import JobStatus
from prorl_zmq.brokers.rollout.job_table import JobTable
from prorl_zmq.brokers.rollout.stage_pool import Requirement
from prorl_zmq.errors import ErrorInfo
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.jobs import Job, Outcome, Phase, PhaseLimits, SandboxHandle
from prorl_zmq.wire.messages.stages import MemberAlive, PhaseDone, PhaseFailed, StageReport, StartPhase, Task

if TYPE_CHECKING:
    from hypothesis import settings

    from prorl_zmq.brokers.journal.records import JobState

LEASE_S = 10.0
QUIET_S = 2.5
LIMIT_S = 20.0
STAGE_WAIT_S = 15.0
TASKS = ("math", "shell")
NODES = ("left", "right")
NEXT = {Phase.INIT: Phase.RUN, Phase.RUN: Phase.EVAL}

SlotClaim = tuple[str, int]


@dataclass
class ModelJob:
    job_id: str
    session: str
    task: str
    max_attempts: int
    sequence: int
    since: float
    phase: Phase = Phase.INIT
    holder: str | None = None
    attempt: int = 1
    given_back: int = 0
    confirmed: bool = False
    """Its holder has reported it, in whose lease it is."""
    lease_until: float = 0.0
    sandbox: SandboxHandle | None = None
    run_attempt: int = 0
    """Under which RUN ended; 0: it has not."""
    avoids: str = ""
    """The node where it failed last."""

    @property
    def need(self) -> tuple[Phase, str, str | None]:
        return self.phase, self.task, self.sandbox.node if self.sandbox else None


@dataclass
class Worker:
    """A stage process: what it does (`running`), and what the table should believe of it (`known`, `holds`)."""

    stage_id: str
    role: Phase
    node: str
    slots: int
    tasks: tuple[str, ...]
    number: int = 0
    """Of its last report."""
    heard_at: float = 0.0
    known: bool = False
    quiet: bool = False
    draining: bool = False
    gone: bool = False
    expected: bool = False
    """It held jobs at the last crash, and has not reported since."""
    holds: set[SlotClaim] = field(default_factory=set)
    running: dict[SlotClaim, StartPhase] = field(default_factory=dict)
    unacknowledged: dict[SlotClaim, PhaseDone | PhaseFailed] = field(default_factory=dict)
    """Phases that ended, of which no broker knows."""

    def serves(self, need: tuple[Phase, str, str | None]) -> bool:
        role, task, node = need
        return (
            self.known and not self.draining and self.role == role and task in self.tasks and node in (None, self.node)
        )


class JobTableMachine(RuleBasedStateMachine):
    events = Bundle("events")
    """Reports of ended phases that were delivered; delivered again they are stale."""

    @initialize(ready_limit=st.integers(1, 4))
    def start(self, ready_limit: int) -> None:
        self.ready_limit = ready_limit
        self.table = self.new_table()
        self.journal: dict[int, JobState] = {}
        """Jobs that ended in the tables of killed brokers."""
        self.leaving = False
        """A process leaves in good order: who waits on its node has spent nothing."""
        self.missed: set[tuple[Phase, str, str | None]] = set()
        """What a job began to wait for now, on a node that ends in good order: who waits so spends nothing."""
        self.now = 100.0
        self.full: set[str] = set()
        """Sessions that may start no jobs now."""
        self.unlooked: set[str] = set()
        """Those that may again, which the table finds out with the next tick."""
        self.is_cut_off = False
        """A connection broke since the last tick, at which jobs that avoid a node return to it if no other serves."""
        self.jobs: dict[str, ModelJob] = {}
        self.workers: dict[str, Worker] = {}
        self.open_sandboxes: set[str] = set()
        self.to_end: dict[str, Outcome] = {}
        self.submitted = 0
        self.ended = 0
        self.used_ids: list[str] = []
        for role in Phase:
            self.join(role, "left", 2, TASKS)

    # Events -----------------------------------------------------------------------------------------------------------

    @rule(
        role=st.sampled_from(Phase),
        node=st.sampled_from(NODES),
        slots=st.integers(1, 3),
        tasks=st.sampled_from([("math",), ("shell",), TASKS]),
    )
    def join(self, role: Phase, node: str, slots: int, tasks: tuple[str, ...]) -> None:
        worker = Worker(f"{role}-{len(self.workers)}", role, node, slots, tasks)
        self.workers[worker.stage_id] = worker
        self.deliver_report(worker, {})

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        """A heartbeat; some starts may still be on the way to the process, or were lost."""
        worker = self.draw_worker(data)
        running = sorted(worker.running)
        unseen = data.draw(st.sets(st.sampled_from(running)) if running else st.just(set()), label="not arrived")
        self.deliver_report(worker, {job_id: attempt for job_id, attempt in running if (job_id, attempt) not in unseen})

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), lost=st.booleans())
    def stay_alive(self, data: st.DataObject, lost: bool) -> None:
        """A heartbeat that says what has begun, and perhaps follows one that was lost."""
        worker = self.draw_worker(data)
        running = sorted(worker.running)
        began = data.draw(st.sets(st.sampled_from(running)) if running else st.just(set()), label="began")
        worker.number += 1 + lost
        alive = MemberAlive(member=worker.stage_id, number=worker.number, began={worker.stage_id: dict(sorted(began))})
        if not worker.known:
            assert self.table.member_alive(alive, self.now) == ([], False)
            return
        worker.quiet, worker.heard_at = False, self.now
        for job in self.jobs.values():
            if job.holder == worker.stage_id:
                job.confirmed |= (job.job_id, job.attempt) in began
                if job.confirmed:
                    job.lease_until = self.now + LEASE_S
        actions, follows = self.table.member_alive(alive, self.now)
        assert follows != lost
        self.check_actions(actions)

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        """A process takes nothing more, and ends what it has."""
        worker = self.draw_worker(data)
        worker.draining = True
        self.deliver_report(worker, dict(worker.running.keys()))

    @precondition(lambda self: self.at_work())
    @rule(data=st.data())
    def lose_start(self, data: st.DataObject) -> None:
        """A command never reaches the process, as when its connection breaks."""
        worker, hold = self.draw_work(data)
        del worker.running[hold]

    @rule(
        task=st.sampled_from(TASKS), session=st.sampled_from("ab"), max_attempts=st.integers(1, 3), again=st.booleans()
    )
    def submit(self, task: str, session: str, max_attempts: int, again: bool) -> None:
        """A new job; perhaps under the id of one that ended and of which no stage process holds anything."""
        free = [job_id for job_id in self.used_ids if job_id not in self.jobs and not self.is_anywhere(job_id)]
        job_id = free[0] if again and free else f"job-{len(self.used_ids)}"
        if job_id not in self.used_ids:
            self.used_ids.append(job_id)
        self.submitted += 1
        self.jobs[job_id] = ModelJob(job_id, session, task, max_attempts, self.submitted, self.now)
        job = Job(
            task=task,
            instance={},
            job_id=job_id,
            max_attempts=max_attempts,
            limits=PhaseLimits(LIMIT_S, LIMIT_S, LIMIT_S),
            stage_wait_s=STAGE_WAIT_S,
        )
        self.check_actions(self.table.submit(session, job, codec.encode(job), self.now))

    @precondition(lambda self: self.at_work())
    @rule(target=events, keep_sandbox=st.booleans(), data=st.data())
    def finish(self, keep_sandbox: bool, data: st.DataObject) -> PhaseDone:
        """A process ends a phase well, whether or not anybody still wants it."""
        return self.finish_one(*self.draw_work(data), keep_sandbox)

    @precondition(lambda self: self.at_work())
    @rule(
        target=events,
        retry=st.booleans(),
        outcome=st.sampled_from([Outcome.FAILED, Outcome.TIMEOUT, Outcome.INFRASTRUCTURE_ERROR]),
        data=st.data(),
    )
    def fail(self, retry: bool, outcome: Outcome, data: st.DataObject) -> PhaseFailed:
        """A process ends a phase badly, and has closed its sandbox if that was its own."""
        event = self.failed_event(*self.draw_work(data), outcome, retry)
        self.deliver(event)
        return event

    @precondition(lambda self: self.at_work())
    @rule(well=st.booleans(), keep_sandbox=st.booleans(), data=st.data())
    def end_unheard(self, well: bool, keep_sandbox: bool, data: st.DataObject) -> None:
        """A process ends a phase, and its word is lost with a connection or a broker."""
        worker, hold = self.draw_work(data)
        event = (
            self.done_event(worker, hold, keep_sandbox)
            if well
            else self.failed_event(worker, hold, Outcome.FAILED, retry=keep_sandbox)
        )
        worker.unacknowledged[hold] = event

    @precondition(lambda self: self.unheard())
    @rule(target=events, data=st.data())
    def send_again(self, data: st.DataObject) -> PhaseDone | PhaseFailed:
        """A process says again what nobody has noted."""
        stage_id, hold = data.draw(st.sampled_from(self.unheard()), label="event")
        event = self.workers[stage_id].unacknowledged.pop(hold)
        self.deliver(event)
        return event

    @rule()
    def crash(self) -> None:
        """The broker is killed; the next one has what the journal has."""
        self.table = self.new_table()
        self.unlooked.clear()
        for job in self.jobs.values():
            job.avoids = ""
        self.table.restore([self.journal[number] for number in sorted(self.journal)], self.submitted, self.now)
        assert self.table.take_changes() == []
        for job in self.jobs.values():
            job.since = self.now
            job.lease_until, job.confirmed = self.now + LEASE_S, False
        for worker in self.workers.values():
            held = [job for job in self.jobs.values() if job.holder == worker.stage_id]
            worker.known, worker.expected = False, bool(held)
            worker.holds = {(job.job_id, job.attempt) for job in held}

    @rule(event=consumes(events))
    def deliver_stale(self, event: PhaseDone | PhaseFailed) -> None:
        """What was dealt with already comes again: it changes nothing."""
        if (event.job_id, event.attempt) in self.workers[event.stage_id].holds:
            return  # the id belongs to another job by now
        before = self.table_state()
        self.deliver(event)
        assert self.table_state() == before

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.jobs)))
        self.to_end[job_id] = Outcome.CANCELLED
        self.check_actions(self.table.cancel(job_id, self.now))

    @precondition(lambda self: self.alive())
    @rule(target=events, data=st.data())
    def leave(self, data: st.DataObject) -> object:
        """A process ends in good order; the word of what it stopped comes after its leave."""
        worker = self.draw_worker(data)
        running, worker.running = worker.running, {}
        self.bury(worker)
        for command in running.values():
            self.close_own_sandbox(command)
        lost = [job for job in self.jobs.values() if job.holder == worker.stage_id]
        for job in lost:
            job.given_back += 1
            self.lose(job)
        worker.known = worker.expected = False
        worker.holds.clear()
        self.leaving = True
        self.check_actions(self.table.stage_left(worker.stage_id, self.now), in_order=len(lost) < 2)
        self.leaving = False
        return multiple(*(self.stopped(worker, command) for command in running.values()))

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """A process is killed: nothing more is heard of it."""
        self.bury(self.draw_worker(data))

    @rule(session=st.sampled_from("ab"))
    def fill_or_empty(self, session: str) -> None:
        """A session has what it may hold, or has no longer."""
        if session in self.full:
            self.full.remove(session)
            self.unlooked.add(session)
        else:
            self.full.add(session)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def line_breaks(self, data: st.DataObject) -> None:
        """The connection to a process ends: it has died, or will be heard of again."""
        worker = self.workers[data.draw(st.sampled_from(sorted(self.workers)), label="process")]
        if worker.known:
            until = self.now + (0.0 if worker.quiet else QUIET_S)
            worker.quiet = True
            worker.heard_at = min(worker.heard_at, until - LEASE_S)
            for job in self.jobs.values():
                if job.holder == worker.stage_id:
                    job.lease_until = min(job.lease_until, until)
        self.is_cut_off = True
        self.table.connection_broke(worker.stage_id, self.now)

    @rule(seconds=st.sampled_from([0.0, 1.0, QUIET_S, 4.0, LEASE_S, LIMIT_S + STOP_GRACE_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for worker in self.workers.values():
            if worker.known and worker.heard_at + LEASE_S <= self.now:
                worker.known = False
                worker.holds.clear()
            worker.quiet |= worker.heard_at + QUIET_S <= self.now
        for job in self.jobs.values():
            if job.holder is None:
                continue
            holder = self.workers[job.holder]
            if job.lease_until <= self.now or not (holder.known or holder.expected):
                self.lose(job)
            elif job.since + LIMIT_S + STOP_GRACE_S <= self.now:
                self.to_end[job.job_id] = Outcome.TIMEOUT
        for worker in self.workers.values():
            leased = any(j.holder == worker.stage_id and j.lease_until > self.now for j in self.jobs.values())
            if worker.expected and not leased:
                worker.expected = False
                worker.holds.clear()
        self.unlooked.clear()
        self.is_cut_off = False
        self.check_actions(self.table.tick(self.now), in_order=False)

    # What must hold ---------------------------------------------------------------------------------------------------

    @invariant()
    def counts_are_the_models(self) -> None:
        for status, held in ((JobStatus.QUEUED, False), (JobStatus.HELD, True)):
            expected = dict.fromkeys(Phase, 0)
            for job in self.jobs.values():
                expected[job.phase] += (job.holder is not None) == held
            assert self.table.count(status) == expected
        assert len(self.table) == len(self.jobs) == self.submitted - self.ended
        for session in "ab":
            assert self.table.unfinished(session) == sum(job.session == session for job in self.jobs.values())

    @invariant()
    def credit_is_the_models(self) -> None:
        known = {worker.stage_id: len(worker.holds) for worker in self.workers.values() if worker.known}
        assert {status.stage_id: status.busy for status in self.table.stages.status()} == known
        for stage in self.table.stages:
            assert 0 <= stage.credit <= stage.slots

    @invariant()
    def slots_are_counted_as_processes_come_and_go(self) -> None:
        stages = self.table.stages
        for role in Phase:
            working = {stage.stage_id: stage.working_slots for stage in stages if stage.role == role}
            assert stages.role_slots(role) == sum(working.values())
            for task in {task for stage in stages for task in stage.tasks}:
                for node in {None, *(stage.node for stage in stages)}:
                    fitting = [s for s in stages if s.role == role and task in s.tasks and node in (None, s.node)]
                    assert stages.slots(Requirement(role, task, node)) == sum(s.working_slots for s in fitting)

    @invariant()
    def each_claim_is_the_models(self) -> None:
        for job in self.jobs.values():
            if job.holder is not None:
                assert (job.job_id, job.attempt) in self.workers[job.holder].holds

    @invariant()
    def no_sandbox_is_forgotten(self) -> None:
        in_use = {job.sandbox.path for job in self.jobs.values() if job.sandbox is not None}
        in_use |= {path for worker in self.workers.values() for path in self.handed_on(worker)}
        assert self.open_sandboxes <= in_use

    @invariant()
    def nobody_waits_for_a_free_slot(self) -> None:
        for job in self.jobs.values():
            if job.holder is None and (job.phase != Phase.INIT or self.ready() < self.ready_limit):
                late = job.session in self.unlooked or (self.is_cut_off and job.avoids)
                assert late or not self.takers(job) or self.waits_behind(job)

    def teardown(self) -> None:
        """Once stage processes behave, every job ends."""
        for session in tuple(self.full):
            self.fill_or_empty(session)
        for stage_id in self.alive():
            self.bury(self.workers[stage_id])
        for role in Phase:
            for node in NODES:
                self.join(role, node, 3, TASKS)
        helpers = [self.workers[stage_id] for stage_id in self.alive()]
        for _ in range(200):
            if not self.jobs:
                break
            for worker in helpers:
                for hold in tuple(worker.running):
                    self.finish_one(worker, hold, keep_sandbox=False)
                self.deliver_report(worker, dict(worker.running.keys()))
            self.wait(1.0)
            self.counts_are_the_models()
        assert not self.jobs
        assert not self.open_sandboxes
        assert self.ended == self.submitted

    # What may happen next ---------------------------------------------------------------------------------------------

    def alive(self) -> list[str]:
        return [worker.stage_id for worker in self.workers.values() if not worker.gone]

    def at_work(self) -> list[tuple[str, SlotClaim]]:
        return [(worker.stage_id, hold) for worker in self.workers.values() for hold in sorted(worker.running)]

    def unheard(self) -> list[tuple[str, SlotClaim]]:
        return [(worker.stage_id, hold) for worker in self.workers.values() for hold in sorted(worker.unacknowledged)]

    def draw_worker(self, data: st.DataObject) -> Worker:
        return self.workers[data.draw(st.sampled_from(self.alive()), label="process")]

    def draw_work(self, data: st.DataObject) -> tuple[Worker, SlotClaim]:
        stage_id, hold = data.draw(st.sampled_from(self.at_work()), label="phase")
        return self.workers[stage_id], hold

    def new_table(self) -> JobTable:
        table = JobTable(LEASE_S, self.ready_limit, QUIET_S)
        table.queues.may_start = lambda session: session not in self.full
        return table

    # The model --------------------------------------------------------------------------------------------------------

    def ready(self) -> int:
        return sum(
            (job.phase == Phase.INIT and job.holder is not None) or (job.phase == Phase.RUN and job.holder is None)
            for job in self.jobs.values()
        )

    def takers(self, job: ModelJob) -> list[Worker]:
        free = [w for w in self.workers.values() if w.serves(job.need) and len(w.holds) < w.slots and not w.quiet]
        if job.phase == Phase.INIT and job.session in self.full:
            return []
        if not job.sandbox and any(
            w.serves(job.need) and not w.quiet and w.node != job.avoids for w in self.workers.values()
        ):
            free = [w for w in free if w.node != job.avoids]
        return [w for w in free if w.role != Phase.INIT or not self.is_full(w.node, job.task)]

    def waits_behind(self, job: ModelJob) -> bool:
        """A job whose turn may be before waits for another node than the one that is free."""
        waiting = [o for o in self.jobs.values() if o.holder is None and o.need == job.need]
        before = [o for o in waiting if o.session != job.session or o.sequence < job.sequence]
        return any(o.avoids and not self.takers(o) for o in before if o.session not in self.full | self.unlooked)

    def used(self, session: str, phase: Phase) -> int:
        """Return how many slots of a phase a session uses; of INIT's, what it has prepared and RUN has not ended."""
        jobs = [job for job in self.jobs.values() if job.session == session]
        if phase == Phase.INIT:
            return sum(job.phase == Phase.RUN or (job.phase == phase and job.holder is not None) for job in jobs)
        return sum(job.phase == phase and job.holder is not None for job in jobs)

    def is_full(self, node: str, task: str) -> bool:
        """As many jobs of a task wait for RUN or EVAL on a node as it has slots for."""
        there = [
            w
            for w in self.workers.values()
            if w.known and not (w.quiet or w.draining) and w.node == node and task in w.tasks
        ]
        here = [j for j in self.jobs.values() if j.holder is None and j.sandbox and j.sandbox.node == node]
        waiting = [j for j in here if j.task == task]
        return len(waiting) >= max(1, sum(w.slots for w in there if w.role != Phase.INIT))

    def is_anywhere(self, job_id: str) -> bool:
        return any(
            job_id == held
            for worker in self.workers.values()
            for held, _ in (*worker.holds, *worker.running, *worker.unacknowledged)
        )

    def is_current(self, job: ModelJob, event: PhaseDone | PhaseFailed) -> bool:
        return (job.holder, job.attempt, job.phase) == (event.stage_id, event.attempt, event.phase)

    def table_state(self) -> object:
        return (
            self.table.count(JobStatus.QUEUED),
            self.table.count(JobStatus.HELD),
            self.table.stages.status(),
            self.table.redelivered,
        )

    def lose(self, job: ModelJob) -> None:
        """The job's phase was lost."""
        if job.attempt - job.given_back >= job.max_attempts:
            self.to_end[job.job_id] = Outcome.INFRASTRUCTURE_ERROR
            return
        if job.phase != Phase.EVAL:
            job.phase, job.sandbox = Phase.INIT, None
        job.attempt += 1
        job.holder = None
        job.since = self.now
        self.waits(job)

    def waits(self, job: ModelJob) -> None:
        node = job.sandbox.node if job.sandbox else None
        if any(worker.known and worker.draining and worker.node == node for worker in self.workers.values()):
            self.missed.add(job.need)

    def bury(self, worker: Worker) -> None:
        """A process is gone, and what it kept for others with it."""
        worker.gone = True
        worker.running.clear()
        self.open_sandboxes -= self.handed_on(worker) - {job.sandbox.path for job in self.jobs.values() if job.sandbox}
        worker.unacknowledged.clear()

    def handed_on(self, worker: Worker) -> set[str]:
        events = worker.unacknowledged.values()
        return {event.sandbox.path for event in events if isinstance(event, PhaseDone) and event.sandbox is not None}

    def finish_one(self, worker: Worker, hold: SlotClaim, keep_sandbox: bool) -> PhaseDone:
        event = self.done_event(worker, hold, keep_sandbox)
        self.deliver(event)
        return event

    def done_event(self, worker: Worker, hold: SlotClaim, keep_sandbox: bool) -> PhaseDone:
        command = worker.running.pop(hold)
        sandbox = command.sandbox
        if command.phase == Phase.INIT and keep_sandbox:
            sandbox = SandboxHandle("process", f"{command.job_id}.{command.attempt}.{worker.stage_id}", worker.node)
            self.open_sandboxes.add(sandbox.path)
        elif command.phase == Phase.EVAL:
            sandbox = None  # it stays, and is the table's to close
        elif sandbox is not None and not keep_sandbox:
            self.open_sandboxes.discard(sandbox.path)
            sandbox = None
        return PhaseDone(
            stage_id=worker.stage_id,
            job_id=command.job_id,
            attempt=command.attempt,
            phase=command.phase,
            sandbox=sandbox,
            reward=1.0 if command.phase == Phase.EVAL else None,
        )

    def failed_event(self, worker: Worker, hold: SlotClaim, outcome: Outcome, retry: bool) -> PhaseFailed:
        command = worker.running.pop(hold)
        self.close_own_sandbox(command)
        return PhaseFailed(
            stage_id=worker.stage_id,
            job_id=command.job_id,
            attempt=command.attempt,
            phase=command.phase,
            outcome=outcome,
            error=ErrorInfo("handler_failed", "it failed"),
            retry=retry,
        )

    def close_own_sandbox(self, command: StartPhase) -> None:
        if command.sandbox is not None and command.phase != Phase.EVAL:
            self.open_sandboxes.discard(command.sandbox.path)

    def stopped(self, worker: Worker, command: StartPhase) -> PhaseFailed:
        return PhaseFailed(
            stage_id=worker.stage_id,
            job_id=command.job_id,
            attempt=command.attempt,
            phase=command.phase,
            outcome=Outcome.CANCELLED,
            error=ErrorInfo("cancelled", "the phase was stopped"),
        )

    def deliver_report(self, worker: Worker, running: dict[str, int]) -> None:
        ended = dict(sorted(worker.unacknowledged))
        named = {*running.items(), *ended.items()}
        anew, worker.expected = worker.expected, False
        worker.known, worker.quiet = True, False
        worker.heard_at = self.now
        held = [job for job in self.jobs.values() if job.holder == worker.stage_id]
        worker.holds &= {(job.job_id, job.attempt) for job in held} | named
        lost = [job for job in held if (job.job_id, job.attempt) not in named and anew]
        for job in held:
            job.confirmed = (job.job_id, job.attempt) in named
            if job.confirmed:
                job.lease_until = self.now + LEASE_S
        for job in lost:
            worker.holds.discard((job.job_id, job.attempt))
            job.given_back += 1
            self.lose(job)
        report = StageReport(
            stage_id=worker.stage_id,
            role=worker.role,
            node=worker.node,
            slots=worker.slots,
            endpoint="ipc://stage",
            tasks=tuple(Task(name) for name in worker.tasks),
            running=running,
            ended=ended,
            number=worker.number,
            draining=worker.draining,
        )
        self.leaving = worker.draining
        self.check_actions(self.table.stage_reported(report, self.now), in_order=len(lost) < 2)
        self.leaving = False

    def deliver(self, event: PhaseDone | PhaseFailed) -> None:
        worker, hold = self.workers[event.stage_id], (event.job_id, event.attempt)
        node = worker.node if worker.known and hold in worker.holds else ""
        worker.holds.discard(hold)
        job = self.jobs.get(event.job_id)
        if job is not None and self.is_current(job, event):
            if isinstance(event, PhaseFailed):
                if event.retry:
                    job.avoids = node
                    self.lose(job)
                else:
                    self.to_end[job.job_id] = event.outcome
            elif event.phase == Phase.EVAL:
                self.to_end[job.job_id] = Outcome.COMPLETED
            else:
                job.run_attempt = job.attempt if job.phase == Phase.RUN else 0
                job.phase, job.holder, job.since, job.sandbox = NEXT[job.phase], None, self.now, event.sandbox
                self.waits(job)
        if isinstance(event, PhaseDone):
            self.check_actions(self.table.phase_done(event, None, self.now))
        else:
            self.check_actions(self.table.phase_failed(event, None, self.now))

    def check_actions(self, actions: list[object], *, in_order: bool = True) -> None:
        """Check what the table decided; the model has made the event's own change already.

        Args:
            actions: the decisions.
            in_order: false where one event frees several jobs one after the other, so that an older one may come late.
        """
        for action in actions:
            match action:
                case Start():
                    self.check_start(action, in_order)
                case End(finished):
                    self.check_end(finished.result)
                case Close(sandbox):
                    self.check_close(sandbox)
                case Stop(stage_id, hold):
                    assert self.workers[stage_id].known
                    assert not self.is_wanted(stage_id, hold)
                case Unassign(hold):
                    assert not any(self.is_wanted(stage_id, hold) for stage_id in self.workers)
        self.missed.clear()
        assert not self.to_end
        self.journal.update((state.sequence, state) for state in self.table.take_changes())
        for action in actions:
            if isinstance(action, End):
                self.journal.pop(action.finished.sequence, None)

    def is_wanted(self, stage_id: str, hold: SlotClaim) -> bool:
        job = self.jobs.get(hold[0])
        return job is not None and job.job_id not in self.to_end and job.holder == stage_id and job.attempt == hold[1]

    def check_start(self, start: Start, in_order: bool) -> None:
        command = start.command
        job = self.jobs[command.job_id]
        worker = self.workers[start.stage_id]
        assert job.holder is None
        assert (command.phase, command.attempt, command.sandbox) == (job.phase, job.attempt, job.sandbox)
        assert command.attempt - job.given_back <= job.max_attempts
        takers = self.takers(job)
        assert worker in takers
        assert len(worker.holds) / worker.slots == min(len(taker.holds) / taker.slots for taker in takers)
        if command.phase == Phase.INIT:
            assert self.ready() < self.ready_limit
        if in_order:
            waiting = [other for other in self.jobs.values() if other.holder is None and other.need == job.need]
            passed_over = self.full | self.unlooked if job.phase == Phase.INIT else set()
            turns = [o for o in waiting if o.session not in passed_over]
            assert job.sequence == min([o.sequence for o in turns if o.session == job.session] + [job.sequence])
            used = self.used(job.session, job.phase)
            assert used == min([self.used(o.session, job.phase) for o in turns] + [used])
        job.holder, job.since, job.lease_until = worker.stage_id, self.now, self.now + LEASE_S
        job.confirmed = False
        worker.holds.add((job.job_id, job.attempt))
        if not worker.gone:
            for older in [hold for hold in worker.running if hold[0] == job.job_id]:
                self.close_own_sandbox(worker.running.pop(older))  # a process runs one attempt of a job
            worker.running[job.job_id, job.attempt] = command

    def check_end(self, result: object) -> None:
        job = self.jobs.pop(result.job_id)
        expected = self.to_end.pop(job.job_id, None)
        if expected is None:
            assert result.error.code == "no_stage"
            assert job.holder is None
            assert not any(worker.serves(job.need) for worker in self.workers.values())
        else:
            assert result.outcome == expected
        assert (result.reward is not None) == (result.outcome == Outcome.COMPLETED)
        assert (result.error is None) == (result.outcome == Outcome.COMPLETED)
        assert result.attempt == job.attempt
        self.ended += 1

    def check_close(self, sandbox: SandboxHandle) -> None:
        self.open_sandboxes.discard(sandbox.path)
        for job in self.jobs.values():
            if job.sandbox == sandbox and job.job_id not in self.to_end:
                # The job gives up a sandbox whose node has gone; nothing else may take a live job's sandbox away.
                assert job.holder is None
                assert not any(worker.serves(job.need) for worker in self.workers.values())
                job.given_back += self.leaving or job.need in self.missed
                job.phase, job.sandbox, before = Phase.INIT, None, job.phase
                job.given_back += 0 < job.run_attempt < job.attempt
                if job.attempt - job.given_back >= job.max_attempts:
                    job.phase = before
                    self.to_end[job.job_id] = Outcome.INFRASTRUCTURE_ERROR
                else:
                    job.attempt += 1
                    job.since = self.now
                    job.run_attempt = 0


@few_and_many(52, steps=80)
def test_job_table(runs: settings) -> None:
    run_state_machine_as_test(JobTableMachine, settings=runs)
