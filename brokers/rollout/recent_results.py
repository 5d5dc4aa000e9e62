"""`RecentResults`: what the jobs brought that were collected last, for who looks at them (`Peek`). Pure.

A block that was in memory when its client had it stays there, by reference; it is never read or copied for this. The
oldest go when all take more than a limit, and all of them with the process.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from ..journal.records import StoredBlock

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...wire.messages.jobs import Result
    from ...wire.sockets import Frame
    from ..journal.records import Finished

FIXED_BYTES = 4096
"""More than what most results take in memory without their notes and steps."""
STEP_BYTES = 160


class RecentResult(NamedTuple):
    result: Result
    block: Frame | None
    """None: it has no tokens, or its block was not in memory."""


class RecentResults:
    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._results: OrderedDict[str, tuple[RecentResult, int]] = OrderedDict()
        self._bytes = 0

    def get(self, job_id: str) -> RecentResult | None:
        found = self._results.get(job_id)
        return found[0] if found is not None else None

    def keep(self, collected: Iterable[Finished]) -> list[RecentResult]:
        """Keep these, the newest; return those that had to go, so that the caller decides when to free their memory."""
        gone = []
        for finished in collected:
            recent = _recent(finished)
            gone += self._drop(recent.result.job_id)
            size = _size(recent)
            self._results[recent.result.job_id] = recent, size
            self._bytes += size
        while self._bytes > self._limit_bytes:
            gone += self._drop(next(iter(self._results)))
        return gone

    def _drop(self, job_id: str) -> list[RecentResult]:
        if job_id not in self._results:
            return []
        recent, size = self._results.pop(job_id)
        self._bytes -= size
        return [recent]


def _recent(finished: Finished) -> RecentResult:
    result = finished.result
    if result.kept is not None:  # its node forgets the block now
        result = replace(result, kept=None)
    return RecentResult(result, None if isinstance(finished.block, StoredBlock) else finished.block)


def _size(recent: RecentResult) -> int:
    notes = sum(map(len, recent.result.notes.values()))
    return FIXED_BYTES + STEP_BYTES * len(recent.result.steps) + notes + len(recent.block or b"")
