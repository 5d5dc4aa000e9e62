"""A heap of keys by load that removes stale entries lazily; a change and a look-up cost O(log n) amortised.

Of equal loads, the key that changed longest ago is first, so idle keys take turns.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Key = TypeVar("Key", bound=str)

COMPACT_FROM = 64
"""The heap is compacted once it is larger than this and more than three quarters of it is stale."""


class LeastLoaded(Generic[Key]):
    """Keys with a tier and a load each."""

    def __init__(self) -> None:
        self._entries: dict[Key, tuple[int, float, int, Key]] = {}
        self._heap: list[tuple[int, float, int, Key]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def set(self, key: Key, load: float, tier: int = 0) -> None:
        self._sequence += 1
        entry = self._entries[key] = (tier, load, self._sequence, key)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > COMPACT_FROM and len(self._heap) > 4 * len(self._entries):
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def discard(self, key: Key) -> None:
        self._entries.pop(key, None)

    def load(self, key: Key) -> float:
        return self._entries[key][1]

    def tier(self, key: Key) -> int:
        return self._entries[key][0]

    def first(self) -> Key | None:
        """Return the least loaded key of the lowest tier, or None if there are no keys."""
        while self._heap:
            entry = self._heap[0]
            key = entry[3]
            if self._entries.get(key) is entry:
                return key
            heapq.heappop(self._heap)
        return None

    def first_but(self, is_excluded: Callable[[Key], bool]) -> Key | None:
        """Return the first key, as `first` does, that is not excluded; costs O(n)."""
        entry = min((entry for key, entry in self._entries.items() if not is_excluded(key)), default=None)
        return entry[3] if entry is not None else None
