"""`SizedCache`: values by key, of which the oldest are evicted when their total exceeds a limit."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

V = TypeVar("V")


class SizedCache(Generic[V]):
    """Args: limits of the values' total size in bytes, and of their number."""

    def __init__(self, limit_bytes: int, limit: float = math.inf) -> None:
        self._limit_bytes = limit_bytes
        self._limit = limit
        self._values: OrderedDict[str, tuple[V, int]] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def get(self, key: str) -> V | None:
        found = self._values.get(key)
        return found[0] if found is not None else None

    def put(self, key: str, value: V, size_bytes: int) -> list[tuple[str, V]]:
        """Add or replace a value as the newest; return the replaced and evicted values.

        A caller that keeps the list decides when the memory of large values is freed.
        """
        gone = []
        if (before := self._values.pop(key, None)) is not None:
            gone.append((key, before[0]))
            self.size_bytes -= before[1]
        self._values[key] = value, size_bytes
        self.size_bytes += size_bytes
        while self.size_bytes > self._limit_bytes or len(self._values) > self._limit:
            oldest, (evicted, size) = self._values.popitem(last=False)
            self.size_bytes -= size
            gone.append((oldest, evicted))
        return gone

    def change(self, key: str, value: V) -> None:
        """Replace the value of an existing key, with the same size and age."""
        self._values[key] = value, self._values[key][1]

    def drop(self, key: str) -> None:
        """Remove a key, if present."""
        if (found := self._values.pop(key, None)) is not None:
            self.size_bytes -= found[1]
