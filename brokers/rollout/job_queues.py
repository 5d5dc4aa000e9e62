"""`JobQueues`: jobs that wait for a phase, one queue per requirement, in fair order (`fair_queue`). Pure.

An entry is an attempt of a job; an entry whose job has moved on is dropped at the head. Flows whose sessions hold too
much for INIT to start more jobs are set aside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...wire.messages.jobs import Phase
from .fair_queue import Entry, FairQueue
from .job_record import JobStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, KeysView, Mapping

    from .job_record import JobRecord
    from .stage_pool import Requirement


RETURN_S = 10.0
"""Seconds within which a supervisor restarts a stage process that died, on a live node."""


class JobQueues:
    def __init__(self, records: Mapping[str, JobRecord]) -> None:
        self._records = records
        self._queues: dict[Phase, dict[Requirement, FairQueue]] = {phase: {} for phase in Phase}
        self._unserved_since: dict[Requirement, float | None] = {}
        """Requirements that no process met, and when `overdue` first saw that."""
        self.may_start: Callable[[str], bool] = lambda _: True
        """Returns whether INIT may start jobs of a flow now."""
        self._set_aside: dict[str, list[Entry]] = {}
        """INIT's entries of flows that may not start jobs now."""

    def push(self, record: JobRecord) -> None:
        """Queue a job under its current attempt."""
        self._queue_of(record).push(record.flow, Entry(record.sequence, record.job_id, record.attempt))

    def append(self, record: JobRecord) -> None:
        """Queue a job behind all others of its flow; faster than `push` for many jobs in order."""
        self._queue_of(record).append(record.flow, Entry(record.sequence, record.job_id, record.attempt))

    def requirements(self, phase: Phase, among: KeysView[Requirement] | None = None) -> list[Requirement]:
        """Return the requirements of a phase for which jobs wait, restricted to `among` if given."""
        queues = self._queues[phase]
        if among is None or len(queues) < len(among):
            return [requirement for requirement in queues if among is None or requirement in among]
        return [requirement for requirement in among if requirement in queues]

    def is_waited_for(self, requirement: Requirement) -> bool:
        return requirement in self._queues[requirement.role]

    def head(self, requirement: Requirement) -> JobRecord | None:
        """Return the next job, or None."""
        queue = self._queues[requirement.role].get(requirement)
        while queue is not None and (first := queue.first()) is not None:
            flow, entry = first
            record = self._waiting(entry)
            if record is None:
                queue.pop(flow)
            elif requirement.role == Phase.INIT and not self.may_start(flow.name):
                self._set_aside.setdefault(flow.name, []).extend(queue.take_flow(flow))
            else:
                return record
        if queue is not None:
            del self._queues[requirement.role][requirement]
        return None

    def pop(self, record: JobRecord) -> None:
        """Remove the job that `head` returned."""
        queues, requirement = self._queues[record.phase], record.requirement
        queue = queues[requirement]
        queue.pop(record.flow)
        if not queue.flows:
            del queues[requirement]

    def look_at_sessions_again(self) -> None:
        """Queue the set-aside jobs of flows that may start jobs again."""
        for session in [session for session in self._set_aside if self.may_start(session)]:
            for entry in self._set_aside.pop(session):
                if (record := self._waiting(entry)) is not None:
                    self.push(record)
                    self.watch(record.requirement)

    def waiting(self, requirement: Requirement) -> list[JobRecord]:
        """Return the jobs that wait for a requirement, in order of acceptance."""
        queue = self._queues[requirement.role].get(requirement)
        entries = sorted(queue.entries()) if queue is not None else ()
        return [record for entry in entries if (record := self._waiting(entry)) is not None]

    def watch(self, requirement: Requirement) -> None:
        """Check a requirement that no process may meet at the next `overdue`."""
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

    def _queue_of(self, record: JobRecord) -> FairQueue:
        queues, requirement = self._queues[record.phase], record.requirement
        queue = queues.get(requirement)
        if queue is None:
            queue = queues[requirement] = FairQueue(requirement)
        return queue

    def _waiting(self, entry: Entry) -> JobRecord | None:
        """Return an entry's job if it still waits; an ended job's id may belong to a new job."""
        record = self._records.get(entry.job_id)
        if record is None or record.status != JobStatus.QUEUED:
            return None
        return record if record.sequence == entry.sequence and record.attempt == entry.attempt else None
