"""`KvFigures`: the state of an engine's KV cache, as the engine reports it; and `KvMeter`, which averages it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


@dataclass(frozen=True, slots=True)
class KvFigures:
    """The KV caches of an engine, together."""

    capacity_tokens: int
    used: float
    """Share of the capacity in use by running requests: the mean over the time since the last figures. Cached prefixes
    that no running request uses do not count."""
    preempted: int
    """Preemptions since the last figures."""
    waiting: int
    """Requests that wait in the engine now."""


@dataclass(slots=True)
class _Cache:
    capacity_tokens: int
    used: float = 0.0
    waiting: int = 0
    at: float | None = None
    """Since when it is used to this share; None: no step was reported."""
    used_s: float = 0.0
    """The integral of the share since the last figures."""


class KvMeter:
    """Collects what the steps of an engine report; engines with data parallelism have several caches."""

    def __init__(self) -> None:
        self._caches: dict[int, _Cache] = {}
        self._preempted = 0
        self._taken: float | None = None
        """When the last figures were taken."""

    def add_cache(self, index: int, capacity_tokens: int) -> None:
        """Add a cache, or record the capacity that it has now."""
        known = self._caches.get(index)
        if known is None:
            self._caches[index] = _Cache(capacity_tokens)
        else:
            known.capacity_tokens = capacity_tokens

    def keep_only(self, indices: Collection[int]) -> None:
        """Forget all other caches."""
        self._caches = {index: cache for index, cache in self._caches.items() if index in indices}

    def note_step(self, index: int, used: float, waiting: int, preempted: int, now: float) -> None:
        """Record the state of a cache after a step; one that was not added is ignored."""
        cache = self._caches.get(index)
        if cache is not None:
            _pass(cache, now)
            cache.used, cache.waiting = used, waiting
            self._preempted += preempted

    def take(self, now: float) -> KvFigures | None:
        """Return the figures since the last call; None: there is no cache with a capacity.

        An engine without work reports no steps, so its last state counts.
        """
        caches = [cache for cache in self._caches.values() if cache.capacity_tokens > 0]
        capacity = sum(cache.capacity_tokens for cache in caches)
        if not capacity:
            return None
        elapsed, self._taken = now - self._taken if self._taken is not None else 0.0, now
        used = 0.0
        for cache in caches:
            _pass(cache, now)
            mean = cache.used_s / elapsed if elapsed > 0 else cache.used
            used += min(mean, 1.0) * cache.capacity_tokens / capacity
            cache.used_s = 0.0
        preempted, self._preempted = self._preempted, 0
        return KvFigures(capacity, used, preempted, sum(cache.waiting for cache in caches))


def _pass(cache: _Cache, now: float) -> None:
    if cache.at is not None:
        cache.used_s += (now - cache.at) * cache.used
    cache.at = now
