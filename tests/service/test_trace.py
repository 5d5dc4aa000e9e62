"""The trace of one job through a real service: what `prorl job` shows while it runs, when it ended, when it is gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING

import msgspec
import pytest
from support.commands import prorl
from support.waiting import until

from prorl_zmq import AsyncRolloutClient
from prorl_zmq.errors import UnknownJob

from .conftest import in_process, scripted
from .endless_engine import EndlessEngine

if TYPE_CHECKING:
    from pathlib import Path
    from subprocess import CompletedProcess

    from prorl_zmq import RolloutClient
    from prorl_zmq.testing import LocalService
    from prorl_zmq.wire.messages.front_door import JobTrace

    from .conftest import TestService


def prorl_job(service: TestService | LocalService, *arguments: str) -> CompletedProcess[str]:
    return prorl("job", *arguments, "--connect", service.front_door)


def states(trace: JobTrace) -> list[tuple[str, str, int, str]]:
    return [(str(span.phase), span.place, span.attempt, span.error.code if span.error else "") for span in trace.spans]


def started(client: RolloutClient, mark: Path, *, again_after: int = 0) -> int:
    """Wait until RUN has begun in a process other than the one before; give its pid."""
    until(lambda: mark.exists() and mark.read_text() not in ("", str(again_after)), "RUN to begin", wait_s=40.0)
    return int(mark.read_text())


@pytest.mark.proof
def test_the_trace_of_a_job_whose_stage_process_is_killed_in_the_middle_of_run(
    service: TestService, tmp_path: Path
) -> None:
    service.start_stage("run")
    service.wait_stages(4)
    mark = tmp_path / "mark"
    with service.client() as client:
        (job_id,) = client.submit(scripted(run="sleep", mark=str(mark)))
        first = started(client, mark)
        os.kill(first, signal.SIGKILL)
        started(client, mark, again_after=first)
        until(lambda: len(client.trace(job_id).spans) == 8, "the second RUN in the trace")
        trace = client.trace(job_id[:12])
        lost = [
            *(("init", "queued", 1, ""), ("init", "held", 1, ""), ("run", "queued", 1, "")),
            *(("run", "held", 1, "lease_lost"), ("init", "queued", 2, ""), ("init", "held", 2, "")),
            *(("run", "queued", 2, ""),),
        ]
        assert states(trace) == [*lost, ("run", "held", 2, "")]
        runs = [span for span in trace.spans if span.phase == "run" and span.place == "held"]
        assert runs[0].stage_id != runs[1].stage_id
        assert all(run.stage_id.startswith("run-") and run.node == "local" for run in runs)
        assert runs[0].error is not None
        assert runs[0].stage_id in runs[0].error.message
        assert (trace.outcome, trace.spans[-1].end_s) == (None, None)

        client.cancel(job_id)
        trace = client.trace(job_id)
        assert states(trace) == [*lost, ("run", "held", 2, "cancelled")]
        assert (trace.outcome, trace.collected_s) == ("cancelled", None)
        assert list(client.stream(timeout_s=20))
    with service.client() as client:
        trace = client.trace(job_id)
        assert trace.ended_s is not None
        assert trace.collected_s is not None
        assert 0 < trace.ended_s <= trace.collected_s <= trace.age_s

    shown = prorl_job(service, job_id)
    assert shown.returncode == 0, shown.stderr
    for word in (job_id, "RUN held", runs[0].stage_id, runs[1].stage_id, "lease_lost: run was lost", "cancelled after"):
        assert word in shown.stdout
    content = json.loads(prorl_job(service, job_id, "--json").stdout)
    assert (content["job_id"], content["outcome"], len(content["spans"])) == (job_id, "cancelled", 8)


def test_the_backend_of_a_job_is_in_its_trace_while_it_generates(tmp_path: Path) -> None:
    with in_process(engine=EndlessEngine(tmp_path / "mark")) as service, service.client() as client:
        (job_id,) = client.submit(scripted(run="converse"))
        until(lambda: client.trace(job_id).spans[-1].backends == ("local",), "the backend in the trace")
        client.cancel(job_id)


def test_an_unknown_job_is_a_clear_error(local_service: LocalService) -> None:
    with local_service.client() as client:
        client.submit(msgspec.structs.replace(scripted(), job_id=f"same-{number}") for number in range(2))
        assert len(list(client.stream(timeout_s=60))) == 2
        with pytest.raises(UnknownJob, match="no job nobody: it was never submitted here"):
            client.trace("nobody")
        with pytest.raises(UnknownJob, match="2 jobs have an id that begins with same"):
            client.trace("same")

    async def ask() -> None:
        async with AsyncRolloutClient(local_service.front_door) as client:
            with pytest.raises(UnknownJob, match="no job nobody"):
                await client.trace("nobody")

    asyncio.run(ask())
    shown = prorl_job(local_service, "nobody")
    assert shown.returncode == 2
    (line,) = shown.stderr.splitlines()
    assert line.startswith("prorl: no job nobody: it was never submitted here")


@pytest.mark.proof
def test_a_trace_goes_on_in_the_next_broker(local_service: LocalService, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with local_service.client() as client:
        ended, running = client.submit([scripted(), scripted(run="sleep", mark=str(mark))])
        until(lambda: client.trace(ended).outcome, "the first job's end")
        started(client, mark)
        before = {job_id: client.trace(job_id) for job_id in (ended, running)}
        local_service.brokers.stop("rollout")
        local_service.brokers.start_rollout_broker()
        assert client.trace(ended).spans == before[ended].spans
        trace = client.trace(running)
        assert states(trace) == states(before[running])
        assert trace.accepted_at == before[running].accepted_at
        assert len(trace.restarts) == 1
        until(lambda: client.status().running["run"] == 1, "the stage process to report")
        client.cancel(running)
        assert client.trace(running).outcome == "cancelled"
