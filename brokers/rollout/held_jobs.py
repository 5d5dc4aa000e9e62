"""The jobs that stage processes hold, and when each is to be looked at: its holder must confirm it, and end it. Pure.

A job whose holder has reported it lives by the holder's lease, so a report costs nothing for each job that it keeps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .deadlines import Deadlines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .job_record import JobRecord

STOP_GRACE_S = 15.0
"""How far beyond a phase's limit a stage process may be before the table ends the job without it."""


class HeldJobs:
    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._records: dict[int, JobRecord] = {}
        self._deadlines: Deadlines[int] = Deadlines()

    def add(self, record: JobRecord, stage_id: str, now: float) -> None:
        """Give a job to a holder, who has a lease's time to report that it has it."""
        record.stage_id, record.confirmed, record.lease_until = stage_id, False, now + self._lease_s
        self._records[record.sequence] = record
        self.watch(record)

    def discard(self, record: JobRecord) -> None:
        if self._records.pop(record.sequence, None) is not None:
            self._deadlines.discard(record.sequence)

    def confirm(self, record: JobRecord) -> None:
        """The holder has reported that it has the phase."""
        if not record.confirmed:
            record.confirmed = True
            self.watch(record)

    def watch(self, record: JobRecord) -> None:
        """Look at a job when its time is over, which may have changed."""
        at = overdue_at(record) if record.confirmed else min(record.lease_until, overdue_at(record))
        self._deadlines.set(record.sequence, at)

    def due(self, now: float) -> Iterator[JobRecord]:
        """Yield each job that is unconfirmed for too long, or overdue."""
        for sequence in self._deadlines.due(now):
            record = self._records[sequence]
            if (not record.confirmed and record.lease_until <= now) or overdue_at(record) <= now:
                yield record
            else:
                self.watch(record)

    def restart(self, now: float) -> None:
        """Time stood still: each was given to its holder just now."""
        for record in self._records.values():
            record.since, record.lease_until = now, now + self._lease_s


def overdue_at(record: JobRecord) -> float:
    """Return when a held job's phase has exceeded its limit."""
    return record.since + record.job.limits.of(record.phase) + STOP_GRACE_S
