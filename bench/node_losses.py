"""The parts of bench/nodes.py in which real nodes end: three that die in different ways, and two that are drained.

A job's `started` is when its last RUN began, on this machine's monotonic clock, which all hosts share.
"""

from __future__ import annotations

import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import harness
from node_growth import TOPOLOGY, numbered, start

from prorl_zmq import Job
from prorl_zmq.wire.messages.jobs import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_zmq import RolloutClient, Trajectory

RESTART_S = 12.0
SLOTS = 16
SLEEP_S = 14.0
"""Longer than a dead node's jobs may wait."""
DRAIN_SLEEP_S = 5.0
DRAIN_S = "1"


def loss_rows(quick: bool) -> list[harness.Row]:
    """From a node's death to the next start of its jobs: the last of them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prorl-bench-")))
        hosts = stack.enter_context(numbered(3 if quick else 5, folder))
        service = start(stack, folder, hosts, TOPOLOGY.format(slots=SLOTS))
        client = stack.enter_context(service.client())
        ways: list[tuple[str, Callable[[str], None]]] = [("its link is cut", hosts.cut)]
        if not quick:
            ways = [
                ("its host has no power", hosts.kill),
                ("all its processes are killed", hosts.kill_processes),
                *ways,
            ]
        rows = []
        for (how, strike), name in zip(ways, reversed(hosts.names), strict=False):
            jobs = submit(client, len(service.nodes()), SLEEP_S)
            strike(name)
            struck = time.monotonic()
            again = [one for one in ended(client, jobs) if one.result.attempt > 1]
            last_s = max(one.result.metrics["started"] for one in again) - struck
            what = f"a node dies ({how}): until the last of its {len(again)} jobs starts elsewhere"
            rows.append(harness.Row(what, last_s, "s", target=f"≤ {RESTART_S:g} s", holds=last_s <= RESTART_S))
        return rows


def drain_rows(quick: bool) -> list[harness.Row]:
    """Nodes are drained that cannot end what they hold; the jobs have one attempt."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prorl-bench-")))
        numbers = (signal.SIGTERM,) if quick else (signal.SIGTERM, signal.SIGUSR1)
        hosts = stack.enter_context(numbered(2 + len(numbers), folder))
        service = start(stack, folder, hosts, TOPOLOGY.format(slots=SLOTS), "--drain-s", DRAIN_S)
        client = stack.enter_context(service.client())
        rows = []
        for number, name in zip(numbers, reversed(hosts.names), strict=False):
            jobs = submit(client, len(service.nodes()), DRAIN_SLEEP_S, max_attempts=1)
            hosts.signal(service.commands[name], number)
            results = ended(client, jobs)
            moved = sum(one.result.attempt > 1 for one in results)
            spent = sum(one.outcome != "completed" for one in results)
            what = f"spent attempts of {moved} jobs of a node that got {number.name}"
            rows.append(harness.Row(what, spent, "jobs", target="0", holds=moved > 0 and not spent))
        return rows


def submit(client: RolloutClient, nodes: int, sleep_s: float, max_attempts: int = 3) -> list[str]:
    """Submit so many jobs that half of the nodes' slots are free, and wait until all are in RUN."""
    count = nodes * SLOTS // 2
    sent = client.submit(
        Job(task="sleep", instance={"run_s": sleep_s}, max_attempts=max_attempts) for _ in range(count)
    )
    until = time.monotonic() + sleep_s
    while client.status().running.get(Phase.RUN, 0) < count:
        if time.monotonic() > until:
            raise TimeoutError("the jobs did not begin")
        time.sleep(0.05)
    return sent


def ended(client: RolloutClient, jobs: list[str]) -> list[Trajectory]:
    results = list(client.stream(timeout_s=120))
    if sorted(one.job_id for one in results) != sorted(jobs):
        raise RuntimeError(f"{len(results)} of {len(jobs)} jobs ended, or others")
    return results
