"""Rollouts on two real vLLM engines, routed in several ways: prefix cache hits, and speed.

A job is a prompt that it shares with its group, and turns that each append the generated tokens and a tool's answer. A
fixed number of jobs is in flight; the groups come one after the other. Each engine host has one core and a KV cache
that holds its jobs if jobs are spread evenly and stay, but not all jobs in flight. The sticky ways ask the backend
broker's own heap when a job starts, the others choose at each call. The reference is one engine alone, which gets all
jobs: it has both cores and the memory of both caches. Each run has its own tokens, so it finds nothing of earlier runs,
whose cache entries are evicted first.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import zmq

from prorl_zmq.brokers.backends.backend_heap import BackendHeap
from prorl_zmq.inference.client import EngineClient
from prorl_zmq.wire.messages.backends import Assign, Backend
from prorl_zmq.wire.messages.jobs import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from prorl_zmq.brokers.backends.backend_heap import Affinity

TURNS = 8
GROUP = 8
PROMPT_TOKENS = (512, 1024)
"""Least and most of a group's prompt."""
GENERATED_TOKENS = 64
TOOL_TOKENS = (32, 96)
"""Least and most of a tool's answer."""
VOCABULARY = 1000
IN_FLIGHT = 16
ROOM = IN_FLIGHT // 2 + 2
"""Jobs at once beyond which a backend counts as full."""
CACHE_TOKENS = 20_480
"""That an engine's KV cache holds: ten jobs at their ends, or twice that where groups share their prompts."""
TOKEN_BYTES = 1024
"""Of the tiny model's KV cache: 2 layers, 2 heads, 32 wide, keys and values, fp32."""
START_S = 30.0
"""Longest time until a host that has started can be talked to."""


def flags(engines: int) -> tuple[str, ...]:
    """Give vLLM's flags for an engine with the memory of so many."""
    return (
        "--max-model-len=4096",
        f"--kv-cache-memory-bytes={engines * CACHE_TOKENS * TOKEN_BYTES}",
        "--block-size=32",
    )


class Router(Protocol):
    """Chooses an engine for each call."""

    def call(self, job_id: str, group_id: str) -> Backend:
        """Give the engine for a job's next turn."""

    def end(self, job_id: str) -> None:
        """Take note that a job has ended."""


class Sticky:
    """Ours: the backend broker's heap."""

    def __init__(self, backends: Sequence[Backend], affinity: Affinity) -> None:
        self._heap = BackendHeap(affinity)
        for backend in backends:
            self._heap.add(backend)

    def call(self, job_id: str, group_id: str) -> Backend:
        """Give the engine that the job holds, or the first time one that the heap chooses."""
        request = Assign(job_id, owner="bench", job_id=job_id, attempt=1, wait_s=60.0, group_id=group_id)
        backend = self._heap.assign(request)
        assert backend is not None
        return backend

    def end(self, job_id: str) -> None:
        """Release it."""
        self._heap.release(job_id, 1)


class PerCall:
    """Chooses at each call, whosever it is."""

    def __init__(self, choose: Callable[[], Backend]) -> None:
        self._choose = choose

    def call(self, job_id: str, group_id: str) -> Backend:  # noqa: ARG002
        """Give any engine."""
        return self._choose()

    def end(self, job_id: str) -> None:
        """Do nothing."""


BY_JOB, BY_GROUP, RANDOM, ROUND_ROBIN = "sticky by job", "sticky by group", "random per call", "round robin per call"
ROUTERS: dict[str, Callable[[Sequence[Backend], int], Router]] = {
    BY_JOB: lambda backends, _: Sticky(backends, "job"),
    BY_GROUP: lambda backends, _: Sticky(backends, "group"),
    RANDOM: lambda backends, seed: PerCall(partial(random.Random(seed).choice, backends)),
    ROUND_ROBIN: lambda backends, _: PerCall(itertools.cycle(backends).__next__),
}
"""By name; each is made with the engines and a run's number."""


@dataclass
class Tally:
    """What the engines said of one run."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were found in a prefix cache."""
        return self.cached_tokens / self.prompt_tokens

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of the run."""
        return self.generated_tokens / self.seconds


class Job(NamedTuple):
    """One rollout of the workload."""

    job_id: str
    group_id: str
    prompt: NDArray[np.int32]
    """int32 [P], its group's."""
    answers: list[NDArray[np.int32]]
    """int32 [T] of a tool after each turn but the last."""


def make_jobs(count: int, run: int) -> list[Job]:
    """Make the jobs of a run: of the same lengths in each, of other tokens."""
    lengths, tokens = np.random.default_rng(0), np.random.default_rng(1 + run)

    def text(least: int, most: int) -> NDArray[np.int32]:
        return tokens.integers(0, VOCABULARY, lengths.integers(least, most, endpoint=True), np.int32)

    jobs: list[Job] = []
    for number in range(count):
        prompt = text(*PROMPT_TOKENS) if number % GROUP == 0 else jobs[-1].prompt
        answers = [text(*TOOL_TOKENS) for _ in range(TURNS - 1)]
        jobs.append(Job(f"run{run}-job{number}", f"run{run}-group{number // GROUP}", prompt, answers))
    return jobs


async def run_jobs(client: EngineClient, router: Router, jobs: Sequence[Job]) -> Tally:
    """Run all jobs, so many at a time, and give what the engines said."""
    tally = Tally()
    waiting = iter(jobs)
    sampling = Sampling(max_tokens=GENERATED_TOKENS)

    async def rollouts() -> None:
        for job in waiting:
            context = job.prompt
            for turn in range(TURNS):
                backend = router.call(job.job_id, job.group_id)
                done = await client.generate(backend, job.job_id, context, sampling, ())
                tally.prompt_tokens += len(context)
                tally.cached_tokens += done.cached_tokens
                tally.generated_tokens += len(done.token_ids)
                if turn < TURNS - 1:
                    context = np.concatenate([context, done.token_ids, job.answers[turn]])
            router.end(job.job_id)

    begun = time.perf_counter()
    await asyncio.gather(*(rollouts() for _ in range(IN_FLIGHT)))
    tally.seconds = time.perf_counter() - begun
    return tally


async def run_in_turns(
    endpoints: Sequence[str], routers: Sequence[str], jobs: int, times: int
) -> dict[str, list[Tally]]:
    """Run a workload through each router in turn, several times, on engines that have just started.

    Args:
        endpoints: of the engines.
        routers: names in `ROUTERS`.
        jobs: of each run.
        times: runs with each router.
    """
    backends = [
        Backend(backend_id=f"b{number}", endpoint=endpoint, max_in_flight=ROOM)
        for number, endpoint in enumerate(endpoints)
    ]
    tallies: dict[str, list[Tally]] = {name: [] for name in routers}
    runs = itertools.count()
    with zmq.Context() as context:
        client = EngineClient(context, reconnect_s=START_S)
        try:
            for endpoint in endpoints:
                await client.health(endpoint, START_S)
            for _ in range(times):
                for name in routers:
                    run = next(runs)
                    tallies[name].append(await run_jobs(client, ROUTERS[name](backends, run), make_jobs(jobs, run)))
        finally:
            client.close()
    return tallies
