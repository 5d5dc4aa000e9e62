"""`Jobs`: the rollout broker's state of jobs, and its queue of actions.

    table        where each job is; returns actions
    results      of ended jobs, until their clients acknowledge them
    transitions  the log of every job's changes
    quota        how much each session may hold
    writes       what waits for the journal; nothing is sent before it is written
    blocks       the handles of trajectory blocks that nodes store
    recent       the results that were acknowledged last, for viewers

Requests, stage events and time change the table, whose actions are appended to `queue`. The broker performs them in
order until the queue is empty (`action_queue`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ...system.logs import of_job
from ...wire import codec
from ...wire.messages.jobs import Job
from ..journal.journal_rows import lost_result
from ..journal.records import JobState, StoredBlock, holder_of
from ..journal.segment_store import BlockLost
from .quota import trajectory_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...wire.messages.jobs import Result
    from ...wire.sockets import Frame
    from ..batches.batch_records import BatchAction
    from ..journal.records import Finished, Submission
    from .actions import Action
    from .job_table import JobTable
    from .kept_blocks import KeptBlocks
    from .quota import Quota
    from .result_store import ResultStore
    from .sized_cache import SizedCache
    from .transition_log import TransitionLog
    from .write_ahead import WriteAhead


FIXED_BYTES = 4096
"""Upper estimate of a result's memory without notes and steps."""
STEP_BYTES = 160

log = logging.getLogger("prorl.rollout_broker")


class Jobs:
    def __init__(
        self,
        table: JobTable,
        results: ResultStore,
        transitions: TransitionLog,
        quota: Quota,
        writes: WriteAhead,
        blocks: KeptBlocks,
        recent: SizedCache[Finished],
    ) -> None:
        self.table = table
        self.results = results
        self.transitions = transitions
        self.quota = quota
        self.writes = writes
        self.blocks = blocks
        self.recent = recent
        self.queue: deque[Action | BatchAction] = deque()
        table.queues.may_start = quota.may_start

    def submit(
        self,
        jobs: Sequence[tuple[str, Job, bytes]],
        now: float,
        submission: Submission | None = None,
        *,
        in_batch: bool = False,
    ) -> None:
        """Write new jobs, each with its session and packed bytes, to the journal and accept them.

        Raises:
            JournalFailed: no job was accepted.
        """
        first = self.table.last_sequence + 1
        states = [
            JobState(first + place, session, job.job_id, job.task, job.stage_wait_s, packed, in_batch=in_batch)
            for place, (session, job, packed) in enumerate(jobs)
        ]
        self.writes.accept(states, now, submission)
        for session, job, packed in jobs:
            self.quota.submitted(holder_of(session, in_batch=in_batch), job.job_id, len(packed))
            self.transitions.accepted(job, time.time())
            self.queue.extend(self.table.submit(session, job, packed, now, in_batch=in_batch))

    def run_again(self, finished: Finished, now: float) -> None:
        """Run a job again whose trajectory was lost before its client received it.

        Raises:
            JournalFailed: the journal cannot be written; nothing has changed.
            MalformedMessage: the packed job is damaged.
        """
        packed, number = finished.packed, self.table.last_sequence + 1
        job: Job = codec.decode(packed, Job, limit_bytes=len(packed))
        again = JobState(number, finished.session, job.job_id, job.task, job.stage_wait_s, packed)
        self.writes.accept([again], now, replaced=[finished.sequence])
        self.quota.collected(self.results.drop(finished.holder, [job.job_id]))
        self.blocks.release(job.job_id)
        self.quota.submitted(finished.holder, job.job_id, len(packed))
        self.transitions.accepted(job, time.time())
        self.queue.extend(self.table.submit(finished.session, job, packed, now, after_attempt=finished.result.attempt))

    def count_in_score(self, job_id: str) -> None:
        """Count the trajectory of a job in SCORE against its session; nothing if the job has ended since."""
        record = self.table.records.get(job_id)
        if record is not None and record.run is not None:
            self.quota.judged(record.holder, job_id, trajectory_bytes(record.run, record.block))

    def names(self, job_id: str) -> tuple[str, str]:
        """Return the task and group of an unfinished job, or empty strings; the history of an ended job has them."""
        if job_id not in self.table:
            return "", ""
        record = self.table.record(job_id)
        return record.task, record.decoded.group_id if record.decoded is not None else ""

    def take_block(self, finished: Finished, block: Frame) -> None:
        """Store a result's block that its node has sent."""
        self._change(finished, replace(finished.result, kept=None), block)

    def give_up(self, finished: Finished) -> None:
        """Replace a result by an error: its block is lost and its job cannot run again."""
        self._change(finished, lost_result(finished.result.job_id, finished.result.task), None)

    def _change(self, finished: Finished, result: Result, block: Frame | None) -> None:
        """Rewrite a result whose block its node no longer needs to store."""
        changed = finished._replace(result=result, block=block, packed=b"")
        self.quota.collected([finished])
        self.quota.recovered(changed)
        self.writes.replace(changed)
        self.blocks.release(result.job_id)

    def cancel(self, job_id: str, now: float) -> bool:
        """Cancel a job; return False if it has ended."""
        if job_id not in self.table:
            return False
        self.queue.extend(self.table.cancel(job_id, now))
        return True

    def acknowledge(self, session: str, job_ids: Sequence[str]) -> list[Finished]:
        """Remove acknowledged results; return the evicted ones, for the caller to free later."""
        dropped = self.results.acknowledge(session, job_ids)
        if not dropped:
            return []
        self.writes.acknowledge(dropped)
        return self._collected(dropped)

    def discard(self, holder: str, job_ids: Sequence[str]) -> None:
        """Remove results that no client will fetch, including those not in the journal yet."""
        dropped = self.results.drop(holder, job_ids)
        self.writes.discard(dropped)
        self._collected(dropped)

    def block(self, finished: Finished) -> Frame:
        """Return a result's block, from memory or from the journal.

        Raises:
            JournalFailed: the journal cannot be read now.
            BlockLost: the block is damaged or missing.
        """
        block: Frame | StoredBlock = finished.block
        return self.writes.block(block) if isinstance(block, StoredBlock) else block

    def delivery(self, finished: Finished) -> tuple[Result, list[Frame]]:
        """Return a result and its block, if the broker stores one; a result with a lost block becomes an error.

        Raises:
            JournalFailed: the journal cannot be read now.
        """
        result = finished.result
        try:
            return result, [self.block(finished)] if result.tokens and result.kept is None else []
        except BlockLost as error:
            log.error("%s", error, extra=of_job(result.job_id, result.attempt))  # noqa: TRY400 - it says it all
            return lost_result(result.job_id, result.task), []

    def _collected(self, dropped: Sequence[Finished]) -> list[Finished]:
        self.quota.collected(dropped)
        evicted: list[Finished] = []
        for finished in dropped:
            job_id = finished.result.job_id
            self.blocks.release(job_id)
            recent = _without_stored(finished)
            evicted += [one for _, one in self.recent.put(job_id, recent, _size(recent))]
        self.transitions.collected([finished.result.job_id for finished in dropped], time.time())
        return evicted


def _without_stored(finished: Finished) -> Finished:
    """Return a result for viewers, with its block only if that is in memory."""
    result, block = finished.result, finished.block
    if result.kept is not None:  # its node deletes the block now
        result = replace(result, kept=None)
    return finished._replace(result=result, block=None if isinstance(block, StoredBlock) else block, packed=b"")


def _size(recent: Finished) -> int:
    notes = sum(map(len, recent.result.notes.values()))
    return FIXED_BYTES + STEP_BYTES * len(recent.result.steps) + notes + len(recent.block or b"")
