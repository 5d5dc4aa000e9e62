"""Adapters as models of a whole service: each turn is of the adapter and version that its tokens name."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from support.waiting import until

from prorl_zmq.commands.exit_codes import USAGE_ERROR
from prorl_zmq.errors import (
    ConfigError,
    InvalidJob,
    InvalidWeights,
    ModelInUse,
    NoBackend,
    WeightsHeld,
)
from prorl_zmq.inference.adapters import CONFIG, WEIGHTS
from prorl_zmq.inference.tokenizer import decode
from prorl_zmq.wire.messages.backends import ListBackends
from prorl_zmq.wire.messages.base import new_id
from prorl_zmq.wire.messages.jobs import EpisodeLimits

from .conftest import scripted

if TYPE_CHECKING:
    import subprocess

    from prorl_zmq import Job, RolloutClient, Trajectory
    from prorl_zmq.wire.messages.backends import BackendList

    from .conftest import TestService

pytestmark = pytest.mark.proof
ENGINE = str(Path(__file__).with_name("adapter_engine.py"))
STEPS = 4


def adapter(folder: Path, model: str, version: int, content: str = "") -> Path:
    """Write a folder whose content names the adapter."""
    path = folder / f"{model}-{version}"
    path.mkdir()
    (path / CONFIG).write_text("{}")
    (path / WEIGHTS).write_text(content or f"{model}-{version}")
    return path


def start_engine(service: TestService, name: str) -> subprocess.Popen[bytes]:
    return service.start(ENGINE, service.backend_broker, f"ipc://{service.folder}/{name}", name, str(service.folder))


def loaded(client: RolloutClient) -> dict[str, dict[str, tuple[int, ...]]]:
    return {one.backend.backend_id: one.backend.adapters for one in client.backends.list()}


def job_of(model: str, number: int = 0, **more: str) -> Job:
    job = scripted(**{"run": "converse", **more})
    episode = EpisodeLimits(max_turns=1) if job.instance["run"] == "converse" else EpisodeLimits()
    return msgspec.structs.replace(
        job, model=model, job_id=f"{model}-{number}-{new_id()[:8]}", episode=episode, backend_wait_s=60.0
    )


def said(trajectory: Trajectory) -> list[str]:
    """Return what the policy said, turn by turn."""
    assert trajectory.outcome == "completed", trajectory.error
    words = decode(trajectory.token_ids[trajectory.loss_mask]).replace("<|im_end|>", " ").split()
    assert [int(word.rpartition("-")[2]) for word in dict.fromkeys(words)] == list(trajectory.versions)
    return words


def test_two_trainers_train_two_adapters_of_the_same_engines(service: TestService, tmp_path: Path) -> None:
    with service.client(timeout_s=60.0) as first, service.client(timeout_s=60.0) as second:
        start_engine(service, "x")
        with pytest.raises(InvalidJob, match=r"no backend serves the model 'a' \(model\); the service has policy"):
            first.submit(job_of("a"))
        until(lambda: len(first.backends.list()) == 1, "the engine")
        for step in range(1, STEPS + 1):
            for client, model, version in ((first, "a", step), (second, "b", 10 * step)):
                path = adapter(tmp_path, model, version)
                (times,) = client.update_weights(path, version, model=model).values()
                assert times.load_s > times.pause_s == 0
                shutil.rmtree(path)
                client.submit([job_of(model, number) for number in range(4)])
            for client, model, version in ((first, "a", step), (second, "b", 10 * step)):
                done = list(client.stream(timeout_s=60))
                assert [said(one) for one in done] == [[f"{model}-{version}"]] * 4
                assert {one.result.model for one in done} == {model}
        first.submit(job_of("policy"))
        (own,) = first.stream(timeout_s=60)
        assert decode(own.token_ids[own.loss_mask]).startswith("base"), "jobs of the base are the base's"
        with pytest.raises(WeightsHeld, match=f"session {first.session} .* of the model a,"):
            second.update_weights(adapter(tmp_path, "a", 99), 99, model="a")
        with second.open_batch(1, 2, keep="all", max_staleness=0, max_replacements=0, model="b") as batch:
            batch.feed([job_of("b")], last=True)
            (group,) = batch
        assert [said(one) for one in group.trajectories] == [[f"b-{10 * STEPS}"]] * 2, "a's versions do not make it old"


def test_rollouts_under_way_go_by_the_new_version_or_end_on_their_own(service: TestService, tmp_path: Path) -> None:
    with service.client(timeout_s=60.0) as client:
        for name in ("x", "y"):
            start_engine(service, name)
        until(lambda: len(client.backends.list()) == 2, "the engines")
        client.update_weights(adapter(tmp_path, "a", 1), 1, model="a")
        jobs = {}
        for name, pin in (("keep", False), ("pin", True)):
            jobs[name] = msgspec.structs.replace(job_of("a", run="two turns", mark=str(tmp_path / name)), pin=pin)
            client.submit(jobs[name])
            until((tmp_path / f"{name}.waits").exists, f"the first turn of {name}")
        for version in (2, 3):
            client.update_weights(adapter(tmp_path, "a", version), version, model="a")
        until(lambda: set(loaded(client)["x"]["a"]) == {1, 3}, "version 2 to be unloaded, and not version 1")
        (tmp_path / "keep.go").touch()
        stream = client.stream(timeout_s=60)
        kept = next(stream)
        assert said(kept) == ["a-1", "a-3"]
        assert kept.result.model == "a"
        assert {versions[-1] for one in loaded(client).values() for versions in one.values()} == {3}
        (tmp_path / "pin.go").touch()
        pinned = next(stream)
        assert said(pinned) == ["a-1", "a-1"]
        until(lambda: loaded(client) == {"x": {"a": (3,)}, "y": {"a": (3,)}}, "version 1 to be unloaded")
        copies = service.folder / "adapters"
        until(lambda: {one.read_text() for one in copies.rglob(WEIGHTS)} == {"a-3"}, "its copies to be deleted")


def test_an_engine_that_comes_late_loads_no_overwritten_folder(service: TestService, tmp_path: Path) -> None:
    with service.client(timeout_s=60.0) as client:
        start_engine(service, "x")
        until(lambda: len(client.backends.list()) == 1, "the engine")
        folder = adapter(tmp_path, "a", 1)
        client.update_weights(folder, 1, model="a")
        (folder / WEIGHTS).write_text("a-2")  # the trainer saves its next step in the same place
        start_engine(service, "y")

        def problem() -> str:
            return "".join(one.adapter_problems.get("a", "") for one in client.backends.list())

        until(lambda: "differ from those published as version 1 of a" in problem(), "the refusal")
        assert loaded(client) == {"x": {"a": (1,)}, "y": {}}
        client.submit([job_of("a", number) for number in range(4)])
        assert [said(one) for one in client.stream(timeout_s=60)] == [["a-1"]] * 4
        client.update_weights(folder, 2, model="a")
        until(lambda: loaded(client) == {"x": {"a": (2,)}, "y": {"a": (2,)}}, "the new version")


def test_a_killed_engine_brings_its_adapters_back_without_a_trainer(service: TestService, tmp_path: Path) -> None:
    with service.client(timeout_s=60.0) as client:
        engine = start_engine(service, "x")
        until(lambda: len(client.backends.list()) == 1, "the engine")
        client.update_weights(adapter(tmp_path, "a", 1), 1, model="a")
        jobs = [
            msgspec.structs.replace(job_of("a", run="two turns", mark=str(tmp_path / name)), pin=name == "pin")
            for name in ("keep", "pin")
        ]
        client.submit(jobs)
        for name in ("keep", "pin"):
            until((tmp_path / f"{name}.waits").exists, f"the first turn of {name}")
        client.update_weights(adapter(tmp_path, "a", 2), 2, model="a")
        for version in (1, 2):
            shutil.rmtree(tmp_path / f"a-{version}")
        engine.send_signal(signal.SIGKILL)
        engine.wait()
        for name in ("keep", "pin"):
            (tmp_path / f"{name}.go").touch()
        start_engine(service, "x")
        done = {one.job_id: one for one in client.stream(timeout_s=60)}
        assert [said(done[job.job_id]) for job in jobs] == [["a-1", "a-2"], ["a-1", "a-1"]]
        assert {one.result.attempt for one in done.values()} == {1}


def test_an_engine_that_comes_late_loads_the_adapter_first(service: TestService, tmp_path: Path) -> None:
    with service.client(timeout_s=60.0) as client:
        start_engine(service, "x")
        until(lambda: len(client.backends.list()) == 1, "the engine")
        client.update_weights(adapter(tmp_path, "a", 1), 1, model="a")
        start_engine(service, "y")
        until(lambda: loaded(client) == {"x": {"a": (1,)}, "y": {"a": (1,)}}, "the late engine's adapter")
        client.submit([job_of("a", number) for number in range(8)])
        done = list(client.stream(timeout_s=60))
        assert [said(one) for one in done] == [["a-1"]] * 8
        assert {one.result.backend for one in done} == {"x", "y"}


def test_an_engine_with_an_adapters_name_ends_with_the_reason(service: TestService, tmp_path: Path) -> None:
    with service.client(timeout_s=60.0) as client:
        start_engine(service, "x")
        until(lambda: len(client.backends.list()) == 1, "the engine")
        client.update_weights(adapter(tmp_path, "a", 1), 1, model="a")
        flags = ("--connect", service.backend_broker, "--name", "y", "--model-name", "a", "--run-dir")
        other = service.start("-m", "prorl_zmq.cli", "prorl-engine", *flags, str(service.folder))
        assert other.wait(60) == USAGE_ERROR
        assert "prorl-engine: a is the model of an adapter: give the backend another name, or" in service.log()
        assert loaded(client) == {"x": {"a": (1,)}}


def test_what_is_wrong_is_refused_by_name(service: TestService, tmp_path: Path) -> None:
    with service.client(timeout_s=60.0) as client:
        start_engine(service, "x")
        until(lambda: len(client.backends.list()) == 1, "the engine")
        with pytest.raises(InvalidWeights, match=r"backend x: .*a-1 is torn.*'a' is not a backend's name"):
            client.update_weights(adapter(tmp_path, "a", 1, "torn"), 1, model="a")
        with pytest.raises(InvalidJob, match=r"the model 'a' \(model\); the service has policy"):
            client.submit(job_of("a"))
        with pytest.raises(ConfigError, match="not an adapter; give the adapter another name"):
            client.update_weights(tmp_path, 2, base="policy")
        with pytest.raises(ConfigError, match="policy is a model of backends, not an adapter; `prorl backends"):
            client.remove_model("policy")
        client.update_weights(adapter(tmp_path, "a", 2), 2, model="a")
        waiting = job_of("a", run="two turns", mark=str(tmp_path / "job"))
        client.submit(waiting)
        until((tmp_path / "job.waits").exists, "the first turn")
        with pytest.raises(ModelInUse, match="1 unfinished jobs and 0 open batches use the model a"):
            client.remove_model("a")
        (tmp_path / "job.go").touch()
        (done,) = client.stream(timeout_s=60)
        assert said(done) == ["a-2", "a-2"]
        with service.client(session="another") as other, pytest.raises(WeightsHeld, match="two adapters, or"):
            other.remove_model("a")
        client.submit(job_of("a"))
        (done,) = client.stream(timeout_s=60)
        assert said(done) == ["a-2"], "a refused removal leaves the model in service"
        client.remove_model("a")
        assert loaded(client) == {"x": {}}
        listed: BackendList = client.backends.ask(ListBackends(new_id()))
        assert listed.adapters == ()
        with pytest.raises(InvalidJob, match=r"the model 'a' \(model\); the service has policy"):
            client.submit(job_of("a"))
        with pytest.raises(NoBackend, match="no adapter is published as the model a"):
            client.remove_model("a")
        client.update_weights(adapter(tmp_path, "a", 3), 3, model="a")
        client.submit(job_of("a"))
        (again,) = client.stream(timeout_s=60)
        assert said(again) == ["a-3"]
