"""Jobs per second through submit → INIT → RUN → EVAL → collect with empty phases, and the latency of one job.

All processes are on this machine: two brokers, a stage process for each stage, and the client. The jobs do nothing, so
the service's own work is measured. The peer has the same sockets, hops and frames and no logic (bare_pipeline.py); both
process their jobs in turns. CPU time is that of all threads of a process, divided by the jobs: other load on the
machine changes it less than the rate.

Jobs of one turn follow, for the cost of a job in an engine host and the backend broker: the embedded engine generates
one token.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from bare_pipeline import BarePipeline
from harness import Row, main, quantiles
from service import BenchService

from prorl_zmq import Job, RolloutClient, Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SLOTS = 64
BARE = "bare ZeroMQ pipeline"
TARGET_RATE, TARGET_CPU, TARGET_P50 = 1 / 25, 13.0, 9.0
"""Of the bare pipeline's rate, CPU time and latency."""
NAMES = {
    "client": "client",
    "rollout broker": "rollout broker",
    "backend broker": "backend broker",
    "init-0": "INIT process",
    "run-1": "RUN process",
    "eval-2": "EVAL process",
    "engine": "engine host",
}


def throughput(front_door: str, count: int, task: str = "nothing") -> float:
    """Give jobs per second from the first submission to the last collected trajectory."""
    sampling = Sampling(max_tokens=1)
    with RolloutClient(front_door, timeout_s=120) as client:
        started = time.perf_counter()
        client.submit(Job(task=task, instance={}, sampling=sampling) for _ in range(count))
        collected = sum(trajectory.reward == 1.0 for trajectory in client.stream(timeout_s=60))
        assert collected == count
        return count / (time.perf_counter() - started)


def latencies(front_door: str, count: int) -> list[float]:
    """Give the seconds from submission to trajectory, one job at a time through an idle pipeline."""
    seconds = []
    with RolloutClient(front_door) as client:
        for _ in range(count):
            started = time.perf_counter()
            client.submit(Job(task="nothing", instance={}))
            (trajectory,) = client.collect(1, wait_s=10)
            seconds.append(time.perf_counter() - started)
            assert trajectory.reward == 1.0
    return seconds


def cpu_s(pid: int) -> float:
    """Give the CPU seconds that all threads of a process have taken."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def cpu_of(pids: Mapping[str, int], act: Callable[[], object]) -> dict[str, float]:
    """Give the CPU seconds that each process takes while something is done."""
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    act()
    return {name: cpu_s(pid) - before[name] for name, pid in pids.items()}


class Turns:
    """What both took in turns."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.bare_rates: list[float] = []
        self.cpu: dict[str, list[float]] = {}
        """Of each of our processes for a job, by round."""
        self.bare_cpu: list[float] = []

    def take(self, service: BenchService, bare: BarePipeline, count: int) -> None:
        ours = service.pids() | {"client": os.getpid()}
        spent = cpu_of(ours, lambda: self.rates.append(throughput(service.front_door, count)))
        for name, seconds in spent.items():
            self.cpu.setdefault(name, []).append(seconds / count)
        theirs = bare.pids() | {"client": os.getpid()}
        bare_spent = cpu_of(theirs, lambda: self.bare_rates.append(count / bare.pass_jobs(count)))
        self.bare_cpu.append(sum(bare_spent.values()) / count)

    @property
    def rate_ratio(self) -> float:
        return float(np.median(np.divide(self.rates, self.bare_rates)))

    @property
    def cpu_ratio(self) -> float:
        """Return how many times the bare pipeline's CPU time ours is."""
        return float(np.median(np.divide(np.sum(list(self.cpu.values()), axis=0), self.bare_cpu)))


def in_turns(service: BenchService, rounds: int, count: int) -> tuple[Turns, list[float], list[float]]:
    """Give what jobs took, and the seconds that one took alone, ours and the bare pipeline's."""
    turns = Turns()
    with BarePipeline() as bare:
        throughput(service.front_door, 200)
        bare.pass_jobs(200)
        for _ in range(rounds):
            turns.take(service, bare, count)
        alone: list[float] = []
        bare_alone: list[float] = []
        for _ in range(rounds):
            alone += latencies(service.front_door, count // 20)
            bare_alone += [bare.pass_jobs(1) for _ in range(count // 20)]
    return turns, alone, bare_alone


def measure(quick: bool) -> list[Row]:
    rounds, count = (3, 1000) if quick else (5, 4000)
    with BenchService([("init", SLOTS), ("run", SLOTS), ("eval", SLOTS)]) as service:
        turns, alone, bare_alone = in_turns(service, rounds, count)
        service.start_engine()
        throughput(service.front_door, 50, "converse")
        turn_jobs = count // 4
        spent = cpu_of(service.pids(), lambda: throughput(service.front_door, turn_jobs, "converse"))
    total = float(np.median(np.sum(list(turns.cpu.values()), axis=0)))
    (p50, p95, p99), (bare_p50, bare_p95, bare_p99) = quantiles(alone), quantiles(bare_alone)
    return [
        Row(
            "throughput", float(np.median(turns.rates)), "jobs/s", BARE, turns.rate_ratio,
            f"at least {TARGET_RATE:g} of its rate", turns.rate_ratio >= TARGET_RATE,
        ),
        Row(
            "CPU of an empty job, all processes", 1e6 * total, "µs", BARE, turns.cpu_ratio,
            f"at most {TARGET_CPU:g}×", turns.cpu_ratio <= TARGET_CPU,
        ),
        *(
            Row(f"of it the {NAMES[name]}", 1e6 * float(np.median(rounds)), "µs")
            for name, rounds in turns.cpu.items()
        ),
        Row("CPU of the bare pipeline, all processes", 1e6 * float(np.median(turns.bare_cpu)), "µs"),
        *(
            Row(f"CPU of a job with one turn of one token: the {NAMES[name]}", 1e6 * seconds / turn_jobs, "µs")
            for name, seconds in spent.items()
            if name in ("backend broker", "run-1", "engine")
        ),
        Row(
            "latency p50", 1e3 * p50, "ms", BARE, p50 / bare_p50, f"at most {TARGET_P50:g}×",
            p50 / bare_p50 <= TARGET_P50,
        ),
        Row("latency p95", 1e3 * p95, "ms", BARE, p95 / bare_p95),
        Row("latency p99", 1e3 * p99, "ms", BARE, p99 / bare_p99),
    ]  # fmt: skip


if __name__ == "__main__":
    main("frontdoor", "jobs per second and latency of the empty pipeline", measure)
