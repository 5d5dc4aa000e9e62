"""What the journal and the leases are for: processes killed and stopped at work, and nothing lost by it."""

from __future__ import annotations

import itertools
import os
import random
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from support.waiting import until

from prorl_zmq.brokers.journal.journal_summary import read_summary
from prorl_zmq.config import RolloutBrokerSettings

from .conftest import TestService, scripted

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from prorl_zmq import Group, Job, RolloutClient, Trajectory

pytestmark = pytest.mark.proof

SETTINGS = RolloutBrokerSettings(heartbeat_s=0.2, lease_s=3.0)
WAIT_S = 60.0
KILLED_FOR_S = 30.0
KINDS = (
    (2, "running", "all"),
    (4, "finished", "informative"),
    (3, "running", "informative"),
    (8, "running", "informative"),
    (2, "nothing", "all"),
    (4, "running", "informative"),
)
"""Group size, what is carried over, and what is kept."""


class KillableService(TestService):
    """The rollout broker is a process of its own, with its journal on disk."""

    __test__ = False

    def __init__(self, folder: Path, settings: RolloutBrokerSettings) -> None:
        super().__init__(folder, settings)
        self.extra: list[subprocess.Popen[bytes]] = []
        """Processes of one test."""

    def start_rollout_broker(self) -> None:
        config = self.folder / "topology.toml"
        config.write_text("[rollout_broker]\nheartbeat_s = 0.2\nlease_s = 3.0\n")
        flags = ("--config", str(config), "--run-dir", str(self.folder))
        self.broker = self.start("-m", "prorl_zmq.cli", "prorl", "broker", "rollout", *flags)

    def kill_rollout_broker(self) -> None:
        self.broker.kill()
        self.broker.wait(10)

    def start_another(self, role: str) -> subprocess.Popen[bytes]:
        self.extra.append(self.start_stage(role))
        self.wait_stages(4)
        return self.extra[-1]


@pytest.fixture(scope="module")
def living_service() -> Iterator[KillableService]:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        service = KillableService(Path(folder), SETTINGS)
        try:
            service.brokers.start_backend_broker()
            service.start_rollout_broker()
            service.start_stages()
            yield service
        finally:
            service.close()


@pytest.fixture
def service(living_service: KillableService) -> Iterator[KillableService]:
    """One service for all tests of this file: each leaves it with one stage process per role."""
    yield living_service
    for process in living_service.extra:
        process.kill()
        process.wait(10)
    living_service.extra.clear()
    living_service.wait_stages(3)


def waiting_jobs(folder: Path, phase: str, count: int) -> list[Job]:
    """Jobs whose phase waits until `let_go`."""
    return [scripted(**{phase: "wait", "mark": str(folder / f"mark-{number}")}) for number in range(count)]


def marks(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("mark-*") if not path.suffix)


def let_go(folder: Path, count: int) -> None:
    for number in range(count):
        (folder / f"mark-{number}.go").touch()


def collect_all(client: RolloutClient, job_ids: list[str]) -> dict[str, Trajectory]:
    """Collect everything; each job must come exactly once."""
    trajectories = list(client.stream(timeout_s=WAIT_S))
    assert sorted(trajectory.job_id for trajectory in trajectories) == sorted(job_ids)
    return {trajectory.job_id: trajectory for trajectory in trajectories}


@pytest.mark.parametrize("phase", ["init", "run", "eval"])
def test_work_on_live_stage_processes_goes_on_when_the_broker_is_killed(
    service: KillableService, phase: str, tmp_path: Path
) -> None:
    with service.client() as client:
        ids = client.submit(waiting_jobs(tmp_path, phase, 4))
        until(lambda: len(marks(tmp_path)) == 4, "the phases to start", WAIT_S)
        service.kill_rollout_broker()
        for path in marks(tmp_path):
            path.unlink()
        service.start_rollout_broker()
        until(lambda: sum(stage.busy for stage in client.status(timeout_s=WAIT_S).stages) == 4, "the leases", WAIT_S)
        let_go(tmp_path, 4)
        ended = collect_all(client, ids)
        assert client.status().redelivered == 0
    assert {(one.outcome, one.result.attempt) for one in ended.values()} == {("completed", 1)}
    assert marks(tmp_path) == []  # nothing was started a second time


@pytest.mark.parametrize("phase", ["init", "run", "eval"])
def test_the_end_of_a_phase_survives_a_broker_that_dies_before_it_is_written_down(
    service: KillableService, phase: str, tmp_path: Path
) -> None:
    """The stopped broker's socket takes the event; the killed one has lost it."""
    with service.client() as client:
        ids = client.submit(waiting_jobs(tmp_path, phase, 2))
        until(lambda: len(marks(tmp_path)) == 2, "the phases to start", WAIT_S)
        service.broker.send_signal(signal.SIGSTOP)
        let_go(tmp_path, 2)
        for path in marks(tmp_path):
            path.unlink()
        until(lambda: len(list(tmp_path.glob("*.ended"))) == 2, "the phases to end", WAIT_S)
        service.kill_rollout_broker()
        service.start_rollout_broker()
        ended = collect_all(client, ids)
        assert client.status().redelivered == 0
    assert {(one.outcome, one.result.attempt) for one in ended.values()} == {("completed", 1)}
    assert marks(tmp_path) == []


def test_results_and_queued_jobs_survive(service: KillableService, tmp_path: Path) -> None:
    with service.client() as client:
        done = client.submit(scripted() for _ in range(5))
        until(lambda: client.status().uncollected == 5, "five results", WAIT_S)
        queued = client.submit(waiting_jobs(tmp_path, "run", 12))  # of which 8 have a slot
        until(lambda: client.status().running["run"] == 8, "RUN to be full", WAIT_S)
        service.kill_rollout_broker()
        service.start_rollout_broker()
        status = client.status(timeout_s=WAIT_S)
        assert status.uncollected == 5
        assert sum(status.queued.values()) + sum(status.running.values()) == 12
        let_go(tmp_path, 12)
        ended = collect_all(client, [*done, *queued])
    assert {one.outcome for one in ended.values()} == {"completed"}
    until(lambda: read_summary(service.folder / "rollout.journal").results == 0, "the acknowledgements")
    assert read_summary(service.folder / "rollout.journal").jobs == 0


def test_every_job_comes_once_however_often_the_broker_is_killed(service: KillableService) -> None:
    with service.client(timeout_s=WAIT_S) as client:
        ids: list[str] = []
        got: list[Trajectory] = []
        for _ in range(4):
            ids += client.submit(scripted() for _ in range(40))
            got += client.collect(7, wait_s=0.2)
            service.kill_rollout_broker()
            service.start_rollout_broker()
        got += client.stream(timeout_s=WAIT_S)
    assert sorted(one.job_id for one in got) == sorted(ids)
    assert {one.outcome for one in got} == {"completed"}


def test_broker_and_stage_process_killed_together(service: KillableService, tmp_path: Path) -> None:
    """What the dead one held is done again under the next attempt; the others go on."""
    victim = service.start_another("run")
    with service.client() as client:
        ids = client.submit(waiting_jobs(tmp_path, "run", 4))
        until(lambda: len(marks(tmp_path)) == 4 and all(path.read_text() for path in marks(tmp_path)), "RUN", WAIT_S)
        its = {index for index, path in enumerate(marks(tmp_path)) if path.read_text() == str(victim.pid)}
        assert 0 < len(its) < 4
        service.kill_rollout_broker()
        victim.kill()
        service.start_rollout_broker()
        let_go(tmp_path, 4)
        ended = collect_all(client, ids)
        assert client.status().redelivered == len(its)
    attempts = [ended[job_id].result.attempt for job_id in ids]
    assert attempts == [2 if index in its else 1 for index in range(4)]
    assert {one.outcome for one in ended.values()} == {"completed"}


def test_stage_process_that_comes_back_late_changes_nothing(service: KillableService, tmp_path: Path) -> None:
    """Stopped beyond its lease, it ends its phase after the next attempt has begun elsewhere."""
    with service.client() as client:
        (job_id,) = client.submit(waiting_jobs(tmp_path, "run", 1))
        mark = tmp_path / "mark-0"
        until(lambda: mark.exists() and mark.read_text(), "RUN", WAIT_S)
        late = int(mark.read_text())
        mark.unlink()
        service.start_another("run")
        os.kill(late, signal.SIGSTOP)
        try:
            until(lambda: mark.exists() and mark.read_text(), "the next attempt", WAIT_S)
            assert int(mark.read_text()) != late
            service.kill_rollout_broker()  # and the fence holds in the next broker too
            service.start_rollout_broker()
            client.status(timeout_s=WAIT_S)
        finally:
            os.kill(late, signal.SIGCONT)
        until(lambda: len(client.status().stages) == 4, "the late one to report", WAIT_S)
        until(lambda: sum(stage.busy for stage in client.status().stages) == 1, "the late one to stop", WAIT_S)
        let_go(tmp_path, 1)
        ended = collect_all(client, [job_id])
    assert (ended[job_id].outcome, ended[job_id].result.attempt) == ("completed", 2)


def test_slow_phase_is_not_lost(service: KillableService, tmp_path: Path) -> None:
    """Longer than several leases, but its process reports."""
    with service.client() as client:
        ids = client.submit(waiting_jobs(tmp_path, "run", 1))
        assert client.collect(1, wait_s=2 * SETTINGS.lease_s) == []
        let_go(tmp_path, 1)
        (one,) = collect_all(client, ids).values()
    assert (one.outcome, one.result.attempt) == ("completed", 1)


def test_second_broker_on_one_journal_is_refused(service: KillableService) -> None:
    config = service.folder / "other.toml"
    config.write_text('[rollout_broker]\nfront_door = "ipc://{run_dir}/d2"\nstage_events = "ipc://{run_dir}/e2"\n')
    flags = ("--config", str(config), "--run-dir", str(service.folder))
    second = service.start("-m", "prorl_zmq.cli", "prorl", "broker", "rollout", *flags)
    assert second.wait(WAIT_S) == 1
    assert "rollout.journal is in use by another process" in service.log()


def test_a_batch_goes_on_when_the_broker_is_killed(service: KillableService, tmp_path: Path) -> None:
    mark = str(tmp_path / "mark-0")
    with service.client() as client, client.open_batch(2, 2, lease_s=WAIT_S) as batch:
        batch.feed([scripted(eval="alternate"), scripted(run="second waits", eval="alternate", mark=mark)])
        first = batch.next_group(WAIT_S)
        assert first is not None
        until(Path(f"{mark}.waits").exists, "the fourth rollout", WAIT_S)
        until(lambda: client.status().batches[0].in_flight == 1, "the third to end", WAIT_S)
        before = service.broker.pid
        service.kill_rollout_broker()
        service.start_rollout_broker()
        assert service.broker.pid != before
        until(lambda: client.status(timeout_s=WAIT_S).batches[0].in_flight == 1, "the third to end", WAIT_S)
        (status,) = client.status(timeout_s=WAIT_S).batches
        assert (status.kept, status.under_way) == (1, 1)
        let_go(tmp_path, 1)
        second = batch.next_group(WAIT_S)
        assert second is not None, (batch.state, batch.report)
        assert second.group_id != first.group_id
        assert sorted(second.rewards) == [0.0, 1.0]
        assert batch.next_group(WAIT_S) is None
        assert batch.state == "met"
        assert batch.report is not None
        assert (batch.report.launched, batch.report.failed) == (4, 0)
    assert read_summary(service.folder / "rollout.journal").jobs == 0


def test_a_close_that_was_done_is_answered_by_the_next_broker(service: KillableService) -> None:
    with service.client() as client:
        batch = client.open_batch(1, 2)
        request = batch._progress.close_request()
        until_s = time.monotonic() + WAIT_S
        first = client._service.ask_frames(request, until_s)[0]
        service.kill_rollout_broker()
        service.start_rollout_broker()
        second = client._service.ask_frames(request, until_s)[0]
    assert bytes(first) == bytes(second)


@pytest.mark.timeout(300)
def test_every_group_is_whole_and_new_however_often_the_broker_is_killed(service: KillableService) -> None:
    """Batches of all kinds, one after the other, while the broker is killed every second or two."""
    chance = random.Random(5)
    over = threading.Event()

    def prompts(batch: int) -> Iterator[Job]:
        return (
            msgspec.structs.replace(scripted(eval="alternate"), job_id=f"prompt-{batch}-{n}") for n in itertools.count()
        )

    def train(client: RolloutClient) -> list[Group]:
        groups: list[Group] = []
        for number in itertools.count():
            size, carry, keep = KINDS[number % len(KINDS)]
            with client.open_batch(3, size, carry=carry, keep=keep, lease_s=WAIT_S) as batch:
                batch.feed(prompts(number))
                new = list(batch)
                assert (batch.state, [len(group) for group in new]) == ("met", [size] * 3), (number, batch.report)
            groups += new
            if over.is_set():
                break
        return groups

    kills = 0
    # The broker dies with the thread that starts it, so that is this one.
    with service.client(timeout_s=WAIT_S) as client, ThreadPoolExecutor(1) as pool:
        training = pool.submit(train, client)
        until_s = time.monotonic() + KILLED_FOR_S
        while time.monotonic() < until_s and not training.done():
            time.sleep(chance.uniform(0.3, 2.5))
            service.kill_rollout_broker()
            service.start_rollout_broker()
            kills += 1
        over.set()
        groups = training.result()
        client.open_batch(1, 2, lease_s=1.0).close()  # so that what is carried on is soon nobody's
    until(lambda: read_summary(service.folder / "rollout.journal").jobs == 0, "the session to be forgotten", WAIT_S)
    assert kills > 5
    assert len(groups) > 3 * len(KINDS)
    jobs = [trajectory.job_id for group in groups for trajectory in group.trajectories]
    assert len(set(jobs)) == len(jobs), "a rollout came twice"
    assert len({group.group_id for group in groups}) == len(groups)
    assert len({group.prompt_id for group in groups}) == len(groups), "a prompt was used twice"
