"""How many more jobs of a task a batch may submit, and how many slots of each stage a broker asks for."""

from __future__ import annotations

from typing import Any

from prorl_zmq.brokers.rollout.job_table import JobTable
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.jobs import Job, Phase
from prorl_zmq.wire.messages.stages import PhaseDone, StageReport, Task

SLOTS = {Phase.INIT: 2, Phase.RUN: 4, Phase.EVAL: 2, Phase.SCORE: 3}


def made() -> JobTable:
    table = JobTable(10.0, 100, 2.5)
    for role, slots in SLOTS.items():
        report = StageReport(stage_id=role, role=role, node="n", slots=slots, endpoint="ipc://s", tasks=(Task("t"),))
        table.stage_reported(report, 0.0)
    return table


def bring_to(table: JobTable, phase: Phase, jobs: int, *, teacher: str = "teacher") -> None:
    """Submit jobs of a batch, and bring them to a phase, where some of them are held."""
    first = table.last_sequence
    names = [f"job-{first + number}" for number in range(jobs)]
    for job_id in names:
        table.submit("s", Job(task="t", instance={}, job_id=job_id, teacher=teacher), b"", 0.0, in_batch=True)
    for before in list(Phase)[: list(Phase).index(phase)]:
        more: dict[str, Any] = {"reward": 1.0} if before == Phase.EVAL else {}
        if before == Phase.RUN:
            more = {"tokens": 2, "turns": 0, "stop_reason": "done", "backend": "b"}
            more |= {"chat": ChatSettings()} if teacher else {}
        for job_id in names:
            done = PhaseDone(stage_id=before, job_id=job_id, attempt=1, phase=before, **more)
            table.phase_done(done, b"block" if before == Phase.RUN else None, 0.0)


def test_what_waits_for_a_teacher_leaves_a_batch_no_room() -> None:
    table = made()
    assert table.room("t") == 6
    bring_to(table, Phase.SCORE, SLOTS[Phase.SCORE])
    assert table.room("t") == 6, "its slots work on them"
    bring_to(table, Phase.SCORE, 5)
    assert table.room("t") == 1
    bring_to(table, Phase.SCORE, 4)
    assert table.room("t") <= 0


def test_jobs_without_a_teacher_want_no_slots_for_one() -> None:
    table = made()
    bring_to(table, Phase.SCORE, 1)
    bring_to(table, Phase.EVAL, 3, teacher="")
    assert table.counts.demand(1).slots[Phase.SCORE] == 1
    bring_to(table, Phase.EVAL, 4)
    assert table.counts.demand(1).slots == {Phase.INIT: 0, Phase.RUN: 0, Phase.EVAL: 7, Phase.SCORE: 5}
    for job_id in list(table.records):
        table.cancel(job_id, 1.0)
    assert not any(table.counts.demand(1).slots.values())
