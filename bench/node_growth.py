"""The part of bench/nodes.py about throughput: jobs that sleep in RUN, on one real node and on eight.

The bound is all slots at work until the last job has ended: the sum of the sleeps over the slots. The speed-up compares
the rates in the middle of the runs, where all slots are taken. The slots are so few that the machine's cores are not
the limit.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import harness
from node_service import NodeService

from prorl_zmq import Job

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from namespace_hosts import Hosts

if TYPE_CHECKING:
    from collections.abc import Iterator

SPEED_UP = 7.8
TOPOLOGY = """
[sandbox]
kind = "process"
[[stage]]
role = "init"
slots = 8
[[stage]]
role = "run"
slots = {slots}
[[stage]]
role = "eval"
slots = 8
"""


class Load(NamedTuple):
    mean_s: float
    """Of RUN, which takes 0.5 to 1.5 times as long."""
    slots: int
    """Of a node."""
    rounds: int
    """Jobs for each slot."""
    share: float
    """Of the bound, that is the goal."""


LOADS = (Load(3.0, 16, 32, 0.95), Load(0.5, 8, 100, 0.9))


class Run(NamedTuple):
    rate: float
    """Jobs a second between 15 and 85 % of them."""
    share: float
    """The bound, as a part of the time that it took."""


def growth_rows(quick: bool) -> list[harness.Row]:
    many, loads = (2, [load._replace(rounds=3) for load in LOADS]) if quick else (8, LOADS)
    target = SPEED_UP * many / 8
    rows: list[harness.Row] = []
    for load in loads:
        few, more = run(1, load), run(many, load)
        speed_up = more.rate / few.rate
        what, least = f"RUN of {load.mean_s:g} s, {load.slots} slots a node, {many} nodes", f"≥ {load.share:g}"
        rows += [
            harness.Row(what, more.rate, "jobs/s", "1 node", speed_up, f"≥ {target:g}×", speed_up >= target),
            harness.Row(f"{what}: bound over makespan", more.share, "", target=least, holds=more.share >= load.share),
            harness.Row("the same, 1 node", few.share, ""),
        ]
    return rows


def run(nodes: int, load: Load) -> Run:
    """Have a service with so many nodes do its jobs."""
    random.seed(0)
    count = nodes * load.slots * load.rounds
    sleeps = [random.uniform(0.5, 1.5) * load.mean_s for _ in range(count)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prorl-bench-")))
        hosts = stack.enter_context(numbered(nodes + 1, folder))
        service = start(stack, folder, hosts, TOPOLOGY.format(slots=load.slots))
        client = stack.enter_context(service.client())
        began = time.monotonic()
        client.submit(Job(task="sleep", instance={"run_s": sleep}) for sleep in sleeps)
        ended = []
        for trajectory in client.stream(timeout_s=600):
            if trajectory.reward != 1.0 or trajectory.result.attempt != 1:
                raise RuntimeError(f"{trajectory.job_id}: {trajectory.outcome}, attempt {trajectory.result.attempt}")
            ended.append(time.monotonic() - began)
    first, last = int(0.15 * count), int(0.85 * count)
    rate = (last - first) / (ended[last] - ended[first])
    return Run(rate, sum(sleeps) / (nodes * load.slots) / ended[-1])


@contextmanager
def numbered(count: int, folder: Path) -> Iterator[Hosts]:
    """Have hosts h1, h2, …, which share a folder."""
    with Hosts(folder) as hosts:
        for number in range(1, count + 1):
            hosts.begin(f"h{number}", _address(f"h{number}"))
        yield hosts


def start(stack: ExitStack, folder: Path, hosts: Hosts, topology: str, *flags: str) -> NodeService:
    """Start a service whose brokers, and this thread, are on the first host, and a node on each of the others."""
    brokers, *others = hosts.names
    stack.enter_context(hosts.network(brokers))
    service = stack.enter_context(NodeService(folder, topology, hosts.prefix(brokers), _address(brokers)))
    for name in others:
        place = ("--service", str(service.path), "--name", name, "--address", _address(name))
        service.start(name, hosts.prefix(name), "node", *place, *flags)
    service.wait_nodes(len(others))
    return service


def _address(name: str) -> str:
    return f"10.78.0.{name.removeprefix('h')}"
