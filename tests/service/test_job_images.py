"""Images that jobs name, on their way through stage processes as `prorl serve` starts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from needed import usable
from rootfs import tiny_root_filesystem
from support.waiting import until

from prorl_zmq import Job
from prorl_zmq.config import SandboxSettings
from prorl_zmq.service.child_plans import plan_children
from prorl_zmq.wire.messages.jobs import Phase

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from .conftest import TestService


def shell(image: str) -> Job:
    instance = {"instruction": "Do nothing.", "check": "true", "image": image}
    return Job(task="shell", instance=instance, stage_wait_s=30.0, backend_wait_s=30.0)


def test_a_job_that_names_the_hosts_root_fails_and_the_stage_goes_on(
    empty_service: TestService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once saw the host's files, the service's secret key among them."""
    usable("bubblewrap")
    service = empty_service
    tiny_root_filesystem(tmp_path / "images" / "own")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sandbox = SandboxSettings(image_folders=(str(tmp_path / "images"),))
    plans = plan_children(msgspec.structs.replace(service.topology, sandbox=sandbox))
    (plan,) = (plan for plan in plans if plan.name == "init-0")
    service.start_brokers()
    plan.write()
    service.start(*plan.arguments)
    service.wait_stages(1)
    with service.client() as client:
        client.submit(shell(image) for image in ("/", "/proc/self/root", "~", "/usr", str(tmp_path)))
        refused = list(client.stream(timeout_s=60))
        assert [(each.outcome, each.error and each.error.fields.get("reason")) for each in refused] == [
            ("failed", "image")
        ] * 5
        jobs = client.submit([shell("own")])
        until(lambda: client.status().queued.get(Phase.RUN) == 1, "the sandbox from an image that is offered")
        client.cancel(jobs)
