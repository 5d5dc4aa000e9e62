"""Updates of weights in a whole service with real engine hosts: each token is of the weights that its version names."""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import zmq
from support.waiting import until

from prorl_zmq import AsyncRolloutClient
from prorl_zmq.brokers.backends.backend_journal import BackendJournal
from prorl_zmq.errors import (
    InvalidJob,
    InvalidWeights,
    NoBackend,
    RequestTimeout,
    UpdateInProgress,
    UpdateNotBegun,
    WeightsHeld,
)
from prorl_zmq.inference.policy import Policy, PolicyShape
from prorl_zmq.inference.tokenizer import IM_END
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.base import new_id
from prorl_zmq.wire.messages.engines import EngineHealth, EngineReady
from prorl_zmq.wire.messages.jobs import EpisodeLimits, Sampling
from prorl_zmq.wire.sockets import connect, open_socket

from .conftest import scripted

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from prorl_zmq import Job, RolloutClient, Trajectory
    from prorl_zmq.wire.messages.engines import UpdateMode

    from .conftest import TestService

pytestmark = pytest.mark.proof
TOKENS = 20_000
"""Of one turn: it takes two seconds where nothing else runs."""
JOBS = 4


def make_policy(folder: Path, version: int, seed: int = 0) -> Path:
    """Write weights that draw other tokens than each other version's and seed's, and never end a turn."""
    policy = Policy.initial(PolicyShape(hidden=16), 0)
    random = np.random.default_rng([version, seed])
    policy.parameters["output_bias"] += random.standard_normal(policy.shape.vocabulary)
    policy.parameters["output_bias"][IM_END] = -1000
    path = folder / f"policy-{version}.npz"
    policy.save(path)
    return path


def check_tokens(trajectory: Trajectory, folder: Path) -> None:
    """Each generated token's log-prob is what the weights of its version say."""
    assert trajectory.outcome == "completed", trajectory.error
    assert trajectory.loss_mask.sum() == TOKENS
    for version in trajectory.versions:
        policy = Policy.load(folder / f"policy-{version}.npz")
        theirs = trajectory.weight_versions == version
        ids = trajectory.token_ids[theirs]
        logits = policy.logits(policy.contexts(trajectory.token_ids)[theirs])
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(logits[np.arange(len(ids)), ids], trajectory.logprobs[theirs], atol=1e-4)


def long_job(number: int) -> Job:
    return msgspec.structs.replace(
        scripted(run="converse"),
        sampling=Sampling(max_tokens=TOKENS, seed=number),
        episode=EpisodeLimits(max_turns=1),
        backend_wait_s=60.0,
    )


def start_engine(
    service: TestService, name: str, policy: Path, version: int = 0, *more: str
) -> subprocess.Popen[bytes]:
    flags = ("--connect", service.backend_broker, "--name", name, "--run-dir", str(service.folder))
    weights = ("--model", str(policy), "--weight-version", str(version))
    return service.start("-m", "prorl_zmq.cli", "prorl-engine", *flags, *weights, *more)


def start_engines(service: TestService, folder: Path, client: RolloutClient) -> None:
    for name in ("a", "b"):
        start_engine(service, name, make_policy(folder, 0))
    until(lambda: len(client.backends.list()) == 2, "the engines to register")


def states(client: RolloutClient) -> dict[str, tuple[str, int]]:
    return {one.backend.backend_id: (one.state, one.backend.weight_version) for one in client.backends.list()}


def until_running(client: RolloutClient, count: int) -> None:
    """Ask the engine hosts themselves: their next heartbeats may come when all is over."""
    with zmq.Context() as context:
        sockets = [open_socket(context, zmq.REQ) for _ in client.backends.list()]
        for socket, one in zip(sockets, client.backends.list(), strict=True):
            connect(socket, one.backend.endpoint)

        def running() -> int:
            total = 0
            for socket in sockets:
                socket.send(codec.encode(EngineHealth(new_id())))
                assert socket.poll(60_000)
                total += codec.decode(socket.recv(), EngineReady).in_flight
            return total

        until(lambda: running() >= count, f"{count} generations")
        for socket in sockets:
            socket.close()


def test_weights_that_come_between_the_halves(service: TestService, tmp_path: Path) -> None:
    modes: tuple[UpdateMode, ...] = ("keep", "abort", "drain")
    with service.client(timeout_s=60.0) as client:
        start_engines(service, tmp_path, client)
        for old, mode in enumerate(modes):
            new = old + 1
            early = [long_job(number) for number in range(JOBS)]
            client.submit(early)
            until_running(client, JOBS)
            client.begin_weights(new, mode)
            assert states(client) == {"a": ("updating", old), "b": ("updating", old)}
            late = [long_job(number) for number in range(JOBS, JOBS + 2)]
            client.submit(late)
            holding = 0 if mode == "drain" else JOBS
            until(lambda n=holding: client.status().running["run"] == n + 2, "the late jobs to wait")  # type: ignore[misc]
            until(lambda n=holding: sum(one.in_flight for one in client.backends.list()) == n, "assignments")  # type: ignore[misc]
            client.update_weights(make_policy(tmp_path, new), new)
            client.end_weights(new)
            assert client.weight_version == new
            assert states(client) == {"a": ("ready", new), "b": ("ready", new)}
            done = {one.job_id: one for one in client.stream(timeout_s=60)}
            for trajectory in done.values():
                check_tokens(trajectory, tmp_path)
            spanned = (old,) if mode == "drain" else (old, new)
            assert {done[job.job_id].versions for job in early} == {spanned}
            assert {done[job.job_id].versions for job in late} == {(new,)}
            continued = [done[job.job_id].result.metrics.get("continued_turns", 0) for job in early]
            assert continued == [mode == "abort"] * JOBS


def test_two_trainers_update_two_models_beside_each_other(service: TestService, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "policy", tmp_path / "b"
    ours.mkdir(), theirs.mkdir()

    def of_b(number: int) -> Job:
        return msgspec.structs.replace(long_job(number), model="b")

    with service.client(timeout_s=60.0) as first, service.client(timeout_s=60.0) as second:
        start_engine(service, "p1", make_policy(ours, 0))
        start_engine(service, "b1", make_policy(theirs, 0, 1), 0, "--model-name", "b")
        until(lambda: len(first.backends.list()) == 2, "the engines to register")
        with pytest.raises(InvalidJob, match=r"no backend serves the model 'c' \(model\); the service has b, policy"):
            first.submit(msgspec.structs.replace(long_job(0), model="c"))
        first.submit([long_job(number) for number in range(JOBS)])
        second.submit([of_b(number) for number in range(JOBS)])
        until_running(first, 2 * JOBS)
        first.begin_weights(1)
        assert states(first) == {"p1": ("updating", 0), "b1": ("ready", 0)}
        done = list(second.stream(timeout_s=60))
        assert [(one.versions, one.result.backend) for one in done] == [((0,), "b1")] * JOBS, "generated on"
        with pytest.raises(WeightsHeld, match=f"session {first.session} .* of the model policy"):
            second.set_weight_version(9)
        with pytest.raises(NoBackend, match=r"no backend serves the model c \(there are b, policy\)"):
            second.set_weight_version(9, model="c")
        second.update_weights(make_policy(theirs, 5, 1), 5, model="b")
        assert (first.weight_version, second.weight_version) == (None, None), "those of the policy"
        with pytest.raises(WeightsHeld, match=f"session {second.session} .* of the model b"):
            first.set_weight_version(9, model="b")
        second.submit(of_b(JOBS))
        (later,) = second.stream(timeout_s=60)
        assert later.versions == (5,)
        assert states(first) == {"p1": ("updating", 0), "b1": ("ready", 5)}
        for trajectory in (*done, later):
            check_tokens(trajectory, theirs)
        first.update_weights(make_policy(ours, 1), 1)
        first.end_weights(1)
        for trajectory in first.stream(timeout_s=60):
            assert (trajectory.versions, trajectory.result.backend) == ((0, 1), "p1")
            check_tokens(trajectory, ours)
        with first.open_batch(1, 2, keep="all", max_staleness=0, max_replacements=0) as batch:
            batch.feed([long_job(0)], last=True)
            (group,) = batch
        assert [trajectory.versions for trajectory in group.trajectories] == [(1,), (1,)], "b's 5 does not make it old"
        with second.open_batch(1, 2, keep="all", max_staleness=0, max_replacements=0, model="b") as batch:
            batch.feed([long_job(0)], last=True)
            with pytest.raises(InvalidJob, match=r"is of the model 'policy', and the batch of 'b'"):
                batch.next_group()
        with second.open_batch(1, 2, keep="all", max_staleness=0, max_replacements=0, model="b") as batch:
            batch.feed([of_b(0)], last=True)
            (group,) = batch
        assert [trajectory.versions for trajectory in group.trajectories] == [(5,), (5,)]
        assert {trajectory.result.model for trajectory in group.trajectories} == {"b"}
    with service.client(timeout_s=60.0) as third:
        third.set_weight_version(6, model="b")
        third.set_weight_version(2)
        assert states(third) == {"p1": ("ready", 2), "b1": ("ready", 6)}, "closed clients hold no weights"


def test_weights_that_a_trainer_moves_itself_have_its_version_from_the_token_on(
    service: TestService, tmp_path: Path
) -> None:
    """With the asyncio client; the engines' weights are the same under both names."""
    same = make_policy(tmp_path, 0)
    (tmp_path / "policy-1.npz").symlink_to(same)

    async def main() -> list[Trajectory]:
        async with AsyncRolloutClient(service.front_door, timeout_s=60.0) as client:
            await client.submit([long_job(number) for number in range(JOBS)])
            with service.client() as looking:
                await asyncio.to_thread(until_running, looking, JOBS)
            await client.begin_weights(1, "keep")
            await client.begin_weights(1, "keep")
            with pytest.raises(UpdateInProgress, match="an update to weights 1 was begun"):
                await client.begin_weights(2)
            with pytest.raises(UpdateInProgress):
                await client.end_weights(2)
            with pytest.raises(UpdateInProgress):
                await client.set_weight_version(1)
            await client.end_weights(1)
            await client.end_weights(1)
            assert client.weight_version == 1
            await client.begin_weights(2)
            await client.cancel_weights(2)
            with pytest.raises(InvalidWeights, match="nothing"):
                await client.update_weights(tmp_path / "nothing.npz", 2)
            listed = {(one.state, one.backend.weight_version) for one in await client.backends.list()}
            assert listed == {("ready", 1)}
            return [one async for one in client.stream(timeout_s=60)]

    for name in ("a", "b"):
        start_engine(service, name, same)
    with service.client() as client:
        until(lambda: len(client.backends.list()) == 2, "the engines to register")
    for trajectory in asyncio.run(main()):
        check_tokens(trajectory, tmp_path)
        assert trajectory.versions == (0, 1)


def test_an_update_outlives_the_broker_and_an_engine_that_joins_late(service: TestService, tmp_path: Path) -> None:
    make_policy(tmp_path, 1)
    service.brokers.stop("backend")
    with BackendJournal(tmp_path / "journal") as journal:
        service.brokers.start_backend_broker(journal)
        with service.client(timeout_s=60.0) as client:
            start_engines(service, tmp_path, client)
            client.begin_weights(1)
            service.brokers.stop("backend")
            service.brokers.start_backend_broker(journal)
            assert states(client) == {"a": ("updating", 0), "b": ("updating", 0)}
            start_engine(service, "late", tmp_path / "policy-0.npz")
            until(lambda: len(states(client)) == 3, "the late engine")
            client.submit(long_job(0))
            client.end_weights(1)
            assert states(client) == {"a": ("ready", 1), "b": ("ready", 1), "late": ("behind", 0)}
            service.brokers.stop("backend")
            service.brokers.start_backend_broker(journal)
            assert states(client) == {"a": ("ready", 1), "b": ("ready", 1), "late": ("behind", 0)}
            client.update_weights(tmp_path / "policy-1.npz", 2)
            assert set(states(client).values()) == {("ready", 2)}
            (trajectory,) = client.stream(timeout_s=60)
        assert set(trajectory.versions) <= {1, 2}
        service.brokers.stop("backend")


def test_updates_that_nobody_ends_and_that_some_cannot_begin(service: TestService, tmp_path: Path) -> None:
    with service.client() as client:
        calls: list[Any] = [
            lambda: client.begin_weights(1),
            lambda: client.end_weights(1),
            lambda: client.cancel_weights(1),
            lambda: client.update_weights(tmp_path, 1),
            lambda: client.set_weight_version(1),
        ]
        for call in calls:
            with pytest.raises(NoBackend, match="no backend is registered"):
                call()
        start_engines(service, tmp_path, client)
        one = client.backends.list()[0].backend
        client.backends.add(msgspec.structs.replace(one, backend_id="gone", endpoint=f"ipc://{service.folder}/gone"))
        with pytest.raises(RequestTimeout, match="backend gone: its engine host did not answer in time"):
            client.begin_weights(1, timeout_s=1.0)
        assert set(states(client).values()) == {("ready", 0)}, "all was taken back"
        client.backends.remove("gone")
        with service.client() as trainer:
            trainer.begin_weights(1, update_limit_s=1.0)  # and then it dies
        job = msgspec.structs.replace(long_job(0), sampling=Sampling(max_tokens=10))
        client.submit(job)
        (trajectory,) = client.stream(timeout_s=60)
        assert trajectory.versions == (0,)
        assert states(client) == {"a": ("ready", 0), "b": ("ready", 0)}
        assert "an update to weights 1 did not end within 1 s" in client.backends.list()[0].problem
        with pytest.raises(UpdateNotBegun, match="no update to weights 1 was begun"):
            client.end_weights(1)
    until(lambda: service.log().count("going on with weights 0") == 2, "the engines' words")


def test_a_relative_path_begins_at_the_callers_working_directory(
    service: TestService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_engine(service, "a", make_policy(tmp_path, 0))
    with service.client() as client:
        until(lambda: client.backends.list(), "the engine to register")
        monkeypatch.chdir(tmp_path)
        client.update_weights(make_policy(tmp_path, 1).name, 1)
        assert states(client) == {"a": ("ready", 1)}


@pytest.mark.parametrize("name", ["a", "reborn"])
def test_a_host_that_is_born_again_with_old_weights_gives_no_tokens_of_these(
    service: TestService, tmp_path: Path, name: str
) -> None:
    """Under its old endpoint it got the jobs of its predecessor until that one's lease was over."""
    at = ("--bind", f"ipc://{service.folder}/engine")
    first = start_engine(service, "a", make_policy(tmp_path, 0), 0, *at)
    with service.client() as client:
        until(lambda: client.backends.list(), "the engine to register")
        weights = make_policy(tmp_path, 8)
        client.update_weights(weights, 8)
        client.submit(long_job(number) for number in range(6))
        until_running(client, 4)
        first.kill()
        first.wait()
        weights.unlink()  # or it would load them by itself
        start_engine(service, name, make_policy(tmp_path, 0), 0, *at)
        until(lambda: states(client) == {name: ("behind", 0)}, "the second life")
        client.submit(long_job(number) for number in range(6, 8))
        early = client.collect(wait_s=3.0)
        client.update_weights(make_policy(tmp_path, 8), 8)
        done = [*early, *client.stream(timeout_s=60)]
        assert [one.outcome for one in done] == ["completed"] * 8
        assert {version for one in done for version in one.versions} == {8}


def test_a_host_that_is_born_again_loads_the_weights_of_the_others_by_itself(
    service: TestService, tmp_path: Path
) -> None:
    first = start_engine(service, "a", make_policy(tmp_path, 0), 0)
    with service.client() as client:
        until(lambda: client.backends.list(), "the engine to register")
        client.update_weights(make_policy(tmp_path, 8), 8)
        first.kill()
        first.wait()
        start_engine(service, "a", make_policy(tmp_path, 0), 0)
        start_engine(service, "late", make_policy(tmp_path, 0), 0)
        until(lambda: states(client) == {"a": ("ready", 8), "late": ("ready", 8)}, "both to have the weights")
        client.submit(long_job(number) for number in range(4))
        assert {version for one in client.stream(timeout_s=60) for version in one.versions} == {8}


def test_an_engine_that_is_killed_in_an_update_is_waited_for_no_longer(service: TestService, tmp_path: Path) -> None:
    with service.client() as client, service.client() as trainer, ThreadPoolExecutor(1) as thread:
        start_engine(service, "a", make_policy(tmp_path, 0))
        killed = start_engine(service, "b", tmp_path / "policy-0.npz")
        until(lambda: len(client.backends.list()) == 2, "the engines to register")
        killed.send_signal(signal.SIGSTOP)
        update = thread.submit(trainer.update_weights, make_policy(tmp_path, 1), 1, timeout_s=600.0)
        until(lambda: states(client).get("a") == ("ready", 1), "the weights of the engine that lives")
        killed.kill()
        assert update.result(60.0).keys() == {"a"}
        assert states(client) == {"a": ("ready", 1)}
        start_engine(service, "b", tmp_path / "policy-0.npz")
        until(lambda: states(client) == {"a": ("ready", 1), "b": ("ready", 1)}, "the engine that was started again")
