"""What watchers ask, answered: which jobs have changed, what an ended one brought, how a batch stands.

Owns no socket and changes nothing: the front door hands it requests and sends what it answers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...errors import UnknownJob
from ...wire.messages.watching import ListSteps, Peek, Peeked, ViewBatch, Watch, Watched
from .ended_counts import EndedCounts
from .job_rows import job_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...wire.messages.watching import JobRow, WatchingReply
    from ...wire.sockets import Frame
    from .batch_runner import BatchRunner
    from .jobs import Jobs


class WatchRequestHandler:
    def __init__(self, jobs: Jobs, batches: BatchRunner) -> None:
        self._jobs = jobs
        self._batches = batches
        self._ended = EndedCounts()

    def tick(self, at: float) -> None:
        """Count, once per heartbeat, the jobs that have ended."""
        self._ended.note(self._jobs.table.outcomes, at)

    def answer(
        self, request: Watch | Peek | ViewBatch | ListSteps, now: float
    ) -> tuple[WatchingReply, Sequence[Frame]]:
        """Return the reply, and the frames behind it.

        Raises:
            UnknownJob, UnknownBatch, JournalFailed: it is refused.
        """
        match request:
            case Watch():
                return self._watched(request, time.time()), ()
            case Peek():
                return self._peeked(request)
            case ListSteps():
                return self._batches.steps(request, now, time.time()), ()
            case ViewBatch():
                return self._batches.view(request, now, time.time()), ()

    def _watched(self, request: Watch, at: float) -> Watched:
        if request.counts_ended:
            self.tick(at)
        changes = self._jobs.history.changes
        same = request.broker_id == changes.broker_id
        since, before = (request.since, request.before) if same else (0, 0)
        changed = changes.between(since, before, request.limit)
        rows = map(self._row, changed.job_ids)
        return Watched(
            request.request_id,
            broker_id=changes.broker_id,
            until=changes.until,
            first=changed.first,
            more=changed.more,
            forgotten_until=changes.forgotten_until,
            jobs=tuple(row for row in rows if row is not None),
            ended=self._ended.intervals() if request.counts_ended else (),
        )

    def _row(self, job_id: str) -> JobRow | None:
        return job_row(job_id, self._jobs.history.packed(job_id), *self._jobs.names(job_id))

    def _peeked(self, request: Peek) -> tuple[Peeked, Sequence[Frame]]:
        jobs, job_id = self._jobs, request.job_id
        if job_id in jobs.table:
            raise UnknownJob(f"job {job_id} has not ended; ask for its trace and its turns so far", job_id=job_id)
        if (finished := jobs.results.get(job_id)) is not None:
            result, blocks = jobs.delivery(finished)
            return Peeked(request.request_id, result, has_block=bool(blocks)), () if request.only_result else blocks
        recent = jobs.recent.get(job_id)
        if recent is None:
            raise UnknownJob(
                f"what job {job_id} brought is not here: it was never submitted here, or it was collected so long ago "
                "that it is forgotten (see keep_collected_bytes)",
                job_id=job_id,
            )
        blocks = [recent.block] if recent.block is not None else []
        return Peeked(request.request_id, recent.result, has_block=bool(blocks)), () if request.only_result else blocks
