"""Sandboxes on their way through a whole service: from INIT's hands to RUN's, and what a death on the way costs."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest
from sandbox_kind import register
from support.waiting import until

from prorl_zmq.wire.messages.jobs import Phase

from .conftest import TestService, image_for, in_process, scripted

if TYPE_CHECKING:
    from pathlib import Path


def folders(service: TestService) -> list[str]:
    root = service.folder / "sandboxes"
    return [path.name for path in root.iterdir()] if root.exists() else []


def test_all_tools_work_on_what_init_prepared(sandbox_kind: str) -> None:
    image = {"sandbox": {"image": image_for(sandbox_kind)}}
    with in_process(sandbox=sandbox_kind, topology=image) as service, service.client() as client:
        client.submit(scripted(run="tools") for _ in range(3))
        trajectories = list(client.stream(timeout_s=60))
        assert [(each.outcome, each.error) for each in trajectories] == [("completed", None)] * 3
        until(lambda: not list((service.run_dir / "sandboxes").iterdir()), "the sandboxes to be gone")


@pytest.mark.few(1)
def test_a_sandbox_that_died_while_its_job_waited_costs_an_attempt(
    empty_service: TestService, sandbox_kind: str, tmp_path: Path
) -> None:
    """INIT's process is killed when its sandbox is ready and no RUN process is there."""
    service = empty_service
    service.start_brokers()
    first = service.start_stage("init", sandbox=sandbox_kind)
    service.start_stage("eval", sandbox=sandbox_kind)
    service.wait_stages(2)
    with service.client() as client:
        client.submit(scripted(run="tools"))
        until(lambda: client.status().queued.get(Phase.RUN) == 1, "the sandbox")
        (name,) = folders(service)
        spawners = psutil.Process(first.pid).children()
        servers = [server for spawner in spawners for server in spawner.children()]
        first.kill()
        for server in servers:
            os.kill(server.pid, signal.SIGKILL)
        until(lambda: name not in folders(service), "the spawner to remove what the server left")
        service.wait_stages(1)
        service.start_stage("init", sandbox=sandbox_kind)
        service.start_stage("run", sandbox=sandbox_kind)
        (trajectory,) = client.stream(timeout_s=60)
    assert (trajectory.outcome, trajectory.result.attempt) == ("completed", 2)


@pytest.mark.few(1)
def test_an_init_process_that_ends_in_good_order_costs_nothing(empty_service: TestService, sandbox_kind: str) -> None:
    """What it prepared waits for RUN as long as a lease lasts."""
    service = empty_service
    service.start_brokers()
    first = service.start_stage("init", sandbox=sandbox_kind)
    service.start_stage("eval", sandbox=sandbox_kind)
    service.wait_stages(2)
    with service.client() as client:
        client.submit(scripted(run="tools"))
        until(lambda: client.status().queued.get(Phase.RUN) == 1, "the sandbox")
        first.terminate()
        assert first.wait(20) == 0
        service.start_stage("run", sandbox=sandbox_kind)
        (trajectory,) = client.stream(timeout_s=60)
        assert (trajectory.outcome, trajectory.result.attempt) == ("completed", 1)
        until(lambda: not folders(service), "the sandbox to be gone")


def test_a_kind_of_another_package_serves_jobs(
    empty_service: TestService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = register(tmp_path, monkeypatch, marked="my_sandbox:MarkedContainer")
    empty_service.start_brokers()
    empty_service.start_stages("marked")
    with empty_service.client() as client:
        client.submit(scripted(run="tools") for _ in range(2))
        trajectories = list(client.stream(timeout_s=60))
        assert [(each.outcome, each.error) for each in trajectories] == [("completed", None)] * 2
        until(lambda: not folders(empty_service), "the sandboxes to be gone")
    marks = {path.name.partition("-")[0] for path in (package / "marks").iterdir()}
    assert marks >= {f"{each.job_id}.1" for each in trajectories}
