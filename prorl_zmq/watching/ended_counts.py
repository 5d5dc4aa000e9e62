"""`EndedCounts`: how many jobs ended when, over the last ten minutes, from what brokers have counted. Pure.

Times are the wall clock's, which people read; what it does when it is set must not look like jobs, or like none.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from .overview import EndedJobs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..wire.messages.front_door import ServiceStatus
    from ..wire.messages.jobs import Outcome

INTERVAL_S = 10.0
INTERVALS = 60
RATE_S = 30.0
"""What the rate is the mean of."""


class EndedCounts:
    def __init__(self) -> None:
        self._last: dict[str, tuple[float, Mapping[Outcome, int]]] = {}
        """When each broker had counted what, on a steady clock."""
        self._intervals: deque[tuple[float, Counter[Outcome]]] = deque(maxlen=INTERVALS)

    def begin(self) -> None:
        """Count from now on: what ended while nobody looked did so at times that are not known."""
        self._last.clear()

    def add(self, broker: str, status: ServiceStatus, at: float, steady_at: float) -> None:
        """Note what a broker has counted since it was started."""
        last_at, before = self._last.get(broker, (steady_at, status.outcomes))
        if status.uptime_s < steady_at - last_at:
            before = {}
        self._last[broker] = steady_at, status.outcomes
        if self._intervals and at < self._intervals[-1][0]:
            self._intervals.clear()  # the clock was set back
        if not self._intervals or at >= self._intervals[-1][0] + INTERVAL_S:
            self._intervals.append((at, Counter()))
        self._intervals[-1][1].update(
            {outcome: count - before.get(outcome, 0) for outcome, count in status.outcomes.items()}
        )

    def told(self, at: float) -> tuple[EndedJobs, ...]:
        """Return the intervals of the last ten minutes, the oldest first."""
        recent = [one for one in self._intervals if one[0] > at - INTERVAL_S * INTERVALS]
        return tuple(
            EndedJobs(start, min(max(0.0, at - start), INTERVAL_S), {key: n for key, n in counts.items() if n})
            for start, counts in recent
        )

    def per_s(self, at: float) -> float:
        """Return the jobs that ended in a second, of late."""
        recent = [one for one in self.told(at) if one.at > at - RATE_S]
        seconds = sum(one.seconds for one in recent)
        return sum(sum(one.outcomes.values()) for one in recent) / seconds if seconds >= 1.0 else 0.0
