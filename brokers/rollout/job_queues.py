"""Jobs that wait for a phase, in the order in which they were accepted, one queue for each need. Pure.

An entry names a job's attempt, and is dropped when it comes to the head and the job has moved on. Jobs that INIT may
not start now, since their session holds too much, are set aside, so that they do not stand before the others.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

from ...wire.messages.jobs import Phase
from .job_record import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from .job_record import JobRecord
    from .stage_pool import Requirement


class _Entry(NamedTuple):
    sequence: int
    job_id: str
    attempt: int


class JobQueues:
    """The queues of all needs.

    Args:
        records: the jobs that have not ended, by id.
    """

    def __init__(self, records: Mapping[str, JobRecord]) -> None:
        self._records = records
        self._queues: dict[Phase, dict[Requirement, list[_Entry]]] = {phase: {} for phase in Phase}
        self._unserved_since: dict[Requirement, float] = {}
        self.may_start: Callable[[str], bool] = lambda _: True
        """Says of a session whether INIT may start its jobs now."""
        self._set_aside: dict[str, list[tuple[Requirement, _Entry]]] = {}
        """Entries of INIT's queues, of sessions that may not start jobs now."""

    def push(self, record: JobRecord) -> None:
        """Have a job wait, under the attempt that it has now."""
        entry = _Entry(record.sequence, record.job_id, record.attempt)
        heapq.heappush(self._queues[record.phase].setdefault(record.need, []), entry)

    def append(self, record: JobRecord) -> None:
        """Have a job wait behind all others of its need: the quicker way for many that come in order."""
        entry = _Entry(record.sequence, record.job_id, record.attempt)
        self._queues[record.phase].setdefault(record.need, []).append(entry)  # a sorted list is a heap

    def needs(self, phase: Phase) -> Collection[Requirement]:
        """Give what jobs wait for, of a phase; a view."""
        return self._queues[phase].keys()

    def head(self, need: Requirement) -> JobRecord | None:
        """Give the oldest job that waits with a need."""
        queue = self._queues[need.role].get(need, [])
        while queue:
            record = self._waiting(queue[0])
            if record is not None and (need.role != Phase.INIT or self.may_start(record.session)):
                return record
            entry = heapq.heappop(queue)
            if record is not None:
                self._set_aside.setdefault(record.session, []).append((need, entry))
        return None

    def pop(self, need: Requirement) -> None:
        """Take the head away."""
        heapq.heappop(self._queues[need.role][need])

    def look_at_sessions_again(self) -> None:
        """Have the jobs wait again of sessions that may start some now."""
        for session in [session for session in self._set_aside if self.may_start(session)]:
            for need, entry in self._set_aside.pop(session):
                heapq.heappush(self._queues[need.role].setdefault(need, []), entry)

    def served(self, need: Requirement) -> None:
        """Somebody could take the jobs of a need, or there is none."""
        self._unserved_since.pop(need, None)
        if self.head(need) is None:
            del self._queues[need.role][need]

    def unserved(self, need: Requirement, now: float) -> list[tuple[JobRecord, float]]:
        """Nobody could take the jobs of a need: give each, and since when it waits in vain."""
        since = self._unserved_since.setdefault(need, now)
        records = [self._waiting(entry) for entry in sorted(self._queues[need.role][need])]
        return [(record, max(record.since, since)) for record in records if record is not None]

    def _waiting(self, entry: _Entry) -> JobRecord | None:
        """Give the job of an entry if it still waits there: an ended job's id may belong to a new one."""
        record = self._records.get(entry.job_id)
        found = (record.place, record.sequence, record.attempt) if record is not None else None
        return record if found == (Place.QUEUED, entry.sequence, entry.attempt) else None
