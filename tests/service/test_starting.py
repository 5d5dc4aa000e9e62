"""Engines of `prorl serve` that load for long, fail, or cannot be started: what jobs and people see of it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from support.services import Service
from support.waiting import until
from vllm_python import environment, tiny_models, vllm_python
from vllm_server import ON_CPU, SMALL

from prorl_zmq import Job, RolloutClient

from .test_serve import MATH, TOPOLOGY

if TYPE_CHECKING:
    from collections.abc import Iterator

REASON = "cannot allocate 30 GiB for the KV cache; decrease --gpu-memory-utilization"
# An interpreter for engine hosts that ends as one whose engine cannot start, or takes long to be the real one.
INTERPRETER = """#!/bin/sh
case "$*" in *"import prorl_zmq.cli"*) exit 0 ;; esac
echo start >> {folder}/starts
if [ $(wc -l < {folder}/starts) -le {failures} ]; then
    echo "a frame of a traceback"
    echo "prorl-engine: cannot start: {reason}"
    echo "and what is said while it ends"
    exit 3
fi >&2
sleep {loading_s}
exec {python} "$@"
"""


@contextmanager
def serving(failures: int = 0, loading_s: float = 0.0) -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as name:
        folder = Path(name)
        interpreter = folder / "interpreter"
        interpreter.write_text(
            INTERPRETER.format(
                folder=folder, failures=failures, reason=REASON, loading_s=loading_s, python=sys.executable
            )
        )
        interpreter.chmod(0o700)
        served = Service(folder, f'{TOPOLOGY}[backends]\npython = "{interpreter}"\n')
        try:
            yield served
        finally:
            served.close()


def starts(served: Service) -> int:
    return len((served.folder / "starts").read_text().splitlines())


def shown(served: Service, *command: str) -> str:
    return " ".join(served.run(*command).stdout.split())


def impatient(count: int) -> list[Job]:
    return [msgspec.convert({**MATH, "backend_wait_s": 1.0}, Job) for _ in range(count)]


@pytest.mark.proof
def test_jobs_wait_for_an_engine_that_loads_for_longer_than_they_would_wait() -> None:
    """All ended as `no_backend` while the service's own engine was loading."""
    with serving(loading_s=8.0) as served:
        served.wait_line("waiting for engine-0")
        with RolloutClient(served.front_door) as client:
            client.submit(impatient(3))
            listed = served.run("backends", "list").stdout
            assert "starting" in listed
            assert [(one.outcome, one.error) for one in client.stream(timeout_s=60)] == [("completed", None)] * 3
            assert "starting" not in served.run("backends", "list").stdout


@pytest.mark.proof
def test_an_engine_that_never_starts_is_given_up_and_everybody_learns_why() -> None:
    """It was started for ever, and nothing but its own log said why it failed."""
    with serving(failures=100) as served:
        served.wait_ready()
        assert starts(served) == 3
        assert "a frame of a traceback" in served.log
        (failed,) = [line for line in served.lines if "engine-0 failed" in line]
        assert REASON in failed
        assert "started 3 times" in failed
        (left,) = [line for line in served.lines if "no inference backend is left" in line]
        assert "restart `prorl serve`" in left
        for command in (["status"], ["backends", "list"]):
            until(lambda command=command: "engine-0 │ failed" in shown(served, *command), "the report to arrive")
            assert REASON in shown(served, *command)
        with RolloutClient(served.front_door) as client:
            client.submit([msgspec.structs.replace(job, max_attempts=1) for job in impatient(2)])
            for trajectory in client.stream(timeout_s=60):
                assert trajectory.outcome != "completed"
                assert trajectory.error is not None
                assert trajectory.error.code == "no_backend"
                assert REASON in trajectory.error.message
        assert starts(served) == 3


@pytest.mark.proof
def test_an_engine_that_fails_twice_and_then_works_serves() -> None:
    with serving(failures=2) as served:
        served.wait_line("restarting it in")
        with RolloutClient(served.front_door) as client:
            client.submit(impatient(3))
            assert [(one.outcome, one.error) for one in client.stream(timeout_s=60)] == [("completed", None)] * 3
        assert starts(served) == 3
        served.wait_ready()
        assert not any("engine-0 failed" in line for line in served.lines)
        assert REASON not in served.run("status").stdout
        # Once ready it is restarted as before, and its starts are counted from there.
        os.kill(served.child("engine-0.engine.json"), signal.SIGKILL)
        until(lambda: starts(served) == 4, "a restart")


def test_a_port_that_is_taken_ends_the_service_before_it_is_ready() -> None:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder, socket.create_server(("127.0.0.1", 0)) as other:
        bind = f"127.0.0.1:{other.getsockname()[1]}"
        served = Service(Path(folder), f'{TOPOLOGY}[dashboard]\nbind = "{bind}"\n')
        try:
            assert served.wait() == 2
            served.wait_line("dashboard cannot work with its settings")
        finally:
            served.close()
        assert any(f"{bind} is in use" in line for line in served.lines)
        assert "prorl serve: ready at" not in served.log


@pytest.mark.proof
def test_a_child_that_cannot_be_started_is_retried() -> None:
    """An `OSError` on the way to the new process ended the care for that child, and nobody noticed."""
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        logs = Path(folder) / "logs"
        served = Service(Path(folder), TOPOLOGY, "--log-dir", str(logs))
        try:
            served.wait_ready()
            with RolloutClient(served.front_door) as client:
                (before,) = [one.stage_id for one in client.status().stages if one.role == "run"]
                (logs / "run-0.log").unlink()
                (logs / "run-0.log").mkdir()
                os.kill(served.child("stage_run.json"), signal.SIGKILL)
                served.wait_line("run-0 could not be started: [Errno 21] Is a directory")
                shutil.rmtree(logs / "run-0.log")
                until(
                    lambda: any(one.role == "run" and one.stage_id != before for one in client.status().stages),
                    "another RUN process",
                )
        finally:
            served.close()


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_real_vllm_with_too_little_memory_is_given_up_with_its_own_words(tmp_path: Path) -> None:
    """It was started every 45 s for ever."""
    (model,) = tiny_models(tmp_path, 1)
    little = [flag if flag != "67108864" else "16384" for flag in SMALL]
    backend = f'[[backends]]\nkind = "vllm"\nmodel = "{model}"\npython = "{vllm_python()}"\narguments = {little}\n'
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        logs = tmp_path / "logs"
        served = Service(
            Path(folder), TOPOLOGY + backend, "--log-dir", str(logs), **{**environment(tmp_path), **ON_CPU}
        )
        try:
            served.wait_line("no inference backend is left", 500.0)
            (failed,) = [line for line in served.lines if "engine-0 failed" in line]
            assert "No available memory for the cache blocks" in failed
            assert str(logs / "engine-0.log") in failed
            assert "File " not in failed, "the root cause, without the frames above it"
            served.wait_ready()
            until(lambda: "engine-0 │ failed" in shown(served, "backends", "list"), "the report to arrive")
            assert "No available memory for the cache blocks" in shown(served, "backends", "list")
        finally:
            served.close()
