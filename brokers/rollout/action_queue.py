"""Performs the actions of the job table and of the batch sampler, in order, until the queue is empty.

    event, request or time → JobTable     ──actions──▶ queue
    end of a batch's job   → BatchSampler ──actions──▶ queue

`WriteAhead` sends the resulting messages after the journal has the changes that led to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...wire.messages.jobs import Phase
from ..batches.batch_records import CancelJobs, Discard, StartJobs
from .actions import Drop, End, Queued, Start

if TYPE_CHECKING:
    from .batch_runner import BatchRunner
    from .jobs import Jobs


def perform_queue(jobs: Jobs, batches: BatchRunner, now: float, at: float) -> None:
    """Perform all actions, including those added meanwhile; `at` is the wall clock in seconds, for histories."""
    queue, transitions, writes = jobs.queue, jobs.transitions, jobs.writes
    while queue:
        action = queue.popleft()
        match action:
            case Start():
                transitions.note(action, at)
                writes.perform(action)
            case Queued():
                transitions.note(action, at)
                if action.phase == Phase.INIT:
                    jobs.blocks.release(action.job_id)  # a restarted job has no trajectory
                elif action.phase == Phase.SCORE:
                    jobs.count_in_score(action.job_id)
            case End(finished):
                transitions.note(action, at)
                jobs.quota.ended(finished)
                writes.perform(action)
                if finished.in_batch:
                    batches.job_ended(finished, now)
            case StartJobs() | CancelJobs() | Discard():
                batches.perform(action, now)
            case Drop():
                jobs.discard(*action)
            case _:
                writes.perform(action)
