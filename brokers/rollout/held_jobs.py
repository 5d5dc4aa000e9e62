"""`HeldJobs`: the jobs that stage processes hold, with deadlines for confirming and for ending each. Pure.

A confirmed job depends on its holder's lease, so a report costs nothing per job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .deadlines import Deadlines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .job_record import JobRecord

STOP_GRACE_S = 15.0
"""Seconds beyond a phase's limit after which the table ends the job itself."""


class HeldJobs:
    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._records: dict[int, JobRecord] = {}
        self._deadlines: Deadlines[int] = Deadlines()

    def add(self, record: JobRecord, stage_id: str, now: float) -> None:
        """Assign a job to a stage process, which has one lease to confirm it."""
        record.stage_id, record.confirmed, record.lease_until = stage_id, False, now + self._lease_s
        self._records[record.sequence] = record
        self.watch(record)

    def discard(self, record: JobRecord) -> None:
        if self._records.pop(record.sequence, None) is not None:
            self._deadlines.discard(record.sequence)

    def confirm(self, record: JobRecord) -> None:
        """Record that the holder has reported the phase."""
        if not record.confirmed:
            record.confirmed = True
            self.watch(record)

    def watch(self, record: JobRecord) -> None:
        """Update a job's deadline."""
        at = _overdue_at(record)
        self._deadlines.set(record.sequence, at if record.confirmed else min(record.lease_until, at))

    def due(self, now: float) -> Iterator[JobRecord]:
        """Yield each job that is unconfirmed for too long, or overdue."""
        for sequence in self._deadlines.due(now):
            record = self._records[sequence]
            if _overdue_at(record) <= now or (not record.confirmed and record.lease_until <= now):
                yield record
            else:
                self.watch(record)

    def restart(self, now: float) -> None:
        """Restart all deadlines after a pause, as if each job was just assigned."""
        for record in self._records.values():
            record.since, record.lease_until = now, now + self._lease_s


def _overdue_at(record: JobRecord) -> float:
    return record.since + record.job.limits.of(record.phase) + STOP_GRACE_S
