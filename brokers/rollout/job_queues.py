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
    from collections.abc import Callable, Iterator, KeysView, Mapping

    from .job_record import JobRecord
    from .stage_pool import Requirement


RETURN_S = 10.0
"""Within it a supervisor has started a stage process again that died, on a node that lives."""


class _Entry(NamedTuple):
    sequence: int
    job_id: str
    attempt: int


class JobQueues:
    def __init__(self, records: Mapping[str, JobRecord]) -> None:
        self._records = records
        self._queues: dict[Phase, dict[Requirement, list[_Entry]]] = {phase: {} for phase in Phase}
        self._unserved_since: dict[Requirement, float | None] = {}
        """What no process could give when it was looked at; when that was seen first in `overdue`."""
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

    def requirements(self, phase: Phase, among: KeysView[Requirement] | None = None) -> list[Requirement]:
        """Return what jobs wait for, of a phase; `among` some."""
        queues = self._queues[phase]
        if among is None or len(queues) < len(among):
            return [requirement for requirement in queues if among is None or requirement in among]
        return [requirement for requirement in among if requirement in queues]

    def is_waited_for(self, requirement: Requirement) -> bool:
        return requirement in self._queues[requirement.role]

    def head(self, requirement: Requirement) -> JobRecord | None:
        queue = self._queues[requirement.role].get(requirement)
        while queue:
            record = self._waiting(queue[0])
            if record is not None and (requirement.role != Phase.INIT or self.may_start(record.holder)):
                return record
            entry = self.pop(requirement)
            if record is not None:
                self._set_aside.setdefault(record.holder, []).append((requirement, entry))
        return None

    def pop(self, requirement: Requirement) -> _Entry:
        queues = self._queues[requirement.role]
        entry = heapq.heappop(queues[requirement])
        if not queues[requirement]:
            del queues[requirement]
        return entry

    def look_at_sessions_again(self) -> None:
        """Have the jobs wait again of sessions that may start some now."""
        for session in [session for session in self._set_aside if self.may_start(session)]:
            for requirement, entry in self._set_aside.pop(session):
                heapq.heappush(self._queues[requirement.role].setdefault(requirement, []), entry)
                self.watch(requirement)

    def waiting(self, requirement: Requirement) -> list[JobRecord]:
        """Return the jobs that wait for a requirement, in order."""
        entries = sorted(self._queues[requirement.role].get(requirement, ()))
        return [record for entry in entries if (record := self._waiting(entry)) is not None]

    def watch(self, requirement: Requirement) -> None:
        """Look at a requirement: perhaps no process meets it."""
        self._unserved_since.setdefault(requirement, None)

    def overdue(self, can_serve: Callable[[Requirement], bool], now: float) -> Iterator[tuple[JobRecord, float]]:
        """Yield the jobs that have waited too long for a process, with their limits in seconds."""
        for requirement, seen_at in tuple(self._unserved_since.items()):
            if self.head(requirement) is None or can_serve(requirement):
                del self._unserved_since[requirement]
                continue
            since = self._unserved_since[requirement] = now if seen_at is None else seen_at
            for record in self.waiting(requirement):
                limit_s = record.stage_wait_s if requirement.node is None else min(record.stage_wait_s, RETURN_S)
                if now - max(record.since, since) >= limit_s:
                    yield record, limit_s

    def _waiting(self, entry: _Entry) -> JobRecord | None:
        """Return the job of an entry if it still waits there: an ended job's id may belong to a new one."""
        record = self._records.get(entry.job_id)
        if record is None or record.status != JobStatus.QUEUED:
            return None
        return record if record.sequence == entry.sequence and record.attempt == entry.attempt else None
