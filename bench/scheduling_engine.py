"""One simulated inference engine with a paged KV cache, and rollouts for it, in a virtual clock.

The cost of an iteration, the pool and the rollouts are those of an 8B model on an H100. The engine works as vLLM does:
requests in order of arrival, prompts computed in chunks together with the running generations, preemption of the latest
request, and a prefix cache of the blocks that no running request uses, evicted from the least recently used context's
end. The prompt of a group is cached once. Tokens are counted one by one, not in blocks.

Iterations without a prompt to compute are taken together until a generation ends or the pool is full, so the cost of a
simulation depends on its turns and prompts, not on its tokens.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

CAPACITY_TOKENS = 400_000
CONTEXT_TOKENS = 65_536
"""The longest context."""
GROUP = 8
"""Rollouts of one prompt."""
ITERATION_S, SEQUENCE_S, RESIDENT_S, COMPUTED_S = 8e-3, 30e-6, 40e-9, 50e-6
"""Seconds of an iteration, and what each sequence, attended token and computed prompt token adds."""
CHUNK_TOKENS = 2_048
"""Most prompt tokens computed in an iteration."""
MEDIAN_TURNS, FEWEST_TURNS, MOST_TURNS = 18, 3, 80
MEDIAN_GENERATED, MEDIAN_ANSWERED, MEDIAN_PROMPT = 220, 400, 3_000


@dataclass(eq=False, slots=True)
class Prompt:
    """The prompt of a group, which its rollouts share."""

    tokens: int
    cached: int = 0
    """Tokens in the prefix cache, while no rollout runs."""
    users: int = 0
    """Running rollouts."""
    known: bool = False
    """Whether it was computed before."""


@dataclass(eq=False, slots=True)
class Rollout:
    """One rollout and its place in the cache of the engine that it is on."""

    number: int
    group: int
    prompt: Prompt
    generated: list[int]
    """Tokens generated in each turn."""
    answered: list[int]
    """Tokens of the tools' answer after each turn."""
    tool_s: list[float]
    turn: int = 0
    context: int = 0
    """Tokens of the conversation until now; those of the prompt included."""
    cached: int = 0
    """Of its own tokens, behind the prompt, those in the prefix cache."""
    known: int = 0
    """Tokens of the context that were computed before, at any time."""
    left: int = 0
    """Tokens that the present turn must still generate."""
    uncomputed: int = 0
    """Prompt tokens to compute before the turn can go on."""
    ends_at: int = 0
    """The engine's count of iterations at which the turn ends."""
    arrived: float = 0.0


def make_rollouts(seed: int, tools: float, clients: int = 1) -> Iterator[Rollout]:
    """Yield rollouts without end: groups of `GROUP` with one prompt.

    Args:
        seed: of all draws; a rollout depends on the seed and its number alone.
        tools: factor of the duration of tool calls.
        clients: rollouts of this number of groups arrive mixed.
    """
    streams = [_groups(seed, tools, client, clients) for client in range(clients)]
    draw = np.random.default_rng(seed)
    while True:
        yield next(streams[int(draw.integers(clients)) if clients > 1 else 0])


def _groups(seed: int, tools: float, first: int, step: int) -> Iterator[Rollout]:
    for group in count(first, step):
        draw = np.random.default_rng((seed, group))
        tokens = int(np.clip(MEDIAN_PROMPT * draw.lognormal(sigma=0.4), 500, 12_000))
        prompt = Prompt(tokens)
        for member in range(GROUP):
            turns = int(np.clip(round(MEDIAN_TURNS * draw.lognormal(sigma=0.8)), FEWEST_TURNS, MOST_TURNS))
            generated = np.clip(MEDIAN_GENERATED * draw.lognormal(sigma=0.6, size=turns), 8, 4_000).astype(int)
            answered = np.clip(MEDIAN_ANSWERED * draw.lognormal(sigma=0.7, size=turns), 8, 8_000).astype(int)
            fits = int(np.searchsorted(np.cumsum(generated + answered) + tokens, CONTEXT_TOKENS))
            generated, answered = generated[: max(1, fits)], answered[: max(1, fits)]
            yield Rollout(
                GROUP * group + member,
                group,
                prompt,
                generated.tolist(),
                answered.tolist(),
                (tools * _tool_seconds(draw, len(generated))).tolist(),
                context=tokens,
            )


def _tool_seconds(draw: np.random.Generator, count: int) -> np.ndarray:
    """Draw durations: 70 % about 0.5 s, 25 % about 5 s, 5 % with a Pareto tail from 30 to 600 s."""
    kind = draw.random(count)
    short, middle = 0.5 * draw.lognormal(sigma=0.5, size=count), 5.0 * draw.lognormal(sigma=0.5, size=count)
    long = np.minimum(30.0 * (1.0 + draw.pareto(1.2, size=count)), 600.0)
    return np.where(kind < 0.7, short, np.where(kind < 0.95, middle, long))


@dataclass(slots=True)
class Counts:
    """Sums since the start."""

    generated: int = 0
    prompt: int = 0
    """Tokens of all prompts."""
    again: int = 0
    """Prompt tokens that had been computed before and were computed again."""
    preempted: int = 0
    used_s: float = 0.0
    """Integral of the share of KV that running requests use, over time."""


@dataclass(eq=False)
class KvEngine:
    """The engine. Its owner calls `end_step` when `step_ends` has come, and `arrive` for each turn."""

    capacity: int = CAPACITY_TOKENS
    counts: Counts = field(default_factory=Counts)
    longest_wait_s: float = 0.0
    """From a turn's arrival to its admission."""

    def __post_init__(self) -> None:
        self.waiting: deque[Rollout] = deque()
        self.running: dict[Rollout, None] = {}
        """In order of admission."""
        self.step_ends = math.inf
        self._began = 0.0
        self._iterations = 0
        """Iterations of the step under way; 0: none is."""
        self._done = 0
        """Iterations since the start."""
        self._ends: list[tuple[int, int, Rollout]] = []
        """Generating rollouts by the iteration in which their turn ends."""
        self._chunks: list[tuple[Rollout, int]] = []
        """The prompts computed in the step under way."""
        self._idle: OrderedDict[Rollout | Prompt, None] = OrderedDict()
        """What is cached but not in use; the least recently used first."""
        self._idle_tokens = self._resident = self._attended = 0

    @property
    def used(self) -> float:
        """Share of KV that running requests use."""
        return self._resident / self.capacity

    def arrive(self, rollout: Rollout, now: float) -> None:
        """Queue the next turn of a rollout."""
        rollout.left = rollout.generated[rollout.turn]
        rollout.arrived = now
        self.waiting.append(rollout)
        if not self._iterations:
            self._begin_step(now)
        elif self._iterations > 1:  # the turn joins at the end of the iteration under way
            self._iterations = self._iterations_until(now - self._began)
            self.step_ends = self._began + self._cost(self._iterations)

    def end_step(self) -> list[Rollout]:
        """End the step under way and begin the next; return the rollouts whose turn has ended."""
        now, iterations, generating = self.step_ends, self._iterations, len(self._ends)
        self.counts.used_s += (now - self._began) * self.used
        self._done += iterations
        self._grow(iterations * generating)
        ended: list[Rollout] = []
        for rollout, chunk in self._chunks:
            rollout.uncomputed -= chunk
            if not rollout.uncomputed:
                rollout.ends_at = self._done + rollout.left - 1
                self._grow(1)
                heappush(self._ends, (rollout.ends_at, rollout.number, rollout))
        while self._ends and self._ends[0][0] <= self._done:
            ended.append(heappop(self._ends)[2])
        for rollout in ended:
            rollout.context += rollout.left
            rollout.left = 0
            self._stop(rollout)
            rollout.context += rollout.answered[rollout.turn]
            rollout.turn += 1
        self._begin_step(now)
        return ended

    def clear_cache(self) -> None:
        """Forget all prefixes that no running request uses, as after new weights; to compute them is not `again`."""
        for entry in self._idle:
            entry.cached = 0
            entry.known = type(entry.known)()
        self._idle.clear()
        self._idle_tokens = 0

    def stop_all(self) -> list[Rollout]:
        """End the engine's life; return the rollouts that had a turn here."""
        left = [*self.running, *self.waiting]
        for rollout in self.running:
            rollout.prompt.users = 0
        for rollout in left:
            rollout.context += rollout.generated[rollout.turn] - rollout.left
            rollout.cached = rollout.uncomputed = 0
        self.clear_cache()
        self.__post_init__()
        return left

    def _grow(self, tokens: int) -> None:
        self.counts.generated += tokens
        self._resident += tokens
        self._attended += tokens
        self._evict()

    def _cost(self, iterations: int) -> float:
        running = len(self.running)
        first = ITERATION_S + SEQUENCE_S * running + RESIDENT_S * self._attended
        computed = sum(chunk for _, chunk in self._chunks)
        more = RESIDENT_S * len(self._ends) * iterations * (iterations - 1) / 2
        return iterations * first + more + COMPUTED_S * computed

    def _iterations_until(self, elapsed: float) -> int:
        """Return the iterations of the step that have begun after some seconds."""
        first = ITERATION_S + SEQUENCE_S * len(self.running) + RESIDENT_S * self._attended
        growth = RESIDENT_S * len(self._ends) / 2
        begun = elapsed / first if not growth else (math.sqrt(first**2 + 4 * growth * elapsed) - first) / (2 * growth)
        return min(self._iterations, math.floor(begun) + 1)

    def _begin_step(self, now: float) -> None:
        self._chunks = []
        while len(self.running) > 1 and self.capacity - self._resident < len(self._ends) + 1:
            self._preempt()
        budget = CHUNK_TOKENS
        for rollout in self.running:
            if rollout.uncomputed and budget:
                budget = self._compute(rollout, budget)
        while budget and self.waiting and self._admit(self.waiting[0], now):
            budget = self._compute(self.waiting.popleft(), budget)
        self._began = now
        self._iterations = 0
        self.step_ends = math.inf
        if self._chunks:
            self._iterations = 1
        elif self._ends:
            room = (self.capacity - self._resident) // len(self._ends)
            self._iterations = max(1, min(self._ends[0][0] - self._done, room))
        if self._iterations:
            self.step_ends = now + self._cost(self._iterations)

    def _compute(self, rollout: Rollout, budget: int) -> int:
        chunk = min(budget, rollout.uncomputed)
        self._chunks.append((rollout, chunk))
        return budget - chunk

    def _admit(self, rollout: Rollout, now: float) -> bool:
        """Let a rollout run if its whole context fits into what the running ones leave."""
        prompt = rollout.prompt
        own = rollout.context - prompt.tokens
        shared = 0 if prompt.users else prompt.tokens
        if self._resident + own + shared + len(self._ends) + 1 > self.capacity and self.running:
            return False
        hit = prompt.tokens if prompt.users else prompt.cached
        if hit < prompt.tokens:
            self._forget(rollout)
        known = max(rollout.known, prompt.tokens if prompt.known else 0)
        hit += min(rollout.cached, own)
        rollout.uncomputed = max(1, rollout.context - hit)
        self._forget(rollout)
        if not prompt.users:
            self._forget(prompt)
        prompt.users += 1
        prompt.known = True
        rollout.known = rollout.context
        self.running[rollout] = None
        self._resident += own + shared
        self._attended += rollout.context
        self._evict()
        self.counts.prompt += rollout.context
        self.counts.again += max(0, known - hit)
        self.longest_wait_s = max(self.longest_wait_s, now - rollout.arrived)
        return True

    def _preempt(self) -> None:
        """Stop the rollout that was admitted last; it waits as the first one."""
        rollout = next(reversed(self.running))
        self.counts.preempted += 1
        if not rollout.uncomputed:
            self._ends.remove((rollout.ends_at, rollout.number, rollout))
            heapify(self._ends)
            done = rollout.left - (rollout.ends_at - self._done)
            rollout.left -= done
            rollout.context += done
        self._stop(rollout)
        self.waiting.appendleft(rollout)

    def _stop(self, rollout: Rollout) -> None:
        """Free what a running rollout uses; its computed tokens stay cached."""
        prompt = rollout.prompt
        del self.running[rollout]
        self._resident -= rollout.context - prompt.tokens
        self._attended -= rollout.context
        self._keep(rollout, max(0, rollout.context - prompt.tokens - rollout.uncomputed))
        rollout.known = max(rollout.known, rollout.context - rollout.uncomputed)
        rollout.uncomputed = 0
        prompt.users -= 1
        if not prompt.users:
            self._resident -= prompt.tokens
            self._keep(prompt, prompt.tokens)

    def _keep(self, entry: Rollout | Prompt, tokens: int) -> None:
        entry.cached = tokens
        if tokens:
            self._idle[entry] = None
            self._idle_tokens += tokens

    def _forget(self, entry: Rollout | Prompt) -> None:
        if entry in self._idle:
            del self._idle[entry]
            self._idle_tokens -= entry.cached
        entry.cached = 0

    def _evict(self) -> None:
        excess = self._resident + self._idle_tokens - self.capacity
        while excess > 0 and self._idle:
            entry = next(iter(self._idle))
            gone = min(excess, entry.cached)
            entry.cached -= gone
            self._idle_tokens -= gone
            excess -= gone
            if not entry.cached:
                del self._idle[entry]
