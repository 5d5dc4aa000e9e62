from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.brokers.journal.records import Finished
from prorl_zmq.brokers.rollout.actions import Action, Start
from prorl_zmq.brokers.rollout.job_table import JobStatus, JobTable
from prorl_zmq.brokers.rollout.quota import Quota
from prorl_zmq.errors import Busy
from prorl_zmq.wire.messages.jobs import Job, Outcome, Phase, Result
from prorl_zmq.wire.messages.stages import StageReport, Task


def finished(job_id: str, session: str = "s", size_bytes: int = 0) -> Finished:
    block = bytes(size_bytes) if size_bytes else None
    return Finished(session, Result(job_id=job_id, task="t", outcome=Outcome.COMPLETED), block)


def test_a_session_fills_its_own_share_and_others_go_on() -> None:
    quota = Quota(10, 1000, 0.5)
    quota.check("greedy", 5, 0)
    for number in range(5):
        quota.submitted("greedy", f"job-{number}", 10)
    with pytest.raises(Busy, match="the session holds 5 jobs and uncollected results, and may hold 5") as refused:
        quota.check("greedy", 1, 0)
    assert refused.value.retry_after_s > 0
    quota.check("other", 2, 0)
    with pytest.raises(Busy, match="50% of what other sessions leave of 10"):
        quota.check("other", 3, 0)
    quota.ended(finished("job-0", "greedy"))
    with pytest.raises(Busy):
        quota.check("greedy", 1, 0)
    quota.collected([finished("job-0", "greedy")])
    quota.check("greedy", 1, 0)


def test_however_many_sessions_are_dead_there_is_room_for_another() -> None:
    quota = Quota(100_000, 1000, 0.5)
    for number in range(8):
        while True:
            try:
                quota.check(f"dead-{number}", 50, 0)
            except Busy:
                break
            for job in range(50):
                quota.submitted(f"dead-{number}", f"job-{number}-{job}", 0)
    quota.check("alive", 50, 0)


def test_all_sessions_together_have_a_limit() -> None:
    quota = Quota(10, 1000, 1.0)
    for number in range(9):
        quota.submitted(f"s-{number}", f"job-{number}", 10)
    with pytest.raises(Busy, match=r"may hold 1 .*; 2 more would exceed it: submit at most 1 at a time"):
        quota.check("new", 2, 0)
    quota.check("new", 1, 0)


def test_large_jobs_count() -> None:
    quota = Quota(10, 1000, 0.5)
    with pytest.raises(Busy, match="the session holds 0 bytes of jobs, and may hold 500"):
        quota.check("s", 1, 501)
    quota.submitted("s", "a", 500)
    with pytest.raises(Busy):
        quota.check("s", 1, 1)
    quota.submitted("t", "b", 400)
    with pytest.raises(Busy, match="the session holds 0 bytes of jobs, and may hold 50 "):
        quota.check("u", 1, 51)


def test_a_session_that_never_fetches_gets_no_new_sandboxes_and_stops_nobody() -> None:
    quota = Quota(100, 1000, 0.5)
    for job_id in "abc":
        quota.submitted("dead", job_id, 1)
    quota.ended(finished("a", "dead", 500))
    assert quota.may_start("dead")
    quota.ended(finished("b", "dead", 1))
    assert not quota.may_start("dead")
    assert quota.may_start("alive")
    with pytest.raises(Busy, match="the session holds 501 bytes of uncollected trajectories"):
        quota.check("dead", 1, 1)
    quota.check("alive", 1, 1)
    quota.recovered(finished("of-before", "alive", 500))
    assert not quota.may_start("alive")
    assert not quota.may_start("third"), "there is no room for anybody"
    quota.collected([finished("a", "dead", 500)])
    assert quota.may_start("dead")


def test_trajectories_that_wait_for_their_teacher_count_until_they_are_collected() -> None:
    quota = Quota(100, 1000, 0.5)
    quota.submitted("s", "a", 1)
    quota.judged("s", "a", 501)
    quota.judged("s", "a", 501)  # it waits again, after a loss
    assert not quota.may_start("s")
    assert quota.may_start("other")
    quota.ended(finished("a", size_bytes=400))
    assert quota.may_start("s")
    assert not quota.has_room("s", 101)
    quota.collected([finished("a", size_bytes=400)])
    assert quota.has_room("s", 500)


@given(st.lists(st.tuples(st.sampled_from("st"), st.integers(0, 300), st.integers(0, 300)), max_size=30))
def test_what_has_come_and_gone_leaves_nothing(jobs: list[tuple[str, int, int]]) -> None:
    quota = Quota(100, 10_000, 1.0)
    for number, (session, job_bytes, _) in enumerate(jobs):
        quota.submitted(session, str(number), job_bytes)
    for number, (session, _, size_bytes) in enumerate(jobs):
        quota.ended(finished(str(number), session, size_bytes))
        quota.collected([finished(str(number), session, size_bytes)])
    assert not any((quota._jobs, quota._job_bytes, quota._trajectory_bytes, quota._packed_bytes))


def test_init_passes_over_the_jobs_of_a_session_that_may_not_start_any() -> None:
    table, full = JobTable(10.0, 100, 2.5), {"dead"}
    table.queues.may_start = lambda session: session not in full
    for number in range(4):
        session = "dead" if number % 2 == 0 else "alive"
        table.submit(session, Job(task="t", instance={}, job_id=f"{session}-{number}"), b"", 0.0)
    report = StageReport(stage_id="i", role=Phase.INIT, node="n", slots=4, endpoint="ipc://i", tasks=(Task("t"),))
    assert started(table.stage_reported(report, 0.0)) == ["alive-1", "alive-3"]
    assert started(table.tick(1.0)) == []
    assert table.count(JobStatus.QUEUED)[Phase.INIT] == 2
    table.cancel("dead-0", 1.0)
    full.clear()
    assert started(table.tick(2.0)) == ["dead-2"]
    assert table.count(JobStatus.QUEUED)[Phase.INIT] == 0


def started(actions: list[Action]) -> list[str]:
    return [action.command.job_id for action in actions if isinstance(action, Start)]
