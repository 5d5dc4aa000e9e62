"""Replay recorded rollouts through the same slots with a change.

An event simulation: first come, first served, each work as long as recorded times the change's factor. INIT goes to the
node with the most free slots, and later phases stay there if the recorded ones did. The load of engines and machines is
not modelled, so a gain is an upper bound.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from ..wire.messages.jobs import Phase
from .rollout import Rollout, Work

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .recording import Recording

Factor = Callable[[Rollout, Work, str], float]
ANY = ""
"""Of jobs that may go to any node."""
FULL, SOON = 0.8, 0.1
"""A client waits for results before it submits more if it nearly always has this share of its most in flight, and
submits this soon after a result, as a share of a rollout."""


def unchanged(_rollout: Rollout, _work: Work, _part: str) -> float:
    return 1.0


@dataclass(frozen=True, slots=True)
class Change:
    factor: Factor = unchanged
    """By which a part's seconds are multiplied."""
    slots: Mapping[Phase, float] = field(default_factory=dict)
    """By which a stage's slots are multiplied."""
    at_once: bool = False
    """All rollouts are submitted at the beginning."""


def replay(recording: Recording, change: Change | None = None) -> float:
    """Return how long the rollouts would have taken, in seconds."""
    return _Replay(recording, change or Change()).run()


@dataclass(slots=True)
class _Job:
    works: list[tuple[Phase, float]]
    waited_for: bool
    node: str = ANY
    at: int = 0


class _Replay:
    def __init__(self, recording: Recording, change: Change) -> None:
        self._by_node = recording.by_node
        self._free: dict[Phase, dict[str, int]] = {phase: {} for phase in Phase}
        for (phase, node), count in recording.slots.items():
            free, place = self._free[phase], node if self._by_node else ANY
            free[place] = free.get(place, 0) + max(1, round(count * change.slots.get(phase, 1.0)))
        self._jobs = [
            _Job([(work.phase, _seconds(rollout, work, change.factor)) for work in rollout.works], waited_for)
            for rollout, waited_for in zip(recording.rollouts, _waited_for(recording), strict=True)
        ]
        self._waited_for = sum(job.waited_for for job in self._jobs)
        self._queues: dict[tuple[Phase, str], deque[tuple[int, int]]] = {}
        self._events: list[tuple[float, int, int, tuple[Phase, str] | None]] = []
        """Time, number, job, and the slot that it frees."""
        self._number = 0
        self._now = 0.0
        self._ends = 0
        self._later: dict[int, list[tuple[int, float]]] = {}
        """Jobs to submit after so many ends, each with its delay."""
        for job, (ends, after_s) in enumerate(_arrivals(recording, at_once=change.at_once)):
            if ends:
                self._later.setdefault(ends, []).append((job, after_s))
            else:
                self._note(after_s, job, None)

    def run(self) -> float:
        """Return when the last job that is waited for ended."""
        while self._events and self._waited_for:
            self._now, _, job, slot = heapq.heappop(self._events)
            if slot is not None:
                self._leave(slot)
                self._jobs[job].at += 1
            self._enter(job)
        return self._now

    def _note(self, at: float, job: int, slot: tuple[Phase, str] | None) -> None:
        self._number += 1
        heapq.heappush(self._events, (at, self._number, job, slot))

    def _enter(self, number: int) -> None:
        """Queue a job for its next work, or begin it."""
        job = self._jobs[number]
        if job.at == len(job.works):
            self._ends += 1
            self._waited_for -= job.waited_for
            for later, after_s in self._later.pop(self._ends, ()):
                self._note(self._now + after_s, later, None)
            return
        phase, _ = job.works[job.at]
        free = self._free[phase]
        if phase == Phase.INIT or job.node not in free:
            job.node = ANY
            node = max(free, key=free.__getitem__)
        else:
            node = job.node
        if free[node]:
            self._begin(number, phase, node)
        else:
            self._number += 1
            self._queues.setdefault((phase, job.node), deque()).append((self._number, number))

    def _begin(self, number: int, phase: Phase, node: str) -> None:
        self._free[phase][node] -= 1
        job = self._jobs[number]
        job.node = node
        self._note(self._now + job.works[job.at][1], number, (phase, node))

    def _leave(self, slot: tuple[Phase, str]) -> None:
        phase, node = slot
        self._free[phase][node] += 1
        waiting = [queue for place in {node, ANY} if (queue := self._queues.get((phase, place)))]
        if waiting:
            _, job = min(waiting, key=lambda queue: queue[0]).popleft()
            self._begin(job, phase, node)


def _waited_for(recording: Recording) -> list[bool]:
    cut_off = [rollout.cut_off for rollout in recording.rollouts]
    return [all(cut_off) or not each for each in cut_off]


def _seconds(rollout: Rollout, work: Work, factor: Factor) -> float:
    return sum(seconds * factor(rollout, work, part) for part, seconds in work.parts.items())


def _arrivals(recording: Recording, *, at_once: bool) -> list[tuple[int, float]]:
    """Return each rollout's arrival: after how many ends, and the delay from there; 0: from the beginning."""
    rollouts = recording.rollouts
    if at_once:
        return [(0, 0.0)] * len(rollouts)
    ends = sorted(rollout.ended for rollout in rollouts if rollout.ended is not None)
    before = [bisect_right(ends, rollout.accepted) for rollout in rollouts]
    if not _waits_for_results(recording, ends, before):
        return [(0, rollout.accepted - recording.began) for rollout in rollouts]
    since = [ends[count - 1] if count else recording.began for count in before]
    return [(n, one.accepted - at) for n, one, at in zip(before, rollouts, since, strict=True)]


def _waits_for_results(recording: Recording, ends: list[float], before: list[int]) -> bool:
    flights = [number + 1 - count for number, count in enumerate(before)]
    later = [number for number, count in enumerate(before) if count]
    if not later:
        return False
    usual_s = median(rollout.worked_s for rollout in recording.rollouts)
    full = sum(flights[number] >= FULL * max(flights) for number in later) >= FULL * len(later)
    return full and median(
        recording.rollouts[number].accepted - ends[before[number] - 1] for number in later
    ) <= SOON * max(usual_s, 1e-3)
