"""The waits of the jobs of each queue. Pure: no clock.

`RoomWaits`: for how long they waited while ready backends had no room for them. `WaitLimits`: when their waits expire,
without a look at each of them.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Queue = TypeVar("Queue")

COMPACT_FROM = 64
"""Waits of one duration that are kept without a look at which of them still count."""


@dataclass(slots=True)
class _Waited:
    last: float
    seconds: float = 0.0


class RoomWaits(Generic[Queue]):
    def __init__(self) -> None:
        self._waited: dict[Queue, _Waited] = {}
        self._looked = 0.0

    def look(self, waiting: Iterable[Queue], now: float) -> None:
        """Record which queues have waited for room since the last call.

        Call this before any change while jobs wait, and when the first one comes.

        Args:
            waiting: the queues whose jobs wait for room.
            now: the time in seconds.
        """
        for queue in waiting:
            waited = self._waited.setdefault(queue, _Waited(now))
            waited.last = now
            waited.seconds += now - self._looked
        self._looked = now

    def last(self, queue: Queue) -> float:
        """Return when its jobs last waited for room; -inf: they did not."""
        waited = self._waited.get(queue)
        return waited.last if waited is not None else -math.inf

    def seconds(self, queue: Queue) -> float:
        """Return for how long its jobs waited for room so far; a job's own wait is the difference since it came."""
        waited = self._waited.get(queue)
        return waited.seconds if waited is not None else 0.0

    def forget(self, queue: Queue) -> None:
        self._waited.pop(queue, None)


class Wait(NamedTuple):
    since: float
    wait_s: float


class WaitLimits:
    """The waits of jobs; a job's entry counts for as long as `wait_of` returns the same wait.

    Args:
        wait_of: the wait of a job now; None: it does not wait.
    """

    def __init__(self, wait_of: Callable[[str], Wait | None]) -> None:
        self._wait_of = wait_of
        self._by_duration: dict[float, list[tuple[float, str]]] = {}
        """Heaps of jobs by the beginning of their wait: at any time, those of one duration expire in this order."""
        self._most: dict[float, int] = {}
        """The size at which a heap is compacted next; `COMPACT_FROM` if it was not yet."""

    def add(self, job_id: str, wait: Wait) -> None:
        heap = self._by_duration.setdefault(wait.wait_s, [])
        heapq.heappush(heap, (wait.since, job_id))
        if len(heap) > self._most.get(wait.wait_s, COMPACT_FROM):
            heap[:] = {(since, job) for since, job in heap if self._wait_of(job) == (since, wait.wait_s)}
            heapq.heapify(heap)
            self._most[wait.wait_s] = max(COMPACT_FROM, 2 * len(heap))

    def next_expiry(self, last: float) -> float | None:
        """Return when the first wait expires; None: no job waits.

        Args:
            last: no wait begins earlier.
        """
        firsts = ((wait_s, self._first(wait_s)) for wait_s in tuple(self._by_duration))
        return min((max(first, last) + wait_s for wait_s, first in firsts if first is not None), default=None)

    def take_expired(self, last: float, now: float) -> list[str]:
        """Return the jobs whose waits have expired, and forget them."""
        expired: dict[str, None] = {}
        for wait_s in tuple(self._by_duration):
            while (first := self._first(wait_s)) is not None and max(first, last) + wait_s <= now:
                expired[heapq.heappop(self._by_duration[wait_s])[1]] = None
        return [*expired]

    def _first(self, wait_s: float) -> float | None:
        """Return when the first wait of a duration began; forget entries that no longer count."""
        heap = self._by_duration[wait_s]
        while heap:
            since, job_id = heap[0]
            if self._wait_of(job_id) == (since, wait_s):
                return since
            heapq.heappop(heap)
        del self._by_duration[wait_s]
        self._most.pop(wait_s, None)
        return None
