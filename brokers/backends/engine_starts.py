"""`EngineStarts`: engines that are starting or failed to start, as reported by their owners. Pure.

While an engine is starting, no job's wait for a backend expires; the waits begin when none is starting. Registered
engines, and engines whose owner fell silent, do not count.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...wire.messages.backends import EngineStart, ReportStarts
    from .backend_heap import BackendHeap


class _Report(NamedTuple):
    heard: float
    engines: tuple[EngineStart, ...]


class EngineStarts:
    def __init__(self, heap: BackendHeap, lease_s: float) -> None:
        self._heap = heap
        self._lease_s = lease_s
        self._reports: dict[str, _Report] = {}
        self.last = -math.inf
        """When an engine was last starting, as of the last `look`."""

    @property
    def is_starting(self) -> bool:
        return any(engine.state == "starting" for engine in self)

    def look(self, now: float) -> None:
        """Record whether an engine is starting; call this before any change."""
        if self.is_starting:
            self.last = now

    def report(self, report: ReportStarts, now: float) -> None:
        self._reports.pop(report.owner, None)
        if report.engines:
            self._reports[report.owner] = _Report(now, report.engines)

    def tick(self, now: float) -> None:
        for owner in [owner for owner, report in self._reports.items() if report.heard + self._lease_s <= now]:
            del self._reports[owner]

    def failures(self) -> str:
        failed = [engine for engine in self if engine.state == "failed"]
        return "; ".join(f"engine {one.backend_id} failed to start: {one.problem or 'see its log'}" for one in failed)

    def __iter__(self) -> Iterator[EngineStart]:
        return (one for report in self._reports.values() for one in report.engines if one.backend_id not in self._heap)
