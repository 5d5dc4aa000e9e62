"""Stage processes at work: outcomes, limits, cancellation, deaths, and what is left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest
from support.waiting import until

from prorl_zmq import Job, PhaseLimits
from prorl_zmq.errors import NoBackend

from .conftest import TestService, busy_slots, image_for, in_process, scripted
from .endless_engine import EndlessEngine

if TYPE_CHECKING:
    from prorl_zmq.testing import LocalService


def outcome_of(service: TestService | LocalService, job: Job) -> tuple[str, str]:
    """Run one job to its end; give the outcome and the error's code."""
    with service.client() as client:
        client.submit(job)
        (trajectory,) = client.stream(timeout_s=60)
    return str(trajectory.outcome), trajectory.error.code if trajectory.error is not None else ""


def test_job_passes_all_stages(shared_service: LocalService) -> None:
    with shared_service.client() as client:
        client.submit(scripted())
        (trajectory,) = client.stream(timeout_s=20)
    assert trajectory.outcome == "completed"
    assert trajectory.reward == 0.5
    assert trajectory.error is None
    assert {"init", "run", "eval", "init_queue", "run_queue", "eval_queue"} <= set(trajectory.result.timings)
    assert len(trajectory.token_ids) == 0


@pytest.mark.parametrize("phase", ["init", "run", "eval"])
@pytest.mark.parametrize(
    ("act", "expected"),
    [("raise", ("failed", "handler_failed")), ("infrastructure", ("infrastructure_error", "sandbox_failed"))],
)
def test_phase_that_raises(shared_service: LocalService, phase: str, act: str, expected: tuple[str, str]) -> None:
    assert outcome_of(shared_service, scripted(**{phase: act})) == expected


@pytest.mark.parametrize("phase", ["init", "run", "eval"])
def test_phase_over_its_limit(shared_service: LocalService, phase: str) -> None:
    limits = PhaseLimits(**{f"{phase}_s": 0.3})
    job = msgspec.structs.replace(scripted(**{phase: "sleep"}), limits=limits)
    assert outcome_of(shared_service, job) == ("timeout", "phase_timeout")


@pytest.mark.parametrize(
    ("instance", "expected"),
    [
        ({"run": "big data"}, ("failed", "sandbox_limit_exceeded")),
        ({"init": "no data"}, ("failed", "handler_failed")),
        ({"run": "odd data"}, ("failed", "handler_failed")),
        ({"eval": "nan"}, ("infrastructure_error", "grader_failed")),
        ({"eval": "text"}, ("infrastructure_error", "grader_failed")),
        ({"init": "long error"}, ("infrastructure_error", "sandbox_unavailable")),
    ],
)
def test_handler_that_gives_what_cannot_be_passed_on(
    shared_service: LocalService, instance: dict[str, str], expected: tuple[str, str]
) -> None:
    """Dropped by the broker, it would come back as a lost lease, three leases later."""
    assert outcome_of(shared_service, scripted(**instance)) == expected


@pytest.mark.proof
def test_slot_comes_back_when_closing_outlasts_the_heartbeat(service: TestService, tmp_path: Path) -> None:
    """Each report has the broker say again that the job is to stop; that must not break into the closing."""
    with service.client() as client:
        ids = client.submit(scripted(run="many files", mark=str(tmp_path / f"mark-{n}")) for n in range(2))
        until(lambda: all((tmp_path / f"mark-{n}").exists() for n in range(2)), "the files")
        until(lambda: client.status().running["run"] == 2, "RUN to start")
        client.cancel(ids)
        until(lambda: all(stage.busy == 0 for stage in client.status().stages), "the slots to be free")
        until(lambda: not list((service.folder / "sandboxes").iterdir()), "the sandboxes to be gone")


@pytest.mark.proof
def test_slot_comes_back_when_a_job_is_cancelled_while_its_sandbox_is_closed(
    service: TestService, tmp_path: Path
) -> None:
    def files() -> int:
        return sum(len(names) for _, _, names in os.walk(service.folder / "sandboxes"))

    job = msgspec.structs.replace(
        scripted(run="many files", mark=str(tmp_path / "mark")), limits=PhaseLimits(run_s=0.5)
    )
    with service.client() as client:
        client.submit(job)
        until((tmp_path / "mark").exists, "the files")
        until(lambda: files() < 12_000, "the end of RUN")
        client.cancel(job.job_id)
        until(lambda: all(stage.busy == 0 for stage in client.status().stages), "the slot to be free")
        (trajectory,) = client.stream(timeout_s=20)
    assert trajectory.outcome in ("cancelled", "timeout")


def test_no_backend_is_an_error_after_the_wait_that_the_job_allows(shared_service: LocalService) -> None:
    with shared_service.client() as client:
        client.submit(scripted(run="converse"))
        (trajectory,) = client.stream(timeout_s=20)
    assert trajectory.outcome == "infrastructure_error"
    assert trajectory.reward is None
    assert trajectory.error is not None
    assert trajectory.error.code == "no_backend"
    assert 1.0 <= float(trajectory.error.fields["waited_s"] or 0) < 5.0
    assert trajectory.result.attempt == 1


def test_no_stage_process_is_an_error_after_the_wait_that_the_job_allows(empty_service: TestService) -> None:
    empty_service.start_brokers()
    empty_service.start_stage("init")
    empty_service.wait_stages(1)
    job = msgspec.structs.replace(scripted(), stage_wait_s=0.5)
    assert outcome_of(empty_service, job) == ("infrastructure_error", "no_stage")


@pytest.mark.proof
@pytest.mark.parametrize("phase", ["init", "run", "eval"])
def test_job_survives_the_death_of_its_stage_process(service: TestService, phase: str, tmp_path: Path) -> None:
    for role in ("init", "run", "eval"):
        service.start_stage(role)
    service.wait_stages(6)
    with service.client() as client:
        client.submit(scripted(**{phase: "die once", "mark": str(tmp_path / "mark")}))
        (trajectory,) = client.stream(timeout_s=30)
        assert client.status().redelivered == 1
    assert (trajectory.outcome, trajectory.result.attempt) == ("completed", 2)


@pytest.mark.proof
def test_job_that_kills_every_stage_process_ends_as_infrastructure_error(service: TestService) -> None:
    for _ in range(3):
        service.start_stage("run", slots=1)
    service.wait_stages(6)
    assert outcome_of(service, scripted(run="die")) == ("infrastructure_error", "lease_lost")


def test_stage_process_that_is_told_to_end_gives_its_jobs_to_others(service: TestService, tmp_path: Path) -> None:
    """SIGTERM: the job goes to another process without spending an attempt, and the process ends cleanly."""
    job = msgspec.structs.replace(scripted(run="sleep", mark=str(tmp_path / "pid")), max_attempts=1)
    with service.client() as client:
        client.submit(job)
        until((tmp_path / "pid").exists, "RUN to start")
        first = int((tmp_path / "pid").read_text())
        service.start_stage("run")
        service.wait_stages(4)
        (tmp_path / "pid").unlink()
        os.kill(first, signal.SIGTERM)
        until((tmp_path / "pid").exists, "RUN to start again")
        until(lambda: _ended(service, first), "its clean end")
        assert int((tmp_path / "pid").read_text()) != first
        client.cancel(job.job_id)
        (trajectory,) = client.stream(timeout_s=20)
    assert (trajectory.outcome, trajectory.result.attempt) == ("cancelled", 2)


def _ended(service: TestService, pid: int) -> bool:
    return any(process.pid == pid and process.poll() == 0 for process in service.processes)


def test_cancellation_reaches_a_running_tool_call(sandbox_kind: str) -> None:
    """The command dies with its job, its slot is free again, and its sandbox is gone."""
    seconds = f"{600 + os.getpid()}.5"
    job = scripted(run="bash", command=f"sleep {seconds}")
    image = {"sandbox": {"image": image_for(sandbox_kind)}}
    with in_process(sandbox=sandbox_kind, slots=1, topology=image) as service, service.client() as client:
        client.submit(job)
        until(lambda: _sleepers(seconds), "the tool call to run")
        assert client.cancel(job.job_id) == {job.job_id: "cancelled"}
        until(lambda: not _sleepers(seconds), "the tool call to end")
        until(lambda: busy_slots(service) == 0, "the slot to be free")
        until(lambda: not list((service.run_dir / "sandboxes").iterdir()), "the sandbox to be gone")
        (trajectory,) = client.stream(timeout_s=20)
    assert trajectory.outcome == "cancelled"


def test_a_phase_that_is_stopped_before_it_began_frees_its_slot(empty_service: TestService) -> None:
    """Both commands arrive together; the task was cancelled before its first step, and nobody was told of its end."""
    service = empty_service
    service.start_brokers()
    stage = service.start_stage("init", slots=1)
    service.wait_stages(1)
    job = scripted()
    with service.client() as client:
        stage.send_signal(signal.SIGSTOP)
        client.submit(job)
        until(lambda: client.status().stages[0].busy == 1, "the job to be started")
        client.cancel(job.job_id)
        stage.send_signal(signal.SIGCONT)
        until(lambda: client.status().stages[0].busy == 0, "the slot to be free")
        (trajectory,) = client.stream(timeout_s=20)
    assert trajectory.outcome == "cancelled"


def test_cancellation_reaches_a_running_generation(tmp_path: Path) -> None:
    """The engine stops generating, the assignment is released, and the slot is free again."""
    mark = tmp_path / "mark"
    job = scripted(run="converse")
    with in_process(engine=EndlessEngine(mark)) as service, service.client() as client:
        client.submit(job)
        until(lambda: mark.exists() and mark.read_text() == "generating", "the generation")
        assert [status.in_flight for status in client.backends.list()] == [1]
        client.cancel(job.job_id)
        until(lambda: mark.read_text() == "aborted", "the generation to be aborted")
        until(lambda: busy_slots(service) == 0, "the slot to be free")
        until(lambda: [status.in_flight for status in client.backends.list()] == [0], "the release")
        (trajectory,) = client.stream(timeout_s=20)
    assert trajectory.outcome == "cancelled"


@pytest.mark.proof
def test_a_conversation_goes_on_with_another_backend_when_its_own_is_killed(
    service: TestService, tmp_path: Path
) -> None:
    """Its tokens are all that an engine needs, so nothing is lost, and the attempt goes on."""
    mark = tmp_path / "mark"
    engine = str(Path(__file__).with_name("endless_engine.py"))
    first = service.start(engine, service.backend_broker, f"ipc://{service.folder}/endless", str(mark))
    job = scripted(run="converse")
    with service.client() as client:
        until(client.backends.list, "the engine to register")
        client.submit(job)
        until(lambda: mark.exists() and mark.read_text() == "generating", "the generation")
        flags = ("--connect", service.backend_broker, "--name", "other", "--run-dir", str(service.folder))
        service.start("-m", "prorl_zmq.cli", "prorl-engine", *flags)
        until(lambda: len(client.backends.list()) == 2, "the other engine")
        first.kill()
        (trajectory,) = client.stream(timeout_s=40)
    assert (trajectory.outcome, trajectory.result.attempt) == ("completed", 1)
    assert trajectory.result.backend == "other"
    assert trajectory.loss_mask.any()


@pytest.mark.proof
def test_a_conversation_waits_for_its_only_backend_when_that_is_started_again(
    service: TestService, tmp_path: Path
) -> None:
    """Each of its attempts was spent at once on an engine that was not there."""
    mark = tmp_path / "mark"
    endpoint = f"ipc://{service.folder}/endless"
    engine = str(Path(__file__).with_name("endless_engine.py"))
    first = service.start(engine, service.backend_broker, endpoint, str(mark))
    job = msgspec.structs.replace(scripted(run="converse"), backend_wait_s=60.0)
    with service.client() as client:
        until(client.backends.list, "the engine to register")
        client.submit(job)
        until(lambda: mark.exists() and mark.read_text() == "generating", "the generation")
        first.kill()
        first.wait()
        until(lambda: [s.state for s in client.backends.list()] == ["probation"], "the job to miss its engine")
        flags = ("--connect", service.backend_broker, "--name", "endless", "--bind", endpoint)
        service.start("-m", "prorl_zmq.cli", "prorl-engine", *flags, "--run-dir", str(service.folder))
        (trajectory,) = client.stream(timeout_s=60)
    assert (trajectory.outcome, trajectory.result.attempt) == ("completed", 1)
    assert trajectory.result.backend == "endless"


def test_weights_that_no_backend_could_take_are_not_taken(shared_service: LocalService, tmp_path: Path) -> None:
    with shared_service.client() as client:
        with pytest.raises(NoBackend, match="no backend is registered"):
            client.update_weights(tmp_path, 1)
        with pytest.raises(NoBackend, match="no backend is registered"):
            client.set_weight_version(1)


def _sleepers(seconds: str) -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] and process.info["cmdline"][:2] == ["sleep", seconds]
    ]


def test_nothing_is_left_after_a_clean_end(service: TestService) -> None:
    with service.client() as client:
        client.submit(scripted(run="bash") for _ in range(4))
        assert {trajectory.outcome for trajectory in client.stream(timeout_s=30)} == {"completed"}
    for process in service.processes:
        process.terminate()
    assert [process.wait(15) for process in service.processes] == [0, 0, 0]
    until(lambda: not any((service.folder / "sandboxes").iterdir()), "the last servers of sandboxes to end")
