"""Jobs that wait for a phase, in the order in which they were accepted, one queue for each requirement. Pure.

An entry names a job's attempt, and is dropped when it comes to the head and the job has moved on. Jobs that INIT may
not start now, since their session holds too much, are set aside, so that they do not stand before the others.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

from ...wire.messages.jobs import Phase
from .job_record import JobStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from .job_record import JobRecord
    from .stage_pool import Requirement


class _Entry(NamedTuple):
    sequence: int
    job_id: str
    attempt: int


class JobQueues:
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
        heapq.heappush(self._queues[record.phase].setdefault(record.requirement, []), entry)

    def append(self, record: JobRecord) -> None:
        """Have a job wait behind all others of its requirement: the quicker way for many that come in order."""
        entry = _Entry(record.sequence, record.job_id, record.attempt)
        self._queues[record.phase].setdefault(record.requirement, []).append(entry)  # a sorted list is a heap

    def requirements(self, phase: Phase) -> Collection[Requirement]:
        """Return what jobs wait for, of a phase; a view."""
        return self._queues[phase].keys()

    def head(self, requirement: Requirement) -> JobRecord | None:
        queue = self._queues[requirement.role].get(requirement, [])
        while queue:
            record = self._waiting(queue[0])
            if record is not None and (requirement.role != Phase.INIT or self.may_start(record.holder)):
                return record
            entry = heapq.heappop(queue)
            if record is not None:
                self._set_aside.setdefault(record.holder, []).append((requirement, entry))
        return None

    def pop(self, requirement: Requirement) -> None:
        heapq.heappop(self._queues[requirement.role][requirement])

    def look_at_sessions_again(self) -> None:
        """Have the jobs wait again of sessions that may start some now."""
        for session in [session for session in self._set_aside if self.may_start(session)]:
            for requirement, entry in self._set_aside.pop(session):
                heapq.heappush(self._queues[requirement.role].setdefault(requirement, []), entry)

    def served(self, requirement: Requirement) -> None:
        """A process could take the jobs of a requirement, or there is none."""
        self._unserved_since.pop(requirement, None)
        if self.head(requirement) is None:
            del self._queues[requirement.role][requirement]

    def unserved(self, requirement: Requirement, now: float) -> list[tuple[JobRecord, float]]:
        """No process could take the jobs of a requirement: yield each, and since when it waits unserved."""
        since = self._unserved_since.setdefault(requirement, now)
        records = [self._waiting(entry) for entry in sorted(self._queues[requirement.role][requirement])]
        return [(record, max(record.since, since)) for record in records if record is not None]

    def _waiting(self, entry: _Entry) -> JobRecord | None:
        """Return the job of an entry if it still waits there: an ended job's id may belong to a new one."""
        record = self._records.get(entry.job_id)
        found = (record.status, record.sequence, record.attempt) if record is not None else None
        return record if found == (JobStatus.QUEUED, entry.sequence, entry.attempt) else None
