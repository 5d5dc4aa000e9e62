"""What the rollout broker must remember beyond its own life, behind one interface.

The broker writes down a job before it says `accepted`, where each job is before it tells a stage process, and a result
before it tells a client; at its start it reads all of it back. `MemoryJournal` lasts as long as its process: a broker
that is restarted over the same object has lost nothing, one in a new process starts empty. `DiskJournal` lasts.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ...wire.messages.base import new_id
from .records import SUBMISSIONS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...wire.sockets import Frame
    from .records import Finished, JobState, StoredBlock, Submission


class Recovered(NamedTuple):
    unfinished: Sequence[JobState]
    """The jobs that have not ended, oldest first."""
    uncollected: Sequence[Finished]
    """The results that were not acknowledged, those of the oldest jobs first."""
    last_sequence: int
    """No job of a larger number is here."""
    notes: Mapping[str, bytes] = {}
    """What the batches have noted (see `batch_notes`)."""
    submissions: Sequence[Submission] = ()
    """The last ones, oldest first."""


class Journal(Protocol):
    """The record of jobs accepted, moved, ended and acknowledged. Every method may raise `JournalFailed`."""

    @property
    def journal_id(self) -> str:
        """Names this record for as long as it remembers."""

    @property
    def size_bytes(self) -> int:
        """What it takes of the disk."""

    def check_room(self, size_bytes: int) -> None:
        """Raise `JournalFailed` unless there is room to begin something new of that size."""

    def accept(
        self, jobs: Sequence[JobState], submission: Submission | None = None, replaced: Sequence[int] = ()
    ) -> None:
        """Note new jobs, all or none, and the request that brought them; when this returns they are safe.

        Jobs that run again take the place of their results, whose numbers are `replaced`. Of submissions the last
        `SUBMISSIONS` are kept: those that may still be sent again.
        """

    def write(
        self,
        states: Sequence[JobState],
        ended: Sequence[Finished],
        acknowledged: Sequence[int],
        discarded: Sequence[int] = (),
        notes: Mapping[str, bytes | None] | None = None,
    ) -> None:
        """Write a round's changes, all or none; when this returns they are safe.

        `ended` results take the place of their jobs; `acknowledged` (results that the client has) and `discarded`
        (ended jobs whose results no client will fetch) are forgotten by number, and notes of the batches that are None
        by name.
        """

    def recover(self) -> Recovered:
        """Return all that there is."""

    def block(self, stored: StoredBlock) -> Frame:
        """Return a trajectory's block."""

    def unloaded(self, finished: Finished) -> Finished:
        """Return a result that is safe without its block in memory, if the journal can return that later."""


class MemoryJournal:
    def __init__(self) -> None:
        self.journal_id = new_id()
        """Names this record."""
        self._jobs: dict[int, JobState] = {}
        self._results: dict[int, Finished] = {}
        self._notes: dict[str, bytes] = {}
        self._submissions: deque[Submission] = deque(maxlen=SUBMISSIONS)
        self._last_sequence = 0

    @property
    def size_bytes(self) -> int:
        return 0

    def check_room(self, size_bytes: int) -> None:
        """Do nothing: there is as much as the process has."""

    def accept(
        self, jobs: Sequence[JobState], submission: Submission | None = None, replaced: Sequence[int] = ()
    ) -> None:
        for sequence in replaced:
            self._results.pop(sequence, None)
        if submission is not None:
            self._submissions.append(submission)
        for job in jobs:
            self._jobs[job.sequence] = job
            self._last_sequence = max(self._last_sequence, job.sequence)

    def write(
        self,
        states: Sequence[JobState],
        ended: Sequence[Finished],
        acknowledged: Sequence[int],
        discarded: Sequence[int] = (),
        notes: Mapping[str, bytes | None] | None = None,
    ) -> None:
        self.accept(states)
        for finished in ended:
            self._jobs.pop(finished.sequence, None)
            self._results[finished.sequence] = finished
        for sequence in acknowledged:
            self._results.pop(sequence, None)
        for sequence in discarded:
            self._jobs.pop(sequence, None)
        for name, note in (notes or {}).items():
            if note is None:
                self._notes.pop(name, None)
            else:
                self._notes[name] = note

    def recover(self) -> Recovered:
        jobs = [self._jobs[sequence] for sequence in sorted(self._jobs)]
        results = [self._results[sequence] for sequence in sorted(self._results)]
        return Recovered(jobs, results, self._last_sequence, dict(self._notes), tuple(self._submissions))

    def block(self, stored: StoredBlock) -> Frame:
        raise LookupError(f"the block of job {stored.sequence} is not here")

    def unloaded(self, finished: Finished) -> Finished:
        return finished
