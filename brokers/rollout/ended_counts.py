"""`EndedCounts`: how many jobs ended in each 10 seconds of the last hour. Pure.

The broker hands over its counts of outcomes once per heartbeat, and before it answers a watcher, so jobs cost nothing
here. Times are the wall clock's, rounded down to whole intervals, so that those of several brokers can be added up.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from ...wire.messages.watching import ENDED_INTERVAL_S, EndedJobs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...wire.messages.jobs import Outcome

INTERVALS = 360


class EndedCounts:
    def __init__(self) -> None:
        self._before: Mapping[Outcome, int] = {}
        """The counts that were noted last."""
        self._intervals: deque[tuple[float, Counter[Outcome]]] = deque(maxlen=INTERVALS)
        """Those in which jobs ended, by their start."""

    def note(self, outcomes: Mapping[Outcome, int], at: float) -> None:
        """Note how many jobs have ended by now, since the broker was started."""
        if outcomes == self._before:
            return
        new = Counter({outcome: count - self._before.get(outcome, 0) for outcome, count in outcomes.items()})
        self._before = dict(outcomes)
        start = at - at % ENDED_INTERVAL_S
        while self._intervals and self._intervals[-1][0] > start:
            self._intervals.pop()  # the clock was set back
        if not self._intervals or self._intervals[-1][0] < start:
            self._intervals.append((start, Counter()))
        self._intervals[-1][1].update(+new)

    def intervals(self) -> tuple[EndedJobs, ...]:
        """Return the intervals in which jobs ended, the oldest first."""
        return tuple(EndedJobs(start, ENDED_INTERVAL_S, dict(counts)) for start, counts in self._intervals)
