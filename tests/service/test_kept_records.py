"""Records of trajectories that stay on their nodes: through a real service, a full disk, and kills."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest
from support.waiting import until

from prorl_zmq import Job, Sampling
from prorl_zmq.data.trajectory import block_bytes
from prorl_zmq.inference.embedded.base_policy import base_policy
from prorl_zmq.inference.policy import log_softmax

from .test_kept_blocks import blocks, ended, fetched, is_of, keeping

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_zmq import Trajectory

    from .test_node import Cluster

TOP = 100
SAMPLING = Sampling(max_tokens=60, top_k=40, seed=3)
FULL = """
import shutil
usage = shutil.disk_usage
shutil.disk_usage = lambda path: usage(path)._replace(free=2**30 + 8000)
"""

pytestmark = pytest.mark.xdist_group("services in folders")


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with keeping('[[stage]]\nrole = "score"\n') as made:
        made.node("one").wait_line("ready: one")
        yield made


def job(number: int, teacher: str = "") -> Job:
    instance = {"problem": f"{number}", "ground_truth": "1"}
    record = (f"top_logprobs:{TOP}", "sampling_mask")
    return Job(task="math", instance=instance, backend_wait_s=20, sampling=SAMPLING, record=record, teacher=teacher)


def check(trajectories: list[Trajectory], jobs: int) -> None:
    assert len({one.job_id for one in trajectories}) == len(trajectories) == jobs
    policy = base_policy()
    for one in trajectories:
        assert one.outcome == "completed", one.error
        assert one.result.records_dropped == {}
        generated = np.flatnonzero(one.loss_mask)
        assert one.records.rows("top_logprobs").tolist() == generated.tolist()
        logits = policy.logits(policy.contexts(one.token_ids))[generated]
        for row in range(len(generated)):
            ids, logprobs = one.records["top_ids"][row, :40], one.records["top_logprobs"][row, :40]
            np.testing.assert_allclose(logprobs, log_softmax(logits[row][ids][None])[0], atol=1e-4)
            assert one.token_ids[generated[row]] in ids
        assert (one.records["top_ids"][:, 40:] == -1).all()
        assert one.records["mask_counts"].tolist() == [40] * len(generated)
        assert np.sort(one.records["mask_ids"][:40]).tolist() == np.sort(one.records["top_ids"][0, :40]).tolist()


def check_scores(trajectory: Trajectory) -> None:
    """Check the scores that the policy gave itself, behind the records of RUN."""
    rows = trajectory.records.rows("teacher")
    assert rows.tolist() == list(range(1, len(trajectory.token_ids)))
    policy = base_policy()
    logits = policy.logits(policy.contexts(trajectory.token_ids)[rows])
    expected = log_softmax(logits)[np.arange(len(rows)), trajectory.token_ids[rows]]
    np.testing.assert_allclose(trajectory.records["teacher_logprobs"], expected, atol=1e-4)
    assert trajectory.records["teacher_top_ids"].shape == (len(rows), 3)


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["mapped", "over TCP", "by the broker"])
def test_clients_get_records_that_the_node_keeps(shared: Cluster, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job(number, "policy:3" if number % 2 else "") for number in range(4)]
    found = fetched(shared, way, monkeypatch, jobs)
    check(found, 4)
    taught = [one for one in found if one.job_id in {jobs[1].job_id, jobs[3].job_id}]
    assert ["teacher" in one.records.names for one in found] == [one in taught for one in found]
    for one in taught:
        check_scores(one)
    if way == "mapped":
        assert {one.records["top_ids"].ctypes.data % 64 for one in found} == {0}


@pytest.mark.proof
def test_records_outlive_their_nodes_broker(shared: Cluster) -> None:
    with shared.client() as client:
        client.submit(job(number) for number in range(6))
        ended(client, 6)
        next(one for one in psutil.process_iter() if is_of(one, shared, ".node_broker.")).kill()
        until(lambda: client.status(timeout_s=30).stages, "the node is back", 30)
        found = list(client.stream(timeout_s=30))
        check(found, 6)  # a node that is back later than its lease runs them again


@pytest.mark.proof
def test_a_job_whose_stage_process_is_killed_has_all_its_records(shared: Cluster) -> None:
    with shared.client() as client:
        client.submit(job(number) for number in range(40))
        until(lambda: client.status().running, "jobs run", 30)
        (process,) = [one for one in psutil.process_iter() if is_of(one, shared, ".stage_run.")]
        process.kill()
        check(list(client.stream(timeout_s=60)), 40)


@pytest.mark.few(1)
def test_records_are_dropped_by_name_where_the_nodes_disk_is_full() -> None:
    with keeping() as made:
        (made.path / "sitecustomize.py").write_text(FULL)
        made.node("one", PYTHONPATH=str(made.path)).wait_line("ready: one")
        with made.client() as client:
            client.submit([job(1)])
            ended(client, 1)
            assert len(blocks(made, "one")) == 1
            (found,) = client.stream(timeout_s=30)
            result = found.result
            assert result.records_dropped == dict.fromkeys(
                ("top_logprobs", "sampling_mask"), "the node's disk was full"
            )
            assert len(found.records) == 0
            assert found.outcome == "completed"
            assert found.generated_tokens > 0
            assert result.kept is not None
            assert result.kept.records_at == 0
            assert block_bytes(result.tokens, result.turns) < 8000
