"""A process that was stopped for a while (a debugger, swap, a snapshot of its machine) holds nobody late for it.

Nor does one that lacks descriptors for a while lose jobs.
"""

from __future__ import annotations

import resource
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest
from command_lines import line_of
from support.services import Service, serving
from support.waiting import until

from prorl_zmq import Job, RolloutClient

from .test_serve import SHELL, TOPOLOGY

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.proof

PAUSE_S = 6.0
"""Three leases."""
STOPPED = {
    "rollout broker": ("rollout_broker.json",),
    "backend broker": ("backend_broker.json",),
    "the node": ("prorl-child", "execution"),
}


@pytest.fixture
def own_served() -> Iterator[Service]:
    with serving(f"{TOPOLOGY}[backend_broker]\nlease_s = 2.0\n") as service:
        yield service


@pytest.mark.parametrize("stopped", ["rollout broker", "backend broker", "the node"])
def test_nobody_is_late_for_another_ones_pause(own_served: Service, stopped: str) -> None:
    """The rollout broker took its own sleep for the silence of all stage processes: each job lost its attempt."""
    checked = {**SHELL["instance"], "check": "sleep 3; echo 'reward: 0.25'"}  # type: ignore[dict-item]
    limits = {"run_s": 60.0, "eval_s": 16.0}
    job = {**SHELL, "instance": checked, "limits": limits, "max_attempts": 1}
    with RolloutClient(own_served.front_door, timeout_s=60) as client:
        client.submit(msgspec.convert(job, Job) for _ in range(6))
        until(lambda: client.status().running.get("eval", 0) >= 2, "jobs in EVAL")
        found = [one for one in own_served.children() if any(each in line_of(one) for each in STOPPED[stopped])]
        assert found
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        time.sleep(PAUSE_S)
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        done = list(client.stream(timeout_s=60))
        assert [(one.outcome, one.result.attempt) for one in done] == [("completed", 1)] * 6, (
            done[0].result,
            own_served.lines[-15:],
        )
        assert client.status().redelivered == 0
        assert [one.state for one in client.backends.list()] == ["ready"]


@pytest.mark.parametrize("role", ["init", "run", "eval"])
def test_a_stage_process_without_descriptors_waits_for_some(own_served: Service, role: str) -> None:
    """It failed each phase at once, and so drew all jobs to itself, until their attempts were over."""
    with RolloutClient(own_served.front_door, timeout_s=60) as client:
        client.submit(msgspec.convert(SHELL, Job))
        (first,) = client.stream(timeout_s=60)
        (starved,) = (one.pid for one in own_served.children() if f"stage_{role}.json" in line_of(one))
        limits = resource.prlimit(starved, resource.RLIMIT_NOFILE)
        resource.prlimit(starved, resource.RLIMIT_NOFILE, (psutil.Process(starved).num_fds(), limits[1]))
        client.submit(msgspec.convert({**SHELL, "max_attempts": 1}, Job) for _ in range(4))
        until(lambda: client.status().running.get(role, 0) == 4, "them to wait")
        time.sleep(1.0)
        resource.prlimit(starved, resource.RLIMIT_NOFILE, limits)
        done = list(client.stream(timeout_s=60))
    assert [str(one.outcome) for one in (first, *done)] == ["completed"] * 5, done[0].result
