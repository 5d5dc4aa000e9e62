"""Waiting times of heavy-tailed jobs for one of 8 workers, compared with an ideal FIFO queue and plain PUSH fan-out.

A job waits from the call of `submit` until RUN starts, so INIT (which does nothing) and all messages count. The ideal
queue has no messages: its waiting times are computed from the same arrivals and from the phases' measured lengths. The
fan-out is a bare PUSH to 8 PULL workers, with the same jobs at the same times.
"""

from __future__ import annotations

import heapq
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import zmq
from harness import Row, main, picture_path
from service import BenchService

from prorl_zmq import Job, RolloutClient

sys.path.insert(0, str(Path(__file__).with_name("peers")))
from fan_out import JOB, RESULT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

WORKERS = 8
LOAD = 0.75
MEAN_S = 0.15
TARGET = 1.2
STAGES = [("init", 64), ("eval", 64), *[("run", 1)] * WORKERS]
PEERS = Path(__file__).with_name("peers")


class Visit(NamedTuple):
    """One job at one side; times on the machine's monotonic clock."""

    arrived: float
    started: float
    service_s: float
    """How long the worker was busy with it."""

    @property
    def waited(self) -> float:
        """Seconds from arrival to start."""
        return self.started - self.arrived


def ideal_waits(visits: Sequence[Visit]) -> list[float]:
    """Give the waiting time of each visit in a FIFO queue before `WORKERS` workers, without any overhead."""
    free = [0.0] * WORKERS
    waits = []
    for visit in sorted(visits):
        started = max(visit.arrived, heapq.heappop(free))
        heapq.heappush(free, started + visit.service_s)
        waits.append(started - visit.arrived)
    return waits


def make_jobs(count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Give arrivals (seconds from the start, Poisson) and service times (seconds, log-normal with a heavy tail)."""
    draw = np.random.default_rng(1)
    service = draw.lognormal(sigma=1.2, size=count)
    service = np.minimum(service / service.mean(), 20) * MEAN_S
    arrivals = np.cumsum(draw.exponential(service.mean() / (WORKERS * LOAD), count))
    return arrivals, service


class FanOut:
    """The peer: a PUSH, its workers' processes, and a thread that notes what they push back."""

    def __init__(self, folder: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._jobs = self._context.socket(zmq.PUSH)
        self._results = self._context.socket(zmq.PULL)
        endpoints = [f"ipc://{folder}/jobs", f"ipc://{folder}/results"]
        self._jobs.bind(endpoints[0])
        self._results.bind(endpoints[1])
        self._processes = [
            subprocess.Popen([sys.executable, str(PEERS / "fan_out.py"), *endpoints]) for _ in range(WORKERS)
        ]
        for _ in range(WORKERS):
            if not self._results.poll(60_000):
                raise RuntimeError("the workers of the fan-out did not start")
            self._results.recv()
        self._arrived: list[float] = []
        self._done: list[tuple[int, float, float]] = []

    def submit(self, seconds: float) -> None:
        """Push one job."""
        self._arrived.append(time.monotonic())
        self._jobs.send(JOB.pack(len(self._arrived) - 1, seconds))

    def visits(self, limit_s: float) -> list[Visit]:
        """Wait for all jobs."""
        until = time.monotonic() + limit_s
        while len(self._done) < len(self._arrived):
            if not self._results.poll(max(0, int(1000 * (until - time.monotonic())))):
                raise RuntimeError("the fan-out did not end its jobs")
            self._done.append(RESULT.unpack(self._results.recv()))
        return [Visit(self._arrived[number], started, ended - started) for number, started, ended in self._done]

    def close(self) -> None:
        """End the workers."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(20)
        self._context.destroy(linger=0)


@contextmanager
def fan_out() -> Iterator[FanOut]:
    """Run the peer."""
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        peer = FanOut(folder)
        try:
            yield peer
        finally:
            peer.close()


def submit_all(client: RolloutClient, peer: FanOut, count: int) -> dict[str, float]:
    """Submit each job to both sides when it arrives; give the arrival times of ours by job id."""
    arrived = {}
    timer = threading.Event()
    origin = time.monotonic()
    for at, seconds in zip(*make_jobs(count), strict=True):
        timer.wait(max(0.0, origin + at - time.monotonic()))
        peer.submit(float(seconds))
        now = time.monotonic()
        (job_id,) = client.submit(Job(task="sleep", instance={"run_s": float(seconds)}))
        arrived[job_id] = now
    return arrived


def visits_of_both(count: int) -> tuple[list[Visit], list[Visit]]:
    """Give the visits of our side and of the fan-out."""
    with BenchService(STAGES) as service, fan_out() as peer, RolloutClient(service.front_door) as client:
        warm_up = [Job(task="sleep", instance={"run_s": 0.01}) for _ in range(4 * WORKERS)]
        client.submit(warm_up)
        assert sum(trajectory.reward == 1.0 for trajectory in client.stream(timeout_s=60)) == len(warm_up)
        arrived = submit_all(client, peer, count)
        ours = [
            Visit(
                arrived[trajectory.job_id],
                trajectory.result.metrics["started"],
                trajectory.result.timings["run"],
            )
            for trajectory in client.stream(timeout_s=60)
        ]
        assert len(ours) == count
        return ours, peer.visits(limit_s=120)


def draw(waits: dict[str, list[float]]) -> None:
    """Draw the share of jobs that waits longer than any time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for (name, values), style in zip(waits.items(), ("-", "--", ":"), strict=True):
        longest_first = np.sort(values)[::-1]
        axes.plot(longest_first, np.arange(1, len(values) + 1) / len(values), style, label=name, linewidth=2)
    axes.axhline(0.01, color="0.8", linewidth=1, zorder=0)
    axes.annotate("p99", (0, 0.01), color="0.4")
    axes.set_yscale("log")
    axes.set_xlabel("seconds")
    axes.set_ylabel("share of jobs that waits longer")
    axes.legend()
    figure.savefig(picture_path("dispatch"), dpi=120)


def measure(quick: bool) -> list[Row]:
    ours, theirs = visits_of_both(200 if quick else 3000)
    waits = {
        "prorl_zmq": [visit.waited for visit in ours],
        "ideal FIFO queue": ideal_waits(ours),
        "PUSH fan-out": [visit.waited for visit in theirs],
    }
    if not quick:
        draw(waits)
    p99 = {name: float(np.percentile(values, 99)) for name, values in waits.items()}
    p50 = {name: float(np.percentile(values, 50)) for name, values in waits.items()}
    ratio = p99["prorl_zmq"] / p99["ideal FIFO queue"]
    fan_out_ratio = p99["PUSH fan-out"] / float(np.percentile(ideal_waits(theirs), 99))
    own_target = f"at most {TARGET:g}× the ideal's"
    return [
        Row("waiting p99", p99["prorl_zmq"], "s", "ideal FIFO queue", ratio, own_target, ratio <= TARGET),
        Row("PUSH fan-out, waiting p99", p99["PUSH fan-out"], "s", "ideal FIFO queue", fan_out_ratio),
        Row("ideal FIFO queue, waiting p99", p99["ideal FIFO queue"], "s"),
        Row("waiting p50", 1e3 * p50["prorl_zmq"], "ms"),
        Row("PUSH fan-out, waiting p50", 1e3 * p50["PUSH fan-out"], "ms"),
    ]


if __name__ == "__main__":
    main("dispatch", f"heavy-tailed jobs on {WORKERS} workers at a load of {LOAD:g}", measure)
