"""`critical_path`: the chain of works that determined a run's length, followed back from its end.

A work is preceded by the work whose end freed its slot; a rollout's submission by the rollout that ended last, after
which its client submitted more. So the chain's seconds add up to the whole time.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

from ..wire.messages.jobs import Phase
from .parts import CLIENT, HANDOVER, WAIT

if TYPE_CHECKING:
    from .recording import Recording
    from .rollout import Rollout

WAIT_S = 0.02
"""A shorter wait is the broker's overhead, not a wait for a slot."""
Place = tuple[float, int, int]
"""When a work ended, the index of its rollout, and its index there."""


@dataclass(slots=True)
class CriticalPath:
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds by part."""
    job_ids: list[str] = field(default_factory=list)
    """The chain's rollouts, the last one first."""

    def add(self, part: str, seconds: float) -> None:
        if seconds > 0:
            self.parts[part] = self.parts.get(part, 0.0) + seconds


def critical_path(recording: Recording) -> CriticalPath:
    return _Walk(recording).path


class _Walk:
    def __init__(self, recording: Recording) -> None:
        self.path = CriticalPath()
        self._rollouts = recording.rollouts
        self._began = recording.began
        self._by_node = recording.by_node
        self._ends: dict[tuple[Phase, str], list[Place]] = {}
        for number, rollout in enumerate(self._rollouts):
            for index, work in enumerate(rollout.works):
                self._ends.setdefault(self._slots(work.phase, work.node), []).append((work.ended, number, index))
        for places in self._ends.values():
            places.sort()
        self._ended = sorted((one.ended, number) for number, one in enumerate(self._rollouts) if one.ended is not None)
        last = max(range(len(self._rollouts)), key=lambda number: _end(self._rollouts[number], recording.ended))
        waits = self._rollouts[last].waits
        since = waits[1] if waits is not None and recording.now is not None else recording.ended
        if waits is not None:
            self.path.add(WAIT + waits[0].upper(), recording.ended - since)
        self._walk(last, since)

    def _slots(self, phase: Phase, node: str) -> tuple[Phase, str]:
        return phase, node if self._by_node and phase != Phase.INIT else ""

    def _walk(self, number: int, at: float) -> None:
        rollout, index = self._rollouts[number], len(self._rollouts[number].works) - 1
        self.path.job_ids.append(rollout.job_id)
        seen: set[tuple[int, int]] = set()
        while (number, index) not in seen:
            seen.add((number, index))
            if index < 0:
                before = self._ended_before(rollout.accepted, number)
                if before is None or rollout.accepted - self._began <= WAIT_S:
                    self.path.add(CLIENT, at - self._began)
                    return
                self.path.add(HANDOVER, at - rollout.accepted)
                ended, number = before
                self.path.add(CLIENT, rollout.accepted - ended)
                rollout, at = self._rollouts[number], ended
                index = len(rollout.works) - 1
                self.path.job_ids.append(rollout.job_id)
                continue
            work = rollout.works[index]
            self.path.add(HANDOVER, at - work.ended)
            for part, seconds in work.parts.items():
                self.path.add(part, seconds)
            at = work.began
            before_it = self._freed(number, index) if work.began - work.queued_at > WAIT_S else None
            if before_it is None:
                index -= 1
                continue
            _, number, index = before_it
            if self._rollouts[number] is not rollout:
                rollout = self._rollouts[number]
                self.path.job_ids.append(rollout.job_id)

    def _freed(self, number: int, index: int) -> Place | None:
        """Return the work whose end gave a work its slot, if one ended while that waited."""
        work = self._rollouts[number].works[index]
        places = self._ends[self._slots(work.phase, work.node)]
        for last in reversed(range(bisect_right(places, work.began, key=itemgetter(0)))):
            place = places[last]
            if place[0] <= work.queued_at:
                return None
            if place[1:] != (number, index):
                return place
        return None

    def _ended_before(self, at: float, number: int) -> tuple[float, int] | None:
        found = bisect_right(self._ended, at, key=itemgetter(0))
        return next((self._ended[last] for last in reversed(range(found)) if self._ended[last][1] != number), None)


def _end(rollout: Rollout, now: float) -> tuple[bool, float, bool]:
    """Return the order of rollouts' ends; a working rollout that has not ended comes before a waiting one."""
    return not rollout.cut_off, rollout.ended if rollout.ended is not None else now, rollout.waits is None
