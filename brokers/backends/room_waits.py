"""`RoomWaits`: for how long the jobs of each queue waited while ready backends had no room for them. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

Queue = TypeVar("Queue")


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
