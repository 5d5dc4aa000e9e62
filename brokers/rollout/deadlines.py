"""`Deadlines`: one deadline per key; the cost of a look depends on the number of due keys only. Pure.

Moving a deadline to a later time costs nothing until its earlier time comes.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

Key = TypeVar("Key", str, int)

MOVES = 20_000
"""Most postponed deadlines that one look re-inserts, so a fleet that started at one moment causes no long look."""
SPARE_ENTRIES = 64
"""Heap entries beyond twice the number of keys at which stale entries are removed."""


class Deadlines(Generic[Key]):
    def __init__(self) -> None:
        self._at: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: Key) -> bool:
        return key in self._at

    def set(self, key: Key, at: float) -> None:
        """Set or replace the deadline of a key."""
        before = self._at.get(key)
        self._at[key] = at
        if before is None or at < before:
            heapq.heappush(self._heap, (at, key))
            if len(self._heap) > 2 * len(self._at) + SPARE_ENTRIES:
                self._heap = [(when, one) for one, when in self._at.items()]
                heapq.heapify(self._heap)

    def discard(self, key: Key) -> None:
        self._at.pop(key, None)

    def due(self, now: float) -> Iterator[Key]:
        """Remove and yield the due keys, earliest first; after `MOVES` postponed keys, the rest waits."""
        moves = 0
        while self._heap and self._heap[0][0] <= now and moves < MOVES:
            when, key = heapq.heappop(self._heap)
            at = self._at.get(key)
            if at is not None and at > when:
                heapq.heappush(self._heap, (at, key))
                moves += 1
            elif at is not None:
                del self._at[key]
                yield key
