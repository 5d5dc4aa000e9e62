"""The job table's transitions, row by row of the table in its docstring."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from prorl_zmq.brokers.rollout.actions import Action, Close, End, Queued, Start, Stop, Unassign
from prorl_zmq.brokers.rollout.held_jobs import STOP_GRACE_S
from prorl_zmq.brokers.rollout.job_record import JobRecord, JobStatus, overdue
from prorl_zmq.brokers.rollout.job_table import JobTable
from prorl_zmq.brokers.rollout.stage_pool import SlotClaim
from prorl_zmq.errors import ErrorInfo
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.jobs import (
    ArrayForm,
    BlockHandle,
    ConversationPart,
    Job,
    Outcome,
    Outside,
    Phase,
    PhaseLimits,
    RecordForm,
    Result,
    SandboxHandle,
)
from prorl_zmq.wire.messages.stages import PhaseDone, PhaseFailed, StageReport, Task

LEASE_S = 10.0
QUIET_S = 2.5
LIMIT_S = 100.0
SANDBOX = SandboxHandle("process", "/sandboxes/a.1", "local")
ELSEWHERE = SandboxHandle("process", "/sandboxes/a.1", "elsewhere")


class Table:
    """A job table, the time, and what was decided so far."""

    def __init__(self, ready_limit: int = 100) -> None:
        self.table = JobTable(LEASE_S, ready_limit, QUIET_S)
        self.now = 0.0
        self.actions: list[Action] = []

    def stage(
        self,
        stage_id: str,
        slots: int = 0,
        node: str = "local",
        running: dict[str, int] | None = None,
        *,
        draining: bool = False,
        tasks: tuple[str, ...] = ("math",),
    ) -> list[Action]:
        """A report of a process; its role is the first part of its name, and its slots stay as they were."""
        before = self.table.stages.get(stage_id)
        report = StageReport(
            stage_id=stage_id,
            role=Phase(stage_id.partition("-")[0]),
            node=node,
            slots=slots or (before.slots if before is not None else 1),
            endpoint="ipc://stage",
            tasks=tuple(map(Task, tasks)),
            running=running or {},
            draining=draining,
        )
        return self._note(self.table.stage_reported(report, self.now))

    def submit(
        self,
        job_id: str = "a",
        *,
        max_attempts: int = 3,
        session: str = "s",
        outside: Outside | None = None,
        teacher: str = "",
    ) -> list[Action]:
        job = Job(
            task="math",
            instance={},
            job_id=job_id,
            max_attempts=max_attempts,
            outside=outside,
            stage_wait_s=5.0,
            limits=PhaseLimits(LIMIT_S, LIMIT_S, LIMIT_S, LIMIT_S),
            teacher=teacher,
        )
        return self._note(self.table.submit(session, job, codec.encode(job), self.now))

    def done(self, stage_id: str, job_id: str = "a", attempt: int = 1, block: Any = None, **more: Any) -> list[Action]:
        phase = Phase(stage_id.partition("-")[0])
        event = PhaseDone(stage_id=stage_id, job_id=job_id, attempt=attempt, phase=phase, **more)
        return self._note(self.table.phase_done(event, block, self.now))

    def failed(
        self, stage_id: str, job_id: str = "a", attempt: int = 1, block: Any = None, **more: Any
    ) -> list[Action]:
        event = PhaseFailed(
            stage_id=stage_id,
            job_id=job_id,
            attempt=attempt,
            phase=Phase(stage_id.partition("-")[0]),
            outcome=Outcome.FAILED,
            error=ErrorInfo("handler_failed", "the handler raised"),
            **more,
        )
        return self._note(self.table.phase_failed(event, block, self.now))

    def leave(self, stage_id: str) -> list[Action]:
        return self._note(self.table.stage_left(stage_id, self.now))

    def cancel(self, job_id: str) -> list[Action]:
        return self._note(self.table.cancel(job_id, self.now))

    def tick(self, now: float) -> list[Action]:
        self.now = now
        return self._note(self.table.tick(now))

    def bring_to(self, phase: Phase, sandbox: SandboxHandle | None = None) -> None:
        """Submit job `a`, have a process of each role, and bring it to where it is held by that of `phase`."""
        for role in Phase:
            self.stage(f"{role}-1")
        self.submit(teacher="teacher" if phase == Phase.SCORE else "")
        if phase != Phase.INIT:
            self.done("init-1", sandbox=sandbox)
        if phase in (Phase.EVAL, Phase.SCORE):
            more: dict[str, Any] = {"chat": ChatSettings()} if phase == Phase.SCORE else {}
            more |= {"tokens": 1, "turns": 0, "stop_reason": "done", "backend": "x"}
            self.done("run-1", block=b"block", sandbox=sandbox, **more)
        if phase == Phase.SCORE:
            self.done("eval-1", reward=0.5)
        self.actions.clear()

    def where(self) -> tuple[Phase, JobStatus] | None:
        """Where the only job is; None if it has ended."""
        for status in (JobStatus.QUEUED, JobStatus.HELD):
            for phase, count in self.table.count(status).items():
                if count:
                    return phase, status
        return None

    def result(self) -> Result:
        (end,) = [action for action in self.actions if isinstance(action, End)]
        return end.finished.result

    def _note(self, actions: list[Action]) -> list[Action]:
        self.actions += actions
        return actions


def started(actions: list[Action]) -> list[tuple[str, str, int]]:
    """Who started what: stage process, job, attempt."""
    return [(a.stage_id, a.command.job_id, a.command.attempt) for a in actions if isinstance(a, Start)]


# The way of a job that meets no trouble -------------------------------------------------------------------------------


def test_a_job_passes_the_three_phases_and_ends_once() -> None:
    table = Table()
    for role in Phase:
        table.stage(f"{role}-1")
    (queued, start) = table.submit(session="trainer")
    assert queued == Queued("a", 1, Phase.INIT, None)
    assert isinstance(start, Start)
    assert (start.stage_id, codec.decode(start.packed_job, Job).job_id) == ("init-1", "a")
    assert (start.command.phase, start.command.attempt, start.command.sandbox) == (Phase.INIT, 1, None)

    (queued, start) = table.done("init-1", sandbox=SANDBOX, phase_data={"from": "init"})
    assert queued == Queued("a", 1, Phase.RUN, None)
    assert isinstance(start, Start)
    assert (start.stage_id, start.command.sandbox, start.command.phase_data) == ("run-1", SANDBOX, {"from": "init"})

    (_, start) = table.done(
        "run-1",
        block=b"block",
        phase_data={"from": "run"},
        tokens=7,
        turns=2,
        stop_reason="stop",
        backend="x",
        metrics={"turns": 1.0},
        timings={"run": 2.0},
    )
    assert isinstance(start, Start)
    assert (start.stage_id, start.command.sandbox, start.command.phase_data) == ("eval-1", None, {"from": "run"})

    (end,) = table.done("eval-1", reward=0.5, metrics={"checks": 3.0})
    assert isinstance(end, End)
    assert (end.finished.session, end.finished.block) == ("trainer", b"block")
    result = end.finished.result
    assert (result.outcome, result.reward, result.error) == (Outcome.COMPLETED, 0.5, None)
    assert (result.tokens, result.turns, result.stop_reason, result.backend) == (7, 2, "stop", "x")
    assert result.metrics == {"turns": 1.0, "checks": 3.0}
    assert result.timings["run"] == 2.0
    assert len(table.table) == 0
    assert "a" not in table.table


def test_time_in_queues_is_counted_apart_from_the_phases() -> None:
    table = Table()
    table.submit()
    table.now = 3.0
    table.stage("init-1")
    table.done("init-1")
    table.now = 7.0
    table.stage("run-1")
    table.stage("eval-1")
    table.done("run-1")
    table.done("eval-1", reward=1.0)
    timings = table.result().timings
    assert (timings["init_queue"], timings["run_queue"], timings["eval_queue"]) == (3.0, 4.0, 0.0)


def test_jobs_start_in_the_order_in_which_they_came() -> None:
    table = Table()
    for job_id in "abc":
        table.submit(job_id)
    assert started(table.stage("init-1", slots=2)) == [("init-1", "a", 1), ("init-1", "b", 1)]
    assert started(table.done("init-1", "b")) == [("init-1", "c", 1)]


def test_a_job_that_starts_again_keeps_its_place_in_the_queue() -> None:
    table = Table()
    table.stage("init-1")
    for job_id in "ab":
        table.submit(job_id)
    assert started(table.failed("init-1", "a", retry=True)) == [("init-1", "a", 2)]


def test_the_least_loaded_process_gets_the_job_and_ties_go_round() -> None:
    table = Table()
    table.stage("init-small", slots=1)
    table.stage("init-large", slots=4)
    chosen = [started(table.submit(job_id))[0][0] for job_id in "abcde"]
    assert chosen == ["init-small", "init-large", "init-large", "init-large", "init-large"]
    assert started(table.submit("f")) == []


def test_init_runs_ahead_of_run_by_the_ready_limit() -> None:
    table = Table(ready_limit=2)
    table.stage("init-1", slots=10)
    for job_id in "abc":
        table.submit(job_id)
    assert table.table.count(JobStatus.HELD)[Phase.INIT] == 2
    assert started(table.done("init-1", "a")) == []  # it waits for RUN, ready
    assert started(table.stage("run-1")) == [("run-1", "a", 1), ("init-1", "c", 1)]


def test_init_goes_on_as_soon_as_run_takes_a_job_that_waited() -> None:
    table = Table(ready_limit=1)
    table.stage("init-1")
    table.stage("run-1")
    for job_id in "abc":
        table.submit(job_id)
    table.done("init-1", "a")  # now in RUN
    table.done("init-1", "b")  # waits for RUN, so that INIT may not start c
    assert started(table.done("run-1", "a")) == [("run-1", "b", 1), ("init-1", "c", 1)]


def test_run_goes_to_the_node_of_its_sandbox() -> None:
    table = Table()
    table.stage("init-1")
    table.stage("run-far", slots=8, node="far")
    table.submit()
    assert started(table.done("init-1", sandbox=SANDBOX)) == []
    assert started(table.stage("run-near")) == [("run-near", "a", 1)]


def test_init_prepares_no_more_on_a_node_than_run_and_eval_there_have_slots_for() -> None:
    table = Table()
    table.stage("init-1", slots=8)
    table.stage("eval-1", slots=2)
    for job_id in "abcd":
        table.submit(job_id)
    for job_id in "ab":
        table.done("init-1", job_id, sandbox=SANDBOX)
    assert started(table.submit("e")) == []  # two wait, as many as the node has slots for
    assert started(table.stage("init-far", node="far")) == [("init-far", "e", 1)]
    table.submit("f")
    assert started(table.stage("run-1")) == [("run-1", "a", 1), ("init-1", "f", 1)]
    assert started(table.stage("run-1")) == []


def test_a_node_without_run_gets_one_job_at_a_time_so_that_it_is_found_out() -> None:
    table = Table()
    table.stage("init-1", slots=8)
    table.submit("a")
    table.done("init-1", "a", sandbox=SANDBOX)
    assert started(table.submit("b")) == []
    table.tick(4.0)
    table.tick(9.0)  # a's wait for RUN was in vain
    assert started(table.stage("init-1")) == [("init-1", "a", 2), ("init-1", "b", 1)]


def test_jobs_that_nobody_on_the_node_can_run_hold_back_only_their_own_task() -> None:
    table = Table()
    for role, tasks in (("init", ("math", "slow")), ("run", ("math",))):
        endpoint, served = "ipc://stage", tuple(Task(name) for name in tasks)
        report = StageReport(
            stage_id=f"{role}-1", role=Phase(role), node="local", slots=4, endpoint=endpoint, tasks=served
        )
        table.table.stage_reported(report, 0.0)
    for job_id in ("slow-1", "slow-2", "math-1"):
        job = Job(task=job_id.partition("-")[0], instance={}, job_id=job_id, stage_wait_s=600.0)
        table._note(table.table.submit("s", job, codec.encode(job), 0.0))
    table.done("init-1", "slow-1", sandbox=SANDBOX)
    table.done("init-1", "slow-2", sandbox=SANDBOX)
    for job_id, begins in (("slow-3", False), ("math-2", True)):
        job = Job(task=job_id.partition("-")[0], instance={}, job_id=job_id, stage_wait_s=600.0)
        assert bool(started(table.table.submit("s", job, codec.encode(job), 0.0))) == begins


def test_leases_begin_anew_where_time_stood_still() -> None:
    table = Table()
    table.bring_to(Phase.RUN)
    table.table.restart_leases(100.0)
    assert table.tick(100.0 + LEASE_S - QUIET_S - 1) == []
    table.stage("run-1", running={"a": 1})
    assert table.tick(200.0) != []


def test_attempts_that_nobody_can_have_made_are_not_believed() -> None:
    table = Table()
    table.submit()
    assert started(table.stage("init-1", running={"a": 2**20})) == [("init-1", "a", 1)]
    table.cancel("a")
    assert table.result().attempt == 1


def test_a_session_counts_its_own_unfinished_jobs() -> None:
    table = Table()
    table.submit("a", session="left")
    table.submit("b", session="left")
    table.submit("c", session="right")
    table.table.cancel("a", 0.0)
    assert [table.table.unfinished(session) for session in ("left", "right", "none")] == [1, 1, 0]


# Silence --------------------------------------------------------------------------------------------------------------


def test_a_quiet_process_is_given_nothing_new_until_it_reports() -> None:
    table = Table()
    table.stage("init-1", slots=2)
    table.submit("a")
    table.tick(QUIET_S)
    assert started(table.submit("b")) == []
    assert table.tick(LEASE_S - 1) == []
    assert started(table.stage("init-1", running={"a": 1})) == [("init-1", "b", 1)]


def test_jobs_of_a_process_whose_connection_broke_start_again_soon() -> None:
    table = Table()
    table.bring_to(Phase.RUN)
    table.now = 1.0
    table.table.connection_broke("run-1", table.now)
    assert table.tick(QUIET_S) == []
    assert started(table.tick(1.0 + QUIET_S)) == []  # INIT has been quiet as well
    assert "run-1" not in table.table.stages
    assert started(table.stage("init-1")) == [("init-1", "a", 2)]


def test_a_process_that_reports_over_another_connection_keeps_its_jobs() -> None:
    table = Table()
    table.bring_to(Phase.RUN)
    table.table.connection_broke("run-1", table.now)
    table.now = 1.0
    table.stage("run-1", running={"a": 1})
    table.tick(LEASE_S)
    assert table.where() == (Phase.RUN, JobStatus.HELD)


def test_a_line_of_a_process_that_is_not_known_any_more_changes_nothing() -> None:
    table = Table()
    table.submit()
    table.table.connection_broke("init-1", table.now)
    assert started(table.stage("init-1")) == [("init-1", "a", 1)]


def causes(actions: list[Action]) -> list[object]:
    """Why jobs were queued again."""
    return [a.error.fields["cause"] for a in actions if isinstance(a, Queued) and a.error is not None]


def test_what_happened_to_the_process_of_a_lost_job_is_told_apart() -> None:
    for event, cause in (("killed", "died"), ("hung", "silent"), ("left", "left"), ("never told", "unreported")):
        table = Table()
        table.bring_to(Phase.RUN)
        if event == "killed":
            table.table.connection_broke("run-1", table.now)
        elif event == "never told":
            table.now = LEASE_S - 1
            table.stage("run-1")
        actions = table.leave("run-1") if event == "left" else table.tick(LEASE_S)
        assert causes(actions) == [cause]


# Stale ----------------------------------------------------------------------------------------------------------------


def test_what_a_queued_job_is_said_to_have_done_is_stale() -> None:
    table = Table()
    table.submit()
    assert table.done("init-1") == []
    assert table.failed("init-1") == []
    assert table.where() == (Phase.INIT, JobStatus.QUEUED)


def test_an_older_attempt_changes_nothing_and_its_sandbox_is_closed() -> None:
    table = Table()
    table.stage("init-1")
    table.stage("init-2")
    table.submit()
    table.failed("init-1", retry=True)  # attempt 2 is on init-2 now
    assert table.done("init-1", attempt=1, sandbox=SANDBOX) == [Close(SANDBOX)]
    assert table.failed("init-1", attempt=1) == []
    assert table.where() == (Phase.INIT, JobStatus.HELD)
    assert len(started(table.done("init-2", attempt=2))) == 0
    assert table.where() == (Phase.RUN, JobStatus.QUEUED)


@pytest.mark.parametrize("impostor", ["init-2", "run-1"])
def test_only_the_holder_ends_a_phase(impostor: str) -> None:
    table = Table()
    table.bring_to(Phase.INIT)
    table.stage("init-2")
    assert table.done(impostor) == []
    assert table.failed(impostor) == []
    assert table.where() == (Phase.INIT, JobStatus.HELD)


def test_a_repeated_word_does_not_close_the_sandbox_that_the_job_now_uses() -> None:
    table = Table()
    table.bring_to(Phase.RUN, SANDBOX)
    assert table.done("init-1", sandbox=SANDBOX) == []


def test_a_job_that_has_ended_is_unknown() -> None:
    table = Table()
    table.bring_to(Phase.EVAL)
    table.done("eval-1", reward=1.0)
    table.actions.clear()
    assert table.done("eval-1", reward=0.0) == []
    assert table.failed("eval-1") == []


# Failed ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.INIT, Phase.RUN, Phase.EVAL])
def test_a_failure_without_retry_ends_the_job(phase: Phase) -> None:
    table = Table()
    table.bring_to(phase, SANDBOX)
    table.failed(f"{phase}-1")
    result = table.result()
    assert (result.outcome, result.reward, result.attempt) == (Outcome.FAILED, None, 1)
    assert result.error == ErrorInfo("handler_failed", "the handler raised")
    closed = [action for action in table.actions if isinstance(action, Close)]
    assert bool(closed) == (phase == Phase.EVAL)  # of INIT and RUN the holder has closed it


def test_a_job_that_its_own_agent_ended_has_the_reward_for_it() -> None:
    table = Table()
    table.bring_to(Phase.RUN)
    (end,) = (each for each in table.failed("run-1", reward=0.0) if isinstance(each, End))
    assert (end.finished.result.outcome, end.finished.result.reward) == (Outcome.FAILED, 0.0)


def test_what_there_is_of_a_trajectory_is_kept_if_run_fails() -> None:
    table = Table()
    table.bring_to(Phase.RUN)
    table.failed("run-1", block=b"part", tokens=3, turns=1)
    (end,) = [action for action in table.actions if isinstance(action, End)]
    assert (end.finished.block, end.finished.result.tokens) == (b"part", 3)


def test_runs_trajectory_is_kept_if_eval_fails() -> None:
    table = Table()
    table.stage("init-1")
    table.stage("run-1")
    table.stage("eval-1")
    table.submit()
    table.done("init-1")
    table.done("run-1", block=b"block", tokens=3, turns=1)
    table.failed("eval-1")
    (end,) = [action for action in table.actions if isinstance(action, End)]
    assert (end.finished.block, end.finished.result.tokens) == (b"block", 3)


# Lost -----------------------------------------------------------------------------------------------------------------


RESTARTS = pytest.mark.parametrize(
    ("phase", "again"), [(Phase.INIT, Phase.INIT), (Phase.RUN, Phase.INIT), (Phase.EVAL, Phase.EVAL)]
)


@RESTARTS
def test_a_failure_with_retry_starts_again(phase: Phase, again: Phase) -> None:
    table = Table()
    table.bring_to(phase)
    assert started(table.failed(f"{phase}-1", retry=True)) == [(f"{again}-1", "a", 2)]
    assert table.table.redelivered == 1


def test_a_failed_attempt_is_repeated_on_another_node_though_the_first_is_idle() -> None:
    """A node on which all fails at once would draw each retry, and end every job."""
    table = Table()
    table.stage("init-1", 1, "bad")
    table.stage("init-2", 1, "good")
    assert started([*table.submit("a"), *table.submit("b")]) == [("init-1", "a", 1), ("init-2", "b", 1)]
    assert started(table.failed("init-1", "a", retry=True)) == []
    assert started(table.submit("c")) == [], "it came later, and the other node's next slot is for the first"
    assert started(table.done("init-2", "b")) == [("init-2", "a", 2), ("init-1", "c", 1)]


def test_a_failed_attempt_is_repeated_on_its_node_where_no_other_serves_the_task() -> None:
    table = Table()
    table.stage("init-1", 1, "bad")
    table.stage("init-2", 1, "good")
    table.submit("a")
    table.submit("b")
    assert started(table.failed("init-1", "a", retry=True)) == []
    assert started(table.stage("init-2", 1, "good", draining=True)) == [("init-1", "a", 2)]


@RESTARTS
def test_a_lapsed_lease_starts_again_elsewhere(phase: Phase, again: Phase) -> None:
    table = Table()
    table.bring_to(phase)
    for now in (4.0, 8.0, 9.9):
        table.now = now
        for role in Phase:
            if role != phase:
                table.stage(f"{role}-1")
    assert table.tick(9.9) == []
    table.stage(f"{again}-2", slots=8)
    assert started(table.tick(LEASE_S)) == [(f"{again}-2" if again == phase else f"{again}-1", "a", 2)]


@RESTARTS
def test_a_process_that_leaves_gives_its_jobs_back(phase: Phase, again: Phase) -> None:
    table = Table()
    table.bring_to(phase)
    table.leave(f"{phase}-1")
    assert table.where() == (again, JobStatus.QUEUED if again == phase else JobStatus.HELD)
    assert f"{phase}-1" not in table.table.stages


def test_a_lost_run_gets_a_fresh_sandbox_and_gives_its_backend_back() -> None:
    table = Table()
    table.bring_to(Phase.RUN, SANDBOX)
    table.stage("init-2")
    actions = table.tick(LEASE_S)
    assert [type(action) for action in actions[:2]] == [Unassign, Close]
    assert Unassign(SlotClaim("a", 1)) in actions
    assert Close(SANDBOX) in actions


def test_a_lost_eval_starts_again_from_the_recorded_run() -> None:
    table = Table()
    table.bring_to(Phase.EVAL, SANDBOX)
    table.now = LEASE_S
    table.stage("init-1")
    (start,) = [action for action in table.tick(LEASE_S) + table.stage("eval-2") if isinstance(action, Start)]
    assert (start.stage_id, start.command.phase, start.command.sandbox) == ("eval-2", Phase.EVAL, SANDBOX)
    assert not [action for action in table.actions if isinstance(action, Close)]


def test_an_eval_whose_sandbox_is_gone_begins_with_a_new_one() -> None:
    """It was tried again in the sandbox that was not there, until no attempt was left."""
    table = Table()
    table.bring_to(Phase.EVAL, SANDBOX)
    actions = table.failed("eval-1", retry=True, sandbox_gone=True)
    assert started(actions) == [("init-1", "a", 2)]


def test_a_death_that_takes_eval_and_its_sandbox_spends_one_attempt() -> None:
    table = Table()
    table.bring_to(Phase.EVAL, SANDBOX)
    table.now = LEASE_S
    table.stage("init-1")
    table.tick(LEASE_S)
    assert started(table.stage("eval-2")) == [("eval-2", "a", 2)]
    assert started(table.failed("eval-2", attempt=2, retry=True, sandbox_gone=True)) == [("init-1", "a", 3)]
    assert started(table.failed("init-1", attempt=3, retry=True)) == [("init-1", "a", 4)]  # the third that is spent
    table.failed("init-1", attempt=4, retry=True)
    assert table.result().outcome == Outcome.INFRASTRUCTURE_ERROR


@pytest.mark.parametrize("word", ["failed", "left"])
def test_an_eval_that_was_given_up_finds_the_sandbox_as_run_left_it(word: str) -> None:
    table = Table()
    table.bring_to(Phase.EVAL, SANDBOX)
    table.stage("eval-2")
    actions = table.leave("eval-1") if word == "left" else table.failed("eval-1", retry=True)
    (start,) = [action for action in actions if isinstance(action, Start)]
    assert (start.command.phase, start.command.sandbox, start.command.attempt) == (Phase.EVAL, SANDBOX, 2)
    assert not [action for action in table.actions if isinstance(action, Close)]


def test_who_waits_where_the_last_process_leaves_in_order_spends_nothing() -> None:
    """Also if the job that this process held finds no process either, which had the waiting one spend its attempt."""
    table = Table()
    for stage_id in ("init-1", "run-1"):
        table.stage(stage_id)
    for job_id, sandbox in (("held", None), ("waits", SANDBOX)):
        table.submit(job_id, max_attempts=1)
        table.done("init-1", job_id, sandbox=sandbox)
    table.leave("init-1")
    actions = table.leave("run-1")
    assert not [action for action in actions if isinstance(action, End)]
    assert started(table.stage("init-2", slots=2)) == [("init-2", "held", 2), ("init-2", "waits", 2)]


def test_an_id_that_comes_again_while_its_last_attempt_stops_goes_on_from_there() -> None:
    """Otherwise the late word of the cancelled job would end the new one."""
    table = Table()
    table.bring_to(Phase.RUN)
    table.cancel("a")
    table.submit(max_attempts=1)
    (start,) = [action for action in table.actions[-3:] if isinstance(action, Start)]
    assert start.command.attempt == 2
    table.failed("run-1", attempt=1)
    assert table.where() == (Phase.INIT, JobStatus.HELD)
    table.failed("init-1", attempt=2, retry=True)  # its one attempt
    assert table.where() is None


def test_the_last_attempt_that_is_lost_ends_the_job() -> None:
    table = Table()
    table.stage("init-1")
    table.submit(max_attempts=2)
    table.failed("init-1", attempt=1, retry=True)
    table.failed("init-1", attempt=2, retry=True)
    result = table.result()
    assert (result.outcome, result.attempt, result.reward) == (Outcome.INFRASTRUCTURE_ERROR, 2, None)
    assert result.error is not None
    assert result.error.code == "handler_failed"


def test_a_lease_that_lapses_on_the_last_attempt_is_named() -> None:
    table = Table()
    table.stage("init-1")
    table.submit(max_attempts=1)
    table.tick(LEASE_S)
    result = table.result()
    assert result.error is not None
    assert result.error.code == "lease_lost"
    assert result.error.fields == {"stage_id": "init-1", "attempts": 1, "cause": "silent"}


def test_the_loss_of_an_attempt_is_told_with_the_next() -> None:
    table = Table()
    table.stage("init-1")
    table.submit()
    (queued,) = [action for action in table.tick(LEASE_S) if isinstance(action, Queued)]
    assert (queued.job_id, queued.attempt, queued.phase) == ("a", 2, Phase.INIT)
    assert queued.error is not None
    assert (queued.error.code, queued.error.fields["stage_id"]) == ("lease_lost", "init-1")


def test_an_attempt_that_was_given_back_is_not_spent() -> None:
    table = Table()
    table.submit(max_attempts=1)
    for number in range(5):
        assert started(table.stage(f"init-{number}")) == [(f"init-{number}", "a", number + 1)]
        table.leave(f"init-{number}")
    assert table.where() == (Phase.INIT, JobStatus.QUEUED)


@pytest.mark.parametrize("began", [True, False])
def test_a_run_that_a_program_outside_has_begun_is_not_started_again(*, began: bool) -> None:
    """Its program goes on with the same conversation, which another RUN has not captured."""
    table = Table()
    for role in Phase:
        table.stage(f"{role}-1")
    table.submit(outside=Outside(key_sha256=64 * "0"))
    table.done("init-1")
    if began:
        table.stage("run-1", running={"a": 1})
    table.leave("run-1")
    if not began:
        assert table.where() == (Phase.INIT, JobStatus.HELD)
        return
    assert table.result().outcome == "infrastructure_error"
    assert table.where() is None


def test_a_report_renews_the_leases_of_the_jobs_that_it_names() -> None:
    table = Table()
    table.stage("init-1", slots=2)
    table.submit("a")
    table.submit("b")
    for now in (5.0, 9.0):
        table.now = now
        table.stage("init-1", slots=2, running={"a": 1})
    assert started(table.tick(LEASE_S)) == []  # b's start never arrived; its slot is still taken
    assert table.table.count(JobStatus.QUEUED)[Phase.INIT] == 1
    assert started(table.stage("init-1", slots=2, running={"a": 1})) == [("init-1", "b", 2)]


def test_a_silent_process_loses_also_the_jobs_that_it_was_given_late() -> None:
    table = Table()
    table.stage("init-1")
    table.now = 9.0
    table.submit()
    table.tick(LEASE_S)
    assert table.where() == (Phase.INIT, JobStatus.QUEUED)
    table.now = 11.0
    actions = table.stage("init-1", running={"a": 1})  # it was not dead after all
    assert actions[0] == Stop("init-1", SlotClaim("a", 1))
    assert started(actions) == [("init-1", "a", 2)]
    assert table.table.stages.status()[0].busy == 1


def test_a_process_is_told_to_stop_what_is_not_its_own() -> None:
    table = Table()
    table.stage("init-1")
    table.submit("b")
    assert table.stage("init-1", running={"unknown": 1, "b": 2}) == [
        Stop("init-1", SlotClaim("unknown", 1)),
        Stop("init-1", SlotClaim("b", 2)),
    ]


# Time -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.INIT, Phase.RUN, Phase.EVAL])
def test_a_phase_that_cannot_be_stopped_times_out(phase: Phase) -> None:
    table = Table()
    table.bring_to(phase, SANDBOX)
    overdue = LIMIT_S + STOP_GRACE_S
    for now in (*range(5, int(overdue), 5), overdue - 0.1):
        table.now = now
        for role in Phase:
            table.stage(f"{role}-1", running={"a": 1} if role == phase else {})
        assert table.tick(now) == []
    table.tick(overdue)
    result = table.result()
    assert result.outcome == Outcome.TIMEOUT
    assert result.error is not None
    assert (result.error.code, result.error.fields) == ("phase_timeout", {"phase": phase, "limit_s": LIMIT_S})
    assert table.actions[0] == Stop(f"{phase}-1", SlotClaim("a", 1))
    assert (Close(SANDBOX) in table.actions) == (phase != Phase.INIT)
    assert any(isinstance(action, Unassign) for action in table.actions) == (phase == Phase.RUN)


def test_each_phase_has_a_limit_of_its_own() -> None:
    limits = PhaseLimits(7.0, 10.0, 8.0, teacher_s=5.0)
    job = Job(task="math", instance={}, job_id="a", teacher="teacher", limits=limits)
    record = JobRecord(1, "s", "a", "math", 5.0, b"", job)
    for phase, limit_s in ((Phase.INIT, 7.0), (Phase.RUN, 10.0), (Phase.EVAL, 8.0), (Phase.SCORE, 5.0)):
        record.phase = phase
        assert overdue(record).fields["limit_s"] == limit_s


def test_a_job_that_no_process_serves_ends_after_the_wait_that_it_allows() -> None:
    table = Table()
    table.submit()
    table.tick(1.0)
    table.tick(5.9)
    assert table.where() == (Phase.INIT, JobStatus.QUEUED)
    table.tick(6.0)
    result = table.result()
    assert result.outcome == Outcome.INFRASTRUCTURE_ERROR
    assert result.error is not None
    assert (result.error.code, result.error.fields) == ("no_stage", {"role": "init", "node": None, "waited_s": 5.0})


def test_a_busy_process_is_no_reason_to_give_up() -> None:
    table = Table()
    table.stage("init-1")
    table.submit("a")
    table.submit("b")
    for now in range(1, 60):
        table.now = now
        table.stage("init-1", running={"a": 1})
        table.tick(now)
    assert table.table.count(JobStatus.QUEUED)[Phase.INIT] == 1


@pytest.mark.parametrize("phase", [Phase.INIT, Phase.RUN])
def test_what_would_wait_on_a_node_that_drains_starts_again_elsewhere_and_keeps_its_attempt(phase: Phase) -> None:
    """INIT or RUN ends on a node whose next stage has said that it takes nothing new."""
    table = Table()
    for role in Phase:
        table.stage(f"{role}-1")
    table.submit(max_attempts=1)
    if phase == Phase.RUN:
        table.done("init-1", sandbox=SANDBOX)
    table.stage("init-1", draining=True)
    table.stage(f"{'run' if phase == Phase.INIT else 'eval'}-1", draining=True)
    table.stage("init-far", node="far")
    actions = table.done(f"{phase}-1", sandbox=SANDBOX)
    assert started(actions) == [("init-far", "a", 2)]


@pytest.mark.parametrize("joins_empty", [True, False])
def test_a_nodes_pool_without_a_process_serves_again_when_it_has_one(joins_empty: bool) -> None:
    """A node with blocks of trajectories reports its RUN pool also while the RUN process is being restarted."""
    table = Table()
    table.stage("init-1")
    if not joins_empty:
        table.stage("run-1")
    table.stage("run-1", draining=True, tasks=())
    table.submit()
    table.done("init-1")
    table.tick(1.0)
    assert table.where() == (Phase.RUN, JobStatus.QUEUED)
    assert started(table.stage("run-1")) == [("run-1", "a", 1)]
    table.stage("run-1", running={"a": 1}, tasks=("math", "code"))
    table.stage("run-1", running={"a": 1}, tasks=("code",))
    table.submit("b")
    table.done("init-1", "b")
    assert started(table.stage("run-1", running={"a": 1})) == []  # its only slot is taken
    assert started(table.done("run-1", block=b"block", tokens=1, turns=0)) == [("run-1", "b", 1)]


def test_an_init_that_ends_after_its_draining_nodes_run_process_has_left_keeps_its_jobs_attempt() -> None:
    """RUN had nothing to end there; a slow INIT goes on longer."""
    table = Table()
    for role in Phase:
        table.stage(f"{role}-1")
    table.submit(max_attempts=1)
    table.stage("init-1", draining=True)
    table.stage("run-1", draining=True)
    table.table.stage_left("run-1", table.now)
    table.stage("init-far", node="far")
    assert started(table.done("init-1", sandbox=SANDBOX)) == [("init-far", "a", 2)]


def test_a_job_whose_node_has_gone_starts_again_in_a_fresh_sandbox() -> None:
    table = Table()
    table.stage("init-1")
    table.submit()
    table.done("init-1", sandbox=ELSEWHERE)
    for now in range(1, 6):
        table.now = now
        table.stage("init-1")
        assert table.tick(now) == []
    actions = table.tick(6.0)
    assert actions[0] == Close(ELSEWHERE)
    assert started(actions) == [("init-1", "a", 2)]


# Cancel ---------------------------------------------------------------------------------------------------------------


def test_a_queued_job_is_cancelled() -> None:
    table = Table()
    table.submit()
    (end,) = table.table.cancel("a", 0.0)
    assert isinstance(end, End)
    assert end.finished.result.outcome == Outcome.CANCELLED
    assert end.finished.result.error is not None
    assert end.finished.result.error.code == "cancelled"


@pytest.mark.parametrize("phase", Phase)
def test_a_held_job_is_stopped_and_cancelled(phase: Phase) -> None:
    table = Table()
    table.bring_to(phase, SANDBOX)
    actions = table.cancel("a")
    expected = {Phase.INIT: [Stop, End], Phase.RUN: [Stop, Unassign, Close, End], Phase.EVAL: [Stop, Close, End]}
    expected[Phase.SCORE] = [Stop, Unassign, End]
    assert table.result().outcome == Outcome.CANCELLED
    assert table.result().reward is None
    assert [type(action) for action in actions] == expected[phase]


def test_a_job_that_is_cancelled_in_score_does_not_say_that_it_had_no_reward() -> None:
    table = Table()
    table.bring_to(Phase.SCORE)
    table.cancel("a")
    assert table.result().records_dropped == {"teacher": "the job ended before it was scored"}


def test_the_slot_of_a_cancelled_job_is_free_when_its_holder_says_so() -> None:
    table = Table()
    table.stage("init-1")
    table.submit("a")
    table.submit("b")
    table.table.cancel("a", 0.0)
    assert started(table.stage("init-1", running={"a": 1})) == []
    assert started(table.failed("init-1", "a")) == [("init-1", "b", 1)]


def test_an_id_that_is_used_again_is_not_found_in_the_queues_of_the_first_job() -> None:
    table = Table()
    table.stage("init-1")
    table.submit("a")
    table.done("init-1", "a")  # queued for RUN
    table.table.cancel("a", 0.0)
    table.leave("init-1")
    table.submit("a")  # another job of that id, queued for INIT
    assert started(table.stage("run-1")) == []
    assert started(table.stage("init-2")) == [("init-2", "a", 1)]


def test_a_silent_process_that_comes_back_with_a_cancelled_job_does_not_end_the_new_one_of_its_id() -> None:
    table = Table()
    table.stage("init-1")
    table.submit()
    table.tick(LEASE_S)
    table.cancel("a")
    table.submit()
    actions = table.stage("init-1", running={"a": 1})
    (start,) = [action for action in actions if isinstance(action, Start)]
    assert start.command.attempt == 2
    table.failed("init-1", attempt=1)
    assert table.where() == (Phase.INIT, JobStatus.HELD)


# A table that takes up what an earlier one left -----------------------------------------------------------------------


def restarted(old: Table) -> Table:
    """A new table, with all that the old one's changes have said."""
    new = Table()
    new.now = old.now + 1000.0  # another broker's clock
    new.table.restore(sorted(old.table.take_changes()), old.table.last_sequence, new.now)
    assert new.table.take_changes() == []
    return new


@pytest.mark.parametrize("phase", list(Phase))
def test_held_job_is_still_held_when_its_process_reports_it(phase: Phase) -> None:
    old = Table()
    old.bring_to(phase)
    new = restarted(old)
    assert new.where() == (phase, JobStatus.HELD)
    assert new.stage(f"{phase}-1", running={"a": 1}) == []
    assert [stage.busy for stage in new.table.stages.status()] == [1]
    new.tick(new.now + LEASE_S - 1)
    assert new.where() == (phase, JobStatus.HELD)
    assert new.table.redelivered == 0


def test_phase_that_ended_unheard_is_still_held_and_ends_when_its_event_comes() -> None:
    old = Table()
    old.bring_to(Phase.EVAL)
    new = restarted(old)
    report = StageReport(
        stage_id="eval-1",
        role=Phase.EVAL,
        node="local",
        slots=1,
        endpoint="ipc://stage",
        tasks=(Task("math"),),
        ended={"a": 1},
    )
    assert new.table.stage_reported(report, new.now) == []
    new.done("eval-1", reward=1.0)
    (end,) = [action for action in new.actions if isinstance(action, End)]
    assert (end.finished.result.attempt, end.finished.block, end.finished.result.stop_reason) == (1, b"block", "done")
    assert new.done("eval-1", reward=1.0) == []  # sent again


def test_event_that_comes_before_the_first_report() -> None:
    old = Table()
    old.bring_to(Phase.INIT)
    new = restarted(old)
    new.done("init-1", sandbox=SANDBOX)
    assert new.where() == (Phase.RUN, JobStatus.QUEUED)
    new.stage("init-1")
    assert [stage.busy for stage in new.table.stages.status()] == [0]


def test_start_that_was_never_sent_spends_no_attempt() -> None:
    old = Table()
    old.stage("init-1")
    old.submit(max_attempts=1)
    new = restarted(old)
    (start,) = [action for action in new.stage("init-1") if isinstance(action, Start)]
    assert (start.command.attempt, start.command.phase) == (2, Phase.INIT)


def test_process_that_does_not_come_back_loses_its_jobs_after_the_lease() -> None:
    old = Table()
    old.bring_to(Phase.RUN, SANDBOX)
    new = restarted(old)
    new.stage("init-1")
    assert new.tick(new.now + LEASE_S - 0.1) == []
    new.stage("init-1")
    actions = new.tick(new.now + 0.2)
    assert [type(action) for action in actions if not isinstance(action, Queued)] == [Unassign, Close, Start]
    late = new.stage("run-1", running={"a": 1})
    assert late == [Stop("run-1", SlotClaim("a", 1))]
    assert new.done("run-1", attempt=1) == []


def test_process_that_drains_as_it_reports_is_not_given_what_it_did_not_have() -> None:
    old = Table()
    old.bring_to(Phase.EVAL, SANDBOX)
    new = restarted(old)
    assert started(new.stage("eval-1", draining=True)) == []


def test_process_that_leaves_before_it_reports_gives_its_jobs_back() -> None:
    old = Table()
    old.bring_to(Phase.RUN)
    new = restarted(old)
    new.leave("run-1")
    assert new.where() == (Phase.INIT, JobStatus.QUEUED)


def test_queued_jobs_keep_their_order_and_new_ones_come_after_them() -> None:
    old = Table()
    for job_id in "abc":
        old.submit(job_id)
    new = restarted(old)
    new.submit("d")
    new.stage("init-1", slots=4)
    assert [action.command.job_id for action in new.actions if isinstance(action, Start)] == ["a", "b", "c", "d"]
    assert new.table.unfinished("s") == 4


def test_cancelling_a_job_whose_process_has_not_reported_stops_it_when_it_does() -> None:
    old = Table()
    old.bring_to(Phase.RUN)
    new = restarted(old)
    new.cancel("a")
    assert new.where() is None
    assert Stop("run-1", SlotClaim("a", 1)) in new.stage("run-1", running={"a": 1})


def test_changes_are_given_once_and_not_of_jobs_that_ended() -> None:
    table = Table()
    table.submit("a")
    table.submit("b")
    assert [state.job_id for state in table.table.take_changes()] == ["a", "b"]
    assert table.table.take_changes() == []
    table.stage("init-1", slots=2)
    table.cancel("a")
    (state,) = table.table.take_changes()
    assert (state.job_id, state.stage_id, state.phase) == ("b", "init-1", Phase.INIT)


# SCORE ----------------------------------------------------------------------------------------------------------------


SCORES = RecordForm("teacher", 1, (ArrayForm("teacher_logprobs", "float32", (1,)),))
BY_TEACHER: dict[str, Any] = {"block": b"block", "tokens": 2, "turns": 0, "chat": ChatSettings()}
KEPT = BlockHandle(node="local", block_id="one", checksum=1, endpoint="tcp://node")


def unscored(result: Result) -> tuple[Outcome, float | None, str]:
    assert result.error is None
    return result.outcome, result.reward, result.records_dropped["teacher"]


def test_a_teacher_scores_what_has_a_reward_and_the_result_has_its_record() -> None:
    table = Table()
    table.bring_to(Phase.RUN, SANDBOX)
    table.done("run-1", sandbox=SANDBOX, **BY_TEACHER)
    closed, queued, start = table.done("eval-1", reward=0.5, notes={"said": "well"})
    assert (closed, queued) == (Close(SANDBOX), Queued("a", 1, Phase.SCORE, None)), "its sandbox does not wait"
    assert isinstance(start, Start)
    text = start.command.text
    assert text is not None
    assert (text.tokens, text.ranges, text.kept, start.command.sandbox) == (2, ((0, 2),), None, None)
    table.done("score-1", block=b"block, scores", records=(SCORES,), metrics={"scored_tokens": 2.0})
    (end,) = (one for one in table.actions if isinstance(one, End))
    result = end.finished.result
    assert (result.outcome, result.reward, result.notes) == (Outcome.COMPLETED, 0.5, {"said": "well"})
    assert (result.records, result.records_dropped, end.finished.block) == ((SCORES,), {}, b"block, scores")
    assert result.metrics["scored_tokens"] == 2.0
    assert result.timings["score_queue"] == 0.0


def test_a_teacher_scores_no_other_models_tokens() -> None:
    table = Table()
    table.bring_to(Phase.RUN)
    parts = (ConversationPart("main", 0, 1), ConversationPart("critic", 1, 1, model="critic", trained=True))
    table.done("run-1", **(BY_TEACHER | {"tokens": 5}), segments=(3,), conversations=parts)
    table.done("eval-1", reward=0.5)
    (text,) = (one.command.text for one in table.actions if isinstance(one, Start) and one.command.text)
    assert text.ranges == ((0, 3),)


def test_what_has_no_reward_is_not_scored() -> None:
    table = Table()
    table.bring_to(Phase.RUN)
    table.done("run-1", **BY_TEACHER)
    table.failed("eval-1")
    assert table.where() is None
    assert table.result().outcome == Outcome.FAILED


def test_a_failure_with_a_reward_is_scored_and_stays_a_failure() -> None:
    table = Table()
    table.bring_to(Phase.RUN)
    table.failed("run-1", reward=0.0, **BY_TEACHER)
    assert table.where() == (Phase.SCORE, JobStatus.HELD)
    table.done("score-1", block=b"both", records=(SCORES,))
    result = table.result()
    assert (result.outcome, result.reward, result.records) == (Outcome.FAILED, 0.0, (SCORES,))
    assert result.error == ErrorInfo("handler_failed", "the handler raised")


def test_a_lost_process_repeats_scoring_only() -> None:
    table = Table()
    table.bring_to(Phase.SCORE)
    table.stage("score-2")
    table.actions.clear()
    table.leave("score-1")
    assert started(table.actions) == [("score-2", "a", 2)]
    table.done("score-2", attempt=2, block=b"both", records=(SCORES,))
    result = table.result()
    assert (result.outcome, result.reward, result.attempt) == (Outcome.COMPLETED, 0.5, 2)
    assert table.table.redelivered == 1


@pytest.mark.parametrize("comes_back", [True, False])
def test_scoring_waits_for_the_node_of_its_trajectory(comes_back: bool) -> None:
    table = Table()
    for role in Phase:
        table.stage(f"{role}-1")
    table.submit(teacher="teacher")
    table.done("init-1")
    table.done("run-1", **BY_TEACHER | {"block": None}, kept=KEPT)
    table.done("eval-1", reward=0.5)
    assert table.where() == (Phase.SCORE, JobStatus.HELD)
    table.tick(LEASE_S)
    assert (table.where(), list(table.table.stages)) == ((Phase.SCORE, JobStatus.QUEUED), [])
    if comes_back:
        table.tick(LEASE_S + 4.0)
        table.stage("score-2")
        table.done("score-2", attempt=2, kept=KEPT, records=(SCORES,))
        assert (table.result().reward, table.result().records) == (0.5, (SCORES,))
    else:
        table.tick(LEASE_S + 6.0)
        outcome, reward, why = unscored(table.result())
        assert (outcome, reward, why.partition(":")[0]) == (Outcome.COMPLETED, 0.5, "no_stage")


def test_a_job_that_lost_all_attempts_of_scoring_keeps_its_reward() -> None:
    table = Table()
    table.bring_to(Phase.SCORE)
    for attempt in (1, 2, 3):
        table.failed("score-1", attempt=attempt, retry=True)
    assert unscored(table.result()) == (Outcome.COMPLETED, 0.5, "handler_failed: the handler raised")


def test_a_failed_teacher_costs_the_scores_only() -> None:
    table = Table()
    table.bring_to(Phase.SCORE)
    table.failed("score-1")
    assert unscored(table.result()) == (Outcome.COMPLETED, 0.5, "handler_failed: the handler raised")


def test_a_teacher_that_cannot_be_stopped_costs_the_scores_only() -> None:
    table = Table()
    table.bring_to(Phase.SCORE)
    for now in (1.0, 5.0, LIMIT_S + STOP_GRACE_S):
        table.now = now
        table.stage("score-1", running={"a": 1})
        table.tick(now)
    outcome, reward, why = unscored(table.result())
    assert (outcome, reward) == (Outcome.COMPLETED, 0.5)
    assert why.startswith("phase_timeout: score took longer than its limit")


def test_without_a_process_for_teachers_the_scores_are_missing() -> None:
    table = Table()
    for role in (Phase.INIT, Phase.RUN, Phase.EVAL):
        table.stage(f"{role}-1")
    table.submit(teacher="teacher")
    table.done("init-1")
    table.done("run-1", **BY_TEACHER)
    table.done("eval-1", reward=0.5)
    assert table.where() == (Phase.SCORE, JobStatus.QUEUED)
    table.tick(1.0)
    table.tick(6.0)
    outcome, reward, why = unscored(table.result())
    assert (outcome, reward) == (Outcome.COMPLETED, 0.5)
    assert why.startswith("no_stage: no live score process")


def test_a_kept_trajectory_is_scored_on_its_node_and_ends_with_the_new_handle() -> None:
    table = Table()
    for role in Phase:
        table.stage(f"{role}-1")
    table.stage("score-far", node="far", slots=8)
    table.submit(teacher="teacher")
    table.done("init-1")
    table.done("run-1", **(BY_TEACHER | {"block": None}), kept=KEPT)
    table.done("eval-1", reward=0.5)
    assert started(table.actions)[-1] == ("score-1", "a", 1)
    new = replace(KEPT, block_id="two")
    table.done("score-1", records=(SCORES,), kept=new)
    assert (table.result().kept, table.result().records) == (new, (SCORES,))


def test_a_kept_trajectory_whose_node_has_left_is_not_scored() -> None:
    table = Table()
    table.bring_to(Phase.RUN)
    table.done("run-1", **(BY_TEACHER | {"block": None}), kept=replace(KEPT, node="gone"))
    table.done("eval-1", reward=0.5)
    table.tick(1.0)
    table.tick(6.0)
    outcome, reward, why = unscored(table.result())
    assert (outcome, reward) == (Outcome.COMPLETED, 0.5)
    assert why == "no_stage: give node gone slots for score: no live process there takes the trajectory that it stores"


def test_the_time_in_score_is_no_work_that_a_cancelled_job_wastes() -> None:
    table = Table()
    table.bring_to(Phase.RUN)
    table.now = 4.0
    assert table.table.worked_s("a", 4.0) == 4.0
    table.done("run-1", timings={"run": 4.0}, **BY_TEACHER)
    table.done("eval-1", reward=0.5, timings={"eval": 1.0})
    assert table.where() == (Phase.SCORE, JobStatus.HELD)
    assert table.table.worked_s("a", 600.0) == 5.0


def test_a_journal_restores_a_job_in_score_with_its_reward() -> None:
    old = Table()
    old.bring_to(Phase.SCORE)
    new = restarted(old)
    new.stage("score-1", running={"a": 1})
    new.done("score-1", block=b"both", records=(SCORES,))
    result = new.result()
    assert (result.outcome, result.reward, result.records) == (Outcome.COMPLETED, 0.5, (SCORES,))
