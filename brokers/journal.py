"""What the rollout broker must remember beyond its own life, behind one interface.

The broker writes down a job before it says `accepted`, and a result before it tells a client of it; at its start it
reads both back. `MemoryJournal` lasts as long as its process: a broker that is started anew over the same object has
lost nothing, one in a new process starts empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..messages import new_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .outbox import Finished


class AcceptedJob(NamedTuple):
    """A job that the service has promised to end."""

    session: str
    job_id: str
    packed: bytes


class Journal(Protocol):
    """The record of jobs accepted, ended and acknowledged."""

    @property
    def journal_id(self) -> str:
        """Names this record for as long as it remembers."""

    def accepted(self, jobs: Sequence[AcceptedJob]) -> None:
        """Note jobs; when this returns they are safe."""

    def ended(self, finished: Finished) -> None:
        """Note a job's outcome and trajectory in place of the job; when this returns they are safe."""

    def acknowledged(self, job_ids: Iterable[str]) -> None:
        """Forget results that their client has."""

    def unfinished(self) -> Sequence[AcceptedJob]:
        """Give the jobs that have not ended, oldest first."""

    def uncollected(self) -> Sequence[Finished]:
        """Give the results that were not acknowledged, oldest first."""


class MemoryJournal:
    """A journal that lives as long as its process."""

    def __init__(self) -> None:
        self.journal_id = new_id()
        """Names this record."""
        self._jobs: dict[str, AcceptedJob] = {}
        self._results: dict[str, Finished] = {}

    def accepted(self, jobs: Sequence[AcceptedJob]) -> None:
        """Note jobs."""
        self._jobs.update((job.job_id, job) for job in jobs)

    def ended(self, finished: Finished) -> None:
        """Note a job's outcome and trajectory in place of the job."""
        self._jobs.pop(finished.result.job_id, None)
        self._results[finished.result.job_id] = finished

    def acknowledged(self, job_ids: Iterable[str]) -> None:
        """Forget results that their client has."""
        for job_id in job_ids:
            self._results.pop(job_id, None)

    def unfinished(self) -> Sequence[AcceptedJob]:
        """Give the jobs that have not ended, oldest first."""
        return tuple(self._jobs.values())

    def uncollected(self) -> Sequence[Finished]:
        """Give the results that were not acknowledged, oldest first."""
        return tuple(self._results.values())
