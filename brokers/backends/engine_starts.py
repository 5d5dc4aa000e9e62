"""`EngineStarts`: engines that are starting or failed to start, as reported by their owners. Pure.

While an engine is starting, no job's wait for a backend of its model expires; the waits begin when none is starting.
Registered engines, and engines whose owner fell silent, do not count.
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
        self._last: dict[str, float] = {}
        """When an engine of each model was last starting, as of the last `look`."""

    def is_starting(self, model: str) -> bool:
        return any(engine.state == "starting" and engine.name == model for engine in self)

    def last(self, model: str) -> float:
        """Return when an engine of a model was last starting, as of the last `look`."""
        return self._last.get(model, -math.inf)

    def look(self, now: float) -> None:
        """Record which engines are starting; call this before any change."""
        for engine in self:
            if engine.state == "starting":
                self._last[engine.name] = now

    def report(self, report: ReportStarts, now: float) -> None:
        self._reports.pop(report.owner, None)
        if report.engines:
            self._reports[report.owner] = _Report(now, report.engines)

    def tick(self, now: float) -> None:
        for owner in [owner for owner, report in self._reports.items() if report.heard + self._lease_s <= now]:
            del self._reports[owner]

    def models(self) -> set[str]:
        return {engine.name for engine in self}

    def failures(self, model: str) -> str:
        """Return why engines of a model failed to start; empty: none did."""
        failed = [engine for engine in self if engine.state == "failed" and engine.name == model]
        return "; ".join(f"engine {one.backend_id} failed to start: {one.problem or 'see its log'}" for one in failed)

    def __iter__(self) -> Iterator[EngineStart]:
        return (one for report in self._reports.values() for one in report.engines if one.backend_id not in self._heap)
