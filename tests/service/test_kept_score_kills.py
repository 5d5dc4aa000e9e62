"""SCORE of trajectories that stay on their node, while processes are killed: each result has one block, with scores."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest
from support.waiting import until

from .test_kept_blocks import blocks, ended, is_of
from .test_node import cluster
from .test_score_kills import JOBS, stays, submit_until_all_wait, until_all_wait_again

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_zmq import RolloutClient

    from .test_node import Cluster

KEPT = """
[rollout_broker]
keep = "node"
heartbeat_s = 0.2
lease_s = 10.0
[backend_broker]
lease_s = 60.0
[[stage]]
role = "score"
slots = 8
[[backends]]
[[backends]]
name = "teacher"
frozen = true
"""
PROCESSES = [".stage_score.", ".node_broker.", ".rollout_broker.", ".stage_run."]

pytestmark = [pytest.mark.xdist_group("services in folders"), pytest.mark.proof]


@pytest.fixture
def shared() -> Iterator[Cluster]:
    with cluster(KEPT, brokers=1) as made:
        made.serve().wait_line("ready; clients and nodes find it")
        made.node("one").wait_line("ready: one")
        yield made


def process_of(cluster: Cluster, kind: str) -> psutil.Process:
    return next(one for one in psutil.process_iter() if is_of(one, cluster, kind))


def check(client: RolloutClient, cluster: Cluster, job_ids: list[str], scorings: set[int]) -> None:
    """Check that each result has its scores, one rollout and one block, and that no block stays."""
    ended(client, JOBS)
    until(lambda: len(blocks(cluster, "one")) == JOBS, "one block per uncollected result", 30)
    found = list(client.stream(timeout_s=60))
    assert sorted(one.job_id for one in found) == sorted(job_ids)
    for one in found:
        assert (one.outcome, one.result.records_dropped) == ("completed", {})
        assert len(one.records.rows("teacher")) == len(one.token_ids) - 1
        spans = stays(client, one.job_id)
        assert (spans["init"], spans["run"], spans["eval"]) == (1, 1, 1)
        assert spans["score"] in scorings
    until(lambda: not blocks(cluster, "one"), "what was collected is removed", 30)


@pytest.mark.parametrize("kind", PROCESSES)
def test_a_kill_while_jobs_wait_for_a_teacher_repeats_scoring_at_most(shared: Cluster, kind: str) -> None:
    teacher = process_of(shared, "engine-1.engine.")
    repeated = int(kind in {".stage_score.", ".node_broker."})  # the broker connects the node's stage processes
    with shared.client() as client:
        os.kill(teacher.pid, signal.SIGSTOP)
        try:
            job_ids = submit_until_all_wait(client)
            before = client.status().redelivered
            process_of(shared, kind).kill()
            until_all_wait_again(client, repeated * (before + JOBS))
        finally:
            os.kill(teacher.pid, signal.SIGCONT)
        check(client, shared, job_ids, {1 + repeated})


@pytest.mark.parametrize("kind", [".node_broker.", ".rollout_broker."])
def test_a_kill_while_scores_are_stored_leaves_one_block_per_result(shared: Cluster, kind: str) -> None:
    teacher = process_of(shared, "engine-1.engine.")
    with shared.client() as client:
        os.kill(teacher.pid, signal.SIGSTOP)
        try:
            job_ids = submit_until_all_wait(client)
        finally:
            os.kill(teacher.pid, signal.SIGCONT)
        until(lambda: client.status(timeout_s=30).uncollected, "the first has its scores", 60)
        process_of(shared, kind).kill()
        check(client, shared, job_ids, {1, 2})
