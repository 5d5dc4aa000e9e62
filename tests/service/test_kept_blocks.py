"""Trajectories that stay on their nodes (`keep = "node"`), through a real service on two nodes of this machine."""

from __future__ import annotations

import shutil
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from support.waiting import until

from prorl_zmq.client.block_fetcher import BlockFetcher

from .test_node import Cluster, cluster, job

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prorl_zmq import Job, RolloutClient, Trajectory

KEPT = '[rollout_broker]\nkeep = "node"\nheartbeat_s = 0.2\nlease_s = 2.0\n'

pytestmark = pytest.mark.xdist_group("services in folders")


@contextmanager
def keeping(more: str = "") -> Iterator[Cluster]:
    """A service with one rollout broker whose nodes keep trajectories, and no node yet."""
    with cluster(KEPT + more, brokers=1) as made:
        made.serve().wait_line("ready; clients and nodes find it")
        yield made


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with keeping() as made:
        made.node("one").wait_line("ready: one")
        yield made


def blocks(cluster: Cluster, node: str) -> list[Path]:
    return list(Path(cluster.run_dir(node), "blocks").glob("*/*/*"))


def ended(client: RolloutClient, jobs: int) -> None:
    until(lambda: client.status().uncollected == jobs, f"{jobs} results wait", 60)


def fetched(cluster: Cluster, way: str, monkeypatch: pytest.MonkeyPatch, jobs: Sequence[Job]) -> list[Trajectory]:
    """Run jobs, and collect their results `mapped`, `over TCP` or `by the broker`."""
    socket = Path(cluster.run_dir("one"), "blocks.socket")
    hidden = socket.with_name("hidden.socket")
    if way == "by the broker":
        monkeypatch.setattr(BlockFetcher, "fetch", lambda *_: {})
    with cluster.client() as client:
        client.submit(jobs)
        ended(client, len(jobs))
        until(lambda: len(blocks(cluster, "one")) == len(jobs), "a block for each, with its scores", 20)
        assert not list((cluster.folder / "journals").glob("*.segment-*")), "nothing of them is in the journal"
        if way == "over TCP":
            socket.rename(hidden)
        try:
            found = list(client.stream(timeout_s=30))
        finally:
            if hidden.exists():
                hidden.rename(socket)
    assert all((one.result.kept is None) == (way == "by the broker") for one in found)
    until(lambda: not blocks(cluster, "one"), "what was collected is forgotten", 20)
    return found


def check(trajectories: list[Trajectory], jobs: int) -> None:
    assert [one.outcome for one in trajectories] == ["completed"] * jobs
    assert len({one.job_id for one in trajectories}) == jobs
    for one in trajectories:
        assert len(one.token_ids) == one.result.tokens > 0
        assert one.loss_mask.any()
        assert (one.weight_versions[one.loss_mask] == 0).all()
        assert one.turns[-1][1] == len(one.token_ids)


def broker_of(cluster: Cluster) -> psutil.Process:
    return next(one for one in psutil.process_iter() if is_of(one, cluster, ".rollout_broker."))


def is_of(process: psutil.Process, cluster: Cluster, kind: str) -> bool:
    try:
        line = process.cmdline()
    except psutil.Error:
        return False
    return any(word.startswith(str(cluster.path)) and kind in word for word in line)


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["mapped", "over TCP", "by the broker"])
def test_clients_get_what_the_node_keeps(shared: Cluster, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fetched(shared, way, monkeypatch, [job(number) for number in range(8)])
    check(found, 8)
    assert {one.result.attempt for one in found} == {1}


@pytest.mark.proof
def test_blocks_outlive_the_brokers(shared: Cluster) -> None:
    with shared.client() as client:
        client.submit(job(number) for number in range(6))
        ended(client, 6)
        broker_of(shared).kill()
        next(one for one in psutil.process_iter() if is_of(one, shared, ".node_broker.")).kill()
        until(lambda: client.status(timeout_s=30).stages, "the node is back", 30)
        found = list(client.stream(timeout_s=30))
        check(found, 6)
        assert {one.result.attempt for one in found} == {1}
        assert client.status().lost_blocks == 0


@pytest.mark.proof
def test_what_is_lost_with_its_node_runs_again() -> None:
    with keeping() as made:
        one = made.node("one")
        one.wait_line("ready: one")
        with made.client() as client, made.client("batches") as trainer:
            client.submit(job(number) for number in range(6))
            batch = trainer.open_batch(2, 3, keep="all")
            batch.feed(job(100 + number) for number in range(2))
            group = batch.next_group(timeout_s=60)
            ended(client, 12)
            for process in [*one.children(), psutil.Process(one.process.pid)]:
                process.kill()
            shutil.rmtree(made.run_dir("one"))
            made.node("two").wait_line("ready: two")
            found = list(client.stream(timeout_s=60))
            check(found, 6)
            assert {trajectory.result.attempt for trajectory in found} == {2}
            rest = [group, *batch]
            assert len({each.group_id for each in rest if each is not None}) == 2
            for each in rest:
                check(list(each.trajectories), 3)
            assert client.status().lost_blocks >= 6
            batch.close()


@pytest.mark.proof
def test_a_node_that_leaves_gives_its_blocks_away() -> None:
    with keeping() as made:
        one = made.node("one")
        one.wait_line("ready: one")
        with made.client() as client:
            client.submit(job(number) for number in range(40))
            ended(client, 40)
            assert one.end(signal.SIGTERM) == 0
            assert not blocks(made, "one")
            found = list(client.stream(timeout_s=30))
            check(found, 40)
            assert {trajectory.result.attempt for trajectory in found} == {1}
            assert client.status().lost_blocks == 0
