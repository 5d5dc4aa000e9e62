"""`prorl submit` with more jobs than fit, and interrupted."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest
from support import forks
from support.commands import prorl
from support.waiting import WAIT_S, until

from prorl_zmq import AsyncRolloutClient, Job
from prorl_zmq.client.submission import Submission
from prorl_zmq.errors import Busy
from prorl_zmq.system.stopping import TWICE_S

from .conftest import in_process, scripted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from prorl_zmq.testing import LocalService

    from .conftest import TestService

SUBMIT = ("-m", "prorl_zmq.cli", "prorl", "submit")
PATIENCE = """
import sys
from prorl_zmq.commands import app, jobs
jobs.END_S = 600.0
sys.exit(app.run("prorl", ["submit", *sys.argv[1:]]))
"""
pytestmark = pytest.mark.xdist_group("tight service")
HELD = 10
"""Jobs that a session may have in the service."""


@pytest.fixture(scope="module")
def tight() -> Iterator[LocalService]:
    """A service that takes few jobs."""
    with in_process(topology={"rollout_broker": {"max_jobs": 2 * HELD, "max_session_share": 0.5}}) as service:
        yield service


@pytest.fixture
def patient(tmp_path: Path) -> Path:
    """A program that submits, and waits for long for what it has cancelled."""
    program = tmp_path / "patient.py"
    program.write_text(PATIENCE)
    return program


def task_file(path: Path, jobs: list[Job]) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(job) + b"\n" for job in jobs))
    return path


def submitted(service: LocalService, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Submit until all has ended."""
    return prorl("submit", *arguments, "--connect", service.front_door)


@contextmanager
def submitting(
    service: LocalService, *arguments: object, program: Sequence[object] = SUBMIT
) -> Iterator[subprocess.Popen[str]]:
    """A process that submits, to be interrupted."""
    words = [str(word) for word in (*program, *arguments, "--connect", service.front_door)]
    process = forks.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def held(service: LocalService) -> int:
    """Jobs and results that the service has."""
    with service.client() as client:
        status = client.status()
    return sum(status.queued.values()) + sum(status.running.values()) + status.uncollected


def under_way(service: LocalService) -> int:
    """Jobs that the service has, without results that are not acknowledged yet."""
    with service.client() as client:
        status = client.status()
    return sum(status.queued.values()) + sum(status.running.values())


def outcomes(out: Path) -> list[str]:
    return sorted(json.loads(line)["outcome"] for line in (out / "results.jsonl").read_text().splitlines())


def test_a_file_of_more_jobs_than_the_session_may_hold_goes_through(tight: LocalService, tmp_path: Path) -> None:
    tasks = task_file(tmp_path / "tasks.jsonl", [scripted() for _ in range(3 * HELD + 1)])
    done = submitted(tight, tasks, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "31" in done.stdout
    assert outcomes(tmp_path) == ["completed"] * (3 * HELD + 1)
    assert held(tight) == 0


def test_results_of_an_earlier_submission_are_put_aside(tight: LocalService, tmp_path: Path) -> None:
    """They were written over."""
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "out"
    for jobs in (2, 1, 1):
        done = submitted(tight, task_file(tasks, [scripted() for _ in range(jobs)]), "--out", out)
        assert done.returncode == 0, done.stderr
        assert outcomes(out) == ["completed"] * jobs
    assert f"prorl submit: the results that {out} had are in {out / 'earlier' / '2'}\n" in done.stderr
    for place, jobs in ((out / "earlier" / "1", 2), (out / "earlier" / "2", 1), (out, 1)):
        assert outcomes(place) == ["completed"] * jobs
        assert (place / "traces.jsonl").read_text().count('"outcome":"completed"') == jobs
        assert len(list((place / "arrays").iterdir())) == jobs


def test_ctrl_c_cancels_collects_and_sums_up(tight: LocalService, patient: Path, tmp_path: Path) -> None:
    """It left the cancelled results in the service, under a name that nobody knew."""
    jobs = [*(scripted() for _ in range(4)), *(scripted(run="sleep") for _ in range(2 * HELD))]
    tasks = task_file(tmp_path / "tasks.jsonl", jobs)
    results = tmp_path / "results.jsonl"
    with submitting(tight, tasks, "--out", tmp_path, program=[patient]) as process:
        until(lambda: results.exists() and results.read_text().count("\n") == 4, "the four that end")
        until(lambda: under_way(tight) == HELD, "the session to be full")
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, stderr
    assert outcomes(tmp_path) == ["cancelled"] * HELD + ["completed"] * 4
    assert "cancelled" in stdout
    assert stderr.splitlines()[-1] == f"prorl submit: {HELD} cancelled, 4 completed, {HELD} not submitted"
    assert held(tight) == 0


def test_a_refused_job_in_the_middle_leaves_nothing_behind(tight: LocalService, tmp_path: Path) -> None:
    """What had been accepted before it went on running."""
    wrong = Job(task="no-such-task", instance={})
    tasks = task_file(tmp_path / "tasks.jsonl", [*(scripted(run="sleep") for _ in range(HELD)), wrong])
    done = submitted(tight, tasks)
    assert done.returncode == 2
    assert "no-such-task" in done.stderr.splitlines()[-1]
    assert held(tight) == 0


def test_a_refused_submission_leaves_no_empty_folder(tight: LocalService, tmp_path: Path) -> None:
    tasks = task_file(tmp_path / "tasks.jsonl", [Job(task="no-such-task", instance={})])
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "notes").write_text("mine")
    for out in (tmp_path / "new" / "out", tmp_path / "own" / "out", tmp_path / "own"):
        assert submitted(tight, tasks, "--out", out).returncode == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own", "tasks.jsonl"]
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == ["notes", "results.jsonl", "traces.jsonl"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"task": "scripted", "instance": {"prompt": "1 + 1?"}}, "unknown field `prompt`; its fields are "),
        ({"task": "chess", "instance": {}}, "no stage process serves task 'chess'"),
        ({"task": "scripted", "instance": {}, "harness": "nope"}, "no harness 'nope'; the service has "),
    ],
)
def test_a_refused_job_is_named_by_its_line_in_the_file(
    tight: LocalService, tmp_path: Path, wrong: dict[str, object], said: str
) -> None:
    tasks = task_file(tmp_path / "tasks.jsonl", [scripted()])
    tasks.write_bytes(tasks.read_bytes() + b"\n" + msgspec.json.encode(wrong) + b"\n")
    done = submitted(tight, tasks)
    assert done.returncode == 2
    message = " ".join(done.stderr.split())
    assert "tasks.jsonl, line 3: " in message
    assert said in message


def test_a_service_that_takes_nothing_is_given_up_with_its_reason(empty_service: TestService) -> None:
    empty_service.start_brokers()

    async def main() -> None:
        async with AsyncRolloutClient(empty_service.front_door, timeout_s=1.0) as client:
            submission = Submission(client, [scripted() for _ in range(3)], lambda _: None)
            with pytest.raises(Busy, match="no stage process has reported yet"):
                await submission.run()
            assert (submission.unsent, submission.waiting) == (3, 0)

    asyncio.run(main())


def test_what_a_session_left_is_collected_by_its_name(tight: LocalService, tmp_path: Path) -> None:
    with tight.client(session="mine") as client:
        client.submit(scripted() for _ in range(3))
    out = tmp_path / "out"
    for _ in range(2):  # the second time there is nothing, and what the first has written stays
        done = submitted(tight, "--session", "mine", "--out", out)
        assert done.returncode == 0, done.stderr
        assert outcomes(out) == ["completed"] * 3
    assert "completed" not in done.stdout
    assert held(tight) == 0


def test_results_that_do_not_come_in_time_are_named_with_their_session(
    local_service: LocalService, tmp_path: Path
) -> None:
    """With the broker stopped there is nobody who could give them."""
    mark = tmp_path / "mark"
    tasks = task_file(tmp_path / "tasks.jsonl", [scripted(run="sleep", mark=str(mark))])
    with submitting(local_service, str(tasks), "--session", "mine") as process:
        until(mark.exists, "the job to run")
        local_service.brokers.stop("rollout")
        assert process.stderr is not None
        said = next(line for line in process.stderr if "no reply from" in line)
        assert f"no reply from {local_service.front_door} yet; waiting for up to" in said
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert "1 not collected: `prorl submit --session mine` collects them" in stderr.splitlines()[-1]


@pytest.mark.proof
def test_a_second_ctrl_c_does_not_wait(local_service: LocalService, patient: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    tasks = task_file(tmp_path / "tasks.jsonl", [scripted(run="sleep", mark=str(mark))])
    with submitting(local_service, tasks, program=[patient]) as process:
        until(mark.exists, "the job to run")
        local_service.brokers.stop("rollout")
        for pause_s in (0.0, 2 * TWICE_S):
            threading.Event().wait(pause_s)
            process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)  # the client would wait for 30 s
    assert process.returncode == 130
    assert "1 not collected" in stderr.splitlines()[-1]
