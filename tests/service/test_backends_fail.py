"""Engines that fail, hang or answer garbage: no job's attempt is lost to them while another one serves."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from support.waiting import until

from prorl_zmq.brokers.backends.backend_journal import BackendJournal
from prorl_zmq.wire.messages.backends import Backend, EngineStart, ListBackends, ReportStarts
from prorl_zmq.wire.messages.engines import WeightUpdate
from prorl_zmq.wire.messages.jobs import EpisodeLimits, PhaseLimits

from .conftest import TestService, scripted

if TYPE_CHECKING:
    from prorl_zmq import Job, RolloutClient
    from prorl_zmq.testing import LocalService
    from prorl_zmq.wire.messages.backends import BackendStatus

START_S = 60.0
MOODY = str(Path(__file__).with_name("moody_engine.py"))


class Moods:
    """Engines of a service, and how each is."""

    def __init__(self, service: TestService, folder: Path) -> None:
        self._service = service
        self._folder = folder

    def start(self, name: str, mood: str) -> None:
        self.set(name, mood)
        endpoint = f"ipc://{self._service.folder}/{name}"
        self._service.start(MOODY, self._service.backend_broker, endpoint, name, str(self._folder / name))

    def set(self, name: str, mood: str) -> None:
        # Replaced, not written: the engine may be reading it.
        (self._folder / "new").write_text(mood)
        (self._folder / "new").replace(self._folder / name)


@pytest.fixture
def moods(service: TestService, tmp_path: Path) -> Moods:
    return Moods(service, tmp_path)


def talk(generation_s: float = 60.0) -> Job:
    job = scripted(run="converse")
    return msgspec.structs.replace(job, backend_wait_s=30.0, episode=EpisodeLimits(generation_s=generation_s))


def states(client: RolloutClient) -> dict[str, str]:
    return {status.backend.backend_id: status.state for status in client.backends.list()}


def status_of(client: RolloutClient, name: str) -> BackendStatus:
    (status,) = (status for status in client.backends.list() if status.backend.backend_id == name)
    return status


@pytest.mark.proof
@pytest.mark.parametrize(
    ("mood", "problem"),
    [("garbage", "two frames"), ("hang", "no reply from")],
)
def test_a_backend_that_fails_costs_no_job_its_attempt(
    service: TestService, moods: Moods, mood: str, problem: str
) -> None:
    """It looked the least loaded, and burned one attempt after the other."""
    moods.start("bad", mood)
    moods.start("good", "well")
    with service.client() as client:
        until(lambda: states(client) == {"bad": "ready", "good": "ready"}, "the engines", START_S)
        client.submit([talk(5.0) for _ in range(20)])
        until(lambda: states(client)["bad"] == "probation", "the first failure")
        assert problem in status_of(client, "bad").problem
        done = list(client.stream(timeout_s=60))
        assert len(done) == 20
        assert {(one.outcome, one.result.attempt, one.result.backend) for one in done} == {("completed", 1, "good")}
        assert all(one.loss_mask.any() for one in done)
        assert client.status().redelivered == 0
        moods.set("bad", "well")

        def try_again() -> bool:
            client.submit(talk())
            assert [one.result.attempt for one in client.stream(timeout_s=60)] == [1]
            return states(client)["bad"] == "ready"

        until(try_again, "a trial that succeeds")


@pytest.mark.proof
def test_jobs_end_without_a_reward_where_every_engine_fails(service: TestService, moods: Moods) -> None:
    moods.start("bad", "refuse")
    with service.client() as client:
        until(lambda: states(client), "the engine", START_S)
        client.submit(msgspec.structs.replace(talk(), max_attempts=1))
        (trajectory,) = client.stream(timeout_s=60)
        assert (trajectory.outcome, trajectory.reward) == ("infrastructure_error", None)
        assert states(client) == {"bad": "ready"}, "it is the prompt that was wrong"
        moods.set("bad", "raise")
        job = msgspec.structs.replace(talk(), backend_wait_s=0.5, max_attempts=2)
        client.submit(job)
        (trajectory,) = client.stream(timeout_s=60)
        assert (trajectory.outcome, trajectory.reward) == ("infrastructure_error", None)
        assert trajectory.result.attempt == 2
        assert trajectory.error is not None
        assert (trajectory.error.code, "HTTP 500" in trajectory.error.message) == ("engine_failed", True)


@pytest.mark.proof
def test_an_engine_that_is_stuck_is_unwell_by_its_hosts_word(service: TestService, moods: Moods) -> None:
    moods.start("bad", "well")
    with service.client() as client:
        until(lambda: states(client) == {"bad": "ready"}, "the engine", START_S)
        moods.set("bad", "stuck")
        until(lambda: states(client) == {"bad": "unwell"}, "its host to notice")
        assert "did not say within" in status_of(client, "bad").problem


@pytest.mark.proof
def test_a_backend_broker_that_is_started_anew_knows_what_is_in_flight(
    service: TestService, moods: Moods, tmp_path: Path
) -> None:
    """It forgot what was added by hand and set by trainers, and took backends with jobs on them for idle ones."""
    service.brokers.stop("backend")
    with BackendJournal(tmp_path / "journal") as journal:
        service.brokers.start_backend_broker(journal)
        moods.start("slow", "hang")
        with service.client() as client:
            until(lambda: states(client) == {"slow": "ready"}, "the engine", START_S)
            client.backends.add(Backend(backend_id="mine", endpoint="ipc:///tmp/nobody"))
            client.backends.drain("mine")
            client.backends.ask(WeightUpdate("set", "set", 7, backend_id="slow"))
            client.submit([talk(8.0) for _ in range(4)])
            until(lambda: status_of(client, "slow").in_flight == 4, "jobs on the engine")
            service.brokers.stop("backend")
            service.brokers.start_backend_broker(journal)
            until(lambda: status_of(client, "slow").in_flight == 4, "it to know its jobs")
            assert states(client) == {"slow": "ready", "mine": "draining"}
            assert status_of(client, "slow").backend.weight_version == 7
            moods.set("slow", "well")
            done = list(client.stream(timeout_s=60))
            assert [(one.outcome, one.result.attempt) for one in done] == [("completed", 1)] * 4
            until(lambda: status_of(client, "slow").in_flight == 0, "the releases")
        service.brokers.stop("backend")


@pytest.mark.proof
def test_rollouts_beyond_what_an_engine_holds_wait_for_it_through_nonsense_and_a_restart(
    service: TestService, moods: Moods, tmp_path: Path
) -> None:
    """Their waits do not expire, their phases' limits stand still, and a restarted broker lets none slip in."""
    holds_two = json.dumps({"capacity_tokens": 4096, "used": 0.0, "preempted": 0, "waiting": 0})
    (tmp_path / "small.kv").write_text(holds_two)
    service.brokers.stop("backend")
    with BackendJournal(tmp_path / "journal") as journal:
        service.brokers.start_backend_broker(journal)
        moods.start("small", "well")
        with service.client() as client:
            until(lambda: states(client) == {"small": "ready"}, "the engine", START_S)
            job = scripted(run="two turns", mark=str(tmp_path / "turn"))
            client.submit([msgspec.structs.replace(job, job_id=f"first-{number}") for number in range(2)])

            def counts() -> tuple[int, int]:
                listed = client.backends.ask(ListBackends("list"))
                in_flight = sum(status.in_flight for status in listed.backends)
                assert in_flight <= 2
                return in_flight, listed.waiting

            until(lambda: counts() == (2, 0), "two rollouts")
            job = msgspec.structs.replace(job, limits=PhaseLimits(run_s=2.0), backend_wait_s=0.3)
            client.submit([msgspec.structs.replace(job, job_id=f"late-{number}") for number in range(3)])
            until(lambda: counts() == (2, 3), "three that wait")
            (tmp_path / "small.kv").write_text(holds_two.replace("0.0", "NaN"))
            service.brokers.stop("backend")
            service.brokers.start_backend_broker(journal)
            until(lambda: counts() == (2, 3), "the same in the next broker")
            (tmp_path / "small.kv").write_text("{}")
            (tmp_path / "turn.go").touch()
            done = list(client.stream(timeout_s=60))
            assert [(one.outcome, one.result.attempt) for one in done] == [("completed", 1)] * 5
            load = status_of(client, "small").load
            assert load is not None
            assert load.kv_tokens == 4096
        service.brokers.stop("backend")


def test_what_a_backend_takes_to_start_is_no_time_of_a_jobs_run(local_service: LocalService) -> None:
    job = msgspec.structs.replace(scripted(run="converse"), limits=PhaseLimits(run_s=1.0), backend_wait_s=0.3)
    with local_service.client() as client:
        client.backends.ask(ReportStarts("r", "supervisor", (EngineStart("engine-0", "starting"),)))
        client.submit(job)
        time.sleep(2.0)
        assert client.status().running["run"] == 1
        client.backends.ask(ReportStarts("r", "supervisor", (EngineStart("engine-0", "failed", "no memory"),)))
        (trajectory,) = client.stream(timeout_s=60)
    assert trajectory.error is not None
    assert trajectory.error.code == "no_backend"
    assert "engine engine-0 failed to start: no memory" in trajectory.error.message
