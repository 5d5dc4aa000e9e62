"""Which of many is least loaded, and of equals, for longest: a heap whose stale entries drop out late.

A change of load pushes a new entry and leaves the old one in the heap; an entry counts only while it is its key's
newest. So a change costs O(log n), and the answer O(log n) amortised. Keyed by load alone, a heap would give every
idle assignment to the same key; the sequence number behind it passes the turn around.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

Key = TypeVar("Key", bound=str)

COMPACT_FROM = 64
"""Stale entries are cleared out when the heap is larger than this and mostly stale."""


class LeastLoaded(Generic[Key]):
    """Keys with a load each; knows the one with the smallest load, ties going to the one that changed longest ago."""

    def __init__(self) -> None:
        self._entries: dict[Key, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def set(self, key: Key, load: float) -> None:
        """Add the key, or change its load; it goes to the end of those with an equal load."""
        self._sequence += 1
        self._entries[key] = (load, self._sequence)
        heapq.heappush(self._heap, (load, self._sequence, key))
        if len(self._heap) > COMPACT_FROM and len(self._heap) > 4 * len(self._entries):
            self._heap = [(load, sequence, key) for key, (load, sequence) in self._entries.items()]
            heapq.heapify(self._heap)

    def discard(self, key: Key) -> None:
        """Remove the key if it is there."""
        self._entries.pop(key, None)

    def first(self) -> Key | None:
        """Give the least loaded key; None if there are none."""
        while self._heap:
            load, sequence, key = self._heap[0]
            if self._entries.get(key) == (load, sequence):
                return key
            heapq.heappop(self._heap)
        return None
