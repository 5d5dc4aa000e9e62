"""SCORE while processes are killed: what RUN and EVAL gave is never made a second time."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from support.services import PROCESS, serving
from support.waiting import until

from prorl_zmq import Job, Sampling

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.services import Service

    from prorl_zmq import RolloutClient

JOBS = 4
TEACHER = f"""{PROCESS}
[rollout_broker]
heartbeat_s = 0.2
lease_s = 2.0
[backend_broker]
lease_s = 60.0
[[backends]]
[[backends]]
name = "teacher"
frozen = true
"""

pytestmark = pytest.mark.xdist_group("services of their own")


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving(TEACHER) as started:
        yield started


def stays(client: RolloutClient, job_id: str) -> Counter[str]:
    """Return how often a job was in a slot of each stage."""
    return Counter(span.phase for span in client.trace(job_id).spans if span.place == "held")


def submit_until_all_wait(client: RolloutClient) -> list[str]:
    """Submit jobs whose teacher has stopped; return when all wait for it."""
    job_ids = client.submit(
        Job(
            task="math",
            instance={"problem": f"{number}", "ground_truth": "1"},
            sampling=Sampling(max_tokens=12),
            backend_wait_s=60,
            teacher="teacher:4",
        )
        for number in range(JOBS)
    )
    until(lambda: client.status(timeout_s=30).running.get("score") == JOBS, "all wait for the teacher", 60)
    return list(job_ids)


def until_all_wait_again(client: RolloutClient, redelivered: int) -> None:
    """Wait until the teacher's jobs wait for it again, and so many jobs of the service were redelivered."""
    until(
        lambda: client.status(timeout_s=30).redelivered >= redelivered and client.status().running.get("score") == JOBS,
        "all wait for the teacher again",
        60,
    )


@pytest.mark.parametrize("process", ["stage_score.json", "rollout_broker.json", "stage_run.json"])
def test_a_kill_while_jobs_wait_for_a_teacher_repeats_scoring_at_most(service: Service, process: str) -> None:
    teacher = service.child("engine-1.engine.json")
    with service.client() as client:
        os.kill(teacher, signal.SIGSTOP)
        try:
            job_ids = submit_until_all_wait(client)
            repeated, before = int(process == "stage_score.json"), client.status().redelivered
            os.kill(service.child(process), signal.SIGKILL)
            until_all_wait_again(client, repeated * (before + JOBS))
        finally:
            os.kill(teacher, signal.SIGCONT)
        found = list(client.stream(timeout_s=60))
        assert sorted(one.job_id for one in found) == sorted(job_ids)
        for one in found:
            assert (one.outcome, one.result.records_dropped) == ("completed", {})
            assert len(one.records.rows("teacher")) == len(one.token_ids) - 1
            assert one.result.attempt == 1 + repeated
            assert stays(client, one.job_id) == {"init": 1, "run": 1, "eval": 1, "score": 1 + repeated}
