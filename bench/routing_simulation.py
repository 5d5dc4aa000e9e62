"""Jobs on simulated inference engines, in a virtual clock: the effect of the choice of a backend on a whole step.

An engine with continuous batching runs `BATCH` jobs at full speed; beyond that its throughput stays constant, so all
its jobs slow down in proportion (processor sharing; a fixed number of slots with a queue would let later jobs wait,
which such engines do only when their cache is full). `ROLLOUTS` jobs are under way at a time, as many as all engines
run at full speed; the next one starts when one ends. A job stays on its engine.

The policies choose at the same moment, when a job starts. The counter is that of the ProRL Agent server (its heap of
`[weight, address]`, `openhands/nvidia/async_server.py`): a weight grows with each assignment and never falls, and a new
server begins at 0.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Protocol

import numpy as np

from prorl_zmq.brokers.backends.backend_heap import BackendHeap
from prorl_zmq.wire.messages.backends import Assign, Backend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

ENGINES = 8
BATCH = 32
ROLLOUTS = ENGINES * BATCH
MEAN_S = 60.0
SIGMA = 1.5
LONGEST = 20.0
"""Times the mean: limits of turns and tokens end the longest rollouts."""


@dataclass(frozen=True)
class Server:
    """What one simulated engine is like."""

    speed: float = 1.0
    joins: float = 0.0
    """When, as a share of the time that as many alike would need for all jobs."""
    weight: float = 1.0
    """What the policy can see."""


ALIKE = (Server(),) * ENGINES
CASES: dict[str, tuple[Server, ...]] = {
    "all alike": ALIKE,
    "one joins late": (*ALIKE[1:], Server(joins=0.5)),
    "one is 4× slower": (*ALIKE[1:], Server(speed=0.25)),
}
SLOW_AND_TOLD = (*ALIKE[1:], Server(speed=0.25, weight=0.25))


class Policy(Protocol):
    """Chooses a backend for each job."""

    def join(self, backend_id: str, weight: float) -> None:
        """Take a backend into account from now on."""

    def start(self, job_id: str) -> str:
        """Give a job its backend."""

    def end(self, job_id: str) -> None:
        """Take note that a job has ended."""


class _InFlight:
    """Ours: the backend broker's own heap."""

    def __init__(self, seed: int) -> None:  # noqa: ARG002 - it draws nothing
        self._heap = BackendHeap()

    def join(self, backend_id: str, weight: float) -> None:
        endpoint = f"ipc:///nowhere/{backend_id}"
        self._heap.add(Backend(backend_id=backend_id, endpoint=endpoint, weight=weight, max_in_flight=BATCH))

    def start(self, job_id: str) -> str:
        backend = self._heap.assign(Assign(job_id, owner="bench", job_id=job_id, attempt=1, wait_s=60.0))
        assert backend is not None
        return backend.backend_id

    def end(self, job_id: str) -> None:
        self._heap.release(job_id, 1)


class _Cumulative:
    """A heap keyed by assignments ever made."""

    def __init__(self, seed: int) -> None:  # noqa: ARG002 - it draws nothing
        self._heap: list[tuple[int, str]] = []

    def join(self, backend_id: str, weight: float) -> None:  # noqa: ARG002 - it knows no weights
        heapq.heappush(self._heap, (0, backend_id))

    def start(self, job_id: str) -> str:  # noqa: ARG002
        assigned, backend_id = self._heap[0]
        heapq.heapreplace(self._heap, (assigned + 1, backend_id))
        return backend_id

    def end(self, job_id: str) -> None:
        pass


class _Random:
    """Any backend."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._backends: list[str] = []

    def join(self, backend_id: str, weight: float) -> None:  # noqa: ARG002 - it knows no weights
        self._backends.append(backend_id)

    def start(self, job_id: str) -> str:  # noqa: ARG002
        return self._draw.choice(self._backends)

    def end(self, job_id: str) -> None:
        pass


OURS, COUNTER, RANDOM = "in flight", "cumulative counter", "random choice"
POLICIES: dict[str, Callable[[int], Policy]] = {
    OURS: _InFlight,
    COUNTER: _Cumulative,
    RANDOM: _Random,
}
"""By name; each is made with the run's seed."""


class _Engine:
    """Jobs that share one engine. `_served` is how far a job would be that was there from the start."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._jobs: list[tuple[float, str]] = []
        self._served = 0.0
        self._at = 0.0

    def next_end(self) -> float:
        """Give the time at which the next job ends, if none is added until then."""
        return self._at + (self._jobs[0][0] - self._served) / self._rate() if self._jobs else float("inf")

    def add(self, job_id: str, length_s: float, now: float) -> None:
        self._advance(now)
        heapq.heappush(self._jobs, (self._served + length_s, job_id))

    def end_next(self, now: float) -> str:
        self._advance(now)
        return heapq.heappop(self._jobs)[1]

    def _advance(self, now: float) -> None:
        if self._jobs:
            self._served += (now - self._at) * self._rate()
        self._at = now

    def _rate(self) -> float:
        return self._speed * min(1.0, BATCH / len(self._jobs))


def make_lengths(jobs: int, seed: int) -> NDArray[np.float64]:
    """Give how long each job would take on an engine of its own, in seconds: log-normal, with a heavy tail."""
    lengths = np.random.default_rng(seed).lognormal(sigma=SIGMA, size=jobs)
    return MEAN_S * np.clip(lengths / lengths.mean(), 0.0, LONGEST)


def run(policy: Policy, servers: Sequence[Server], lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """Run all jobs, and give the times at which they ended, in order and in virtual seconds."""
    whole_s = float(lengths.sum()) / ROLLOUTS
    engines: dict[str, _Engine] = {}
    joining = sorted(((one.joins * whole_s, number) for number, one in enumerate(servers)), reverse=True)
    waiting = ((f"job-{number}", length) for number, length in zip(count(), lengths, strict=False))
    ended: list[float] = []

    def start(now: float) -> None:
        for job_id, length_s in waiting:
            engines[policy.start(job_id)].add(job_id, float(length_s), now)
            return

    def join() -> float:
        at, number = joining.pop()
        engines[f"b{number}"] = _Engine(servers[number].speed)
        policy.join(f"b{number}", servers[number].weight)
        return at

    while joining and joining[-1][0] <= 0:
        join()
    for _ in range(ROLLOUTS):
        start(0.0)
    while len(ended) < len(lengths):
        first = min(engines, key=lambda name: engines[name].next_end())
        now = engines[first].next_end()
        if joining and joining[-1][0] <= now:
            join()
            continue
        policy.end(engines[first].end_next(now))
        ended.append(now)
        start(now)
    return np.array(ended)
