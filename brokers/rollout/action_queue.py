"""Performs what the job table and the batch sampler decided, one action after the other, until nothing is left to do.

    event, request or time → JobTable    ──actions──▶ queue
    end of a batch's job   → BatchSampler ──actions──▶ queue

What an action would send is handed to `WriteAhead`, which sends it once the journal has all that led to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..batches.batch_records import BatchAction
from .actions import End, Start
from .job_log import log_action

if TYPE_CHECKING:
    from ..batches.batch_runner import BatchRunner
    from .actions import Action
    from .jobs import Jobs


def perform_queue(jobs: Jobs, batches: BatchRunner, now: float, at: float) -> None:
    """Perform all actions, those too that performing adds; `at` is the time of day, for histories."""
    while jobs.queue:
        action = jobs.queue.popleft()
        if isinstance(action, BatchAction):
            batches.perform(action, now)
            continue
        _note(jobs, action, at)
        jobs.writes.perform(action)
        if isinstance(action, End) and action.finished.in_batch:
            batches.job_ended(action.finished, now)


def _note(jobs: Jobs, action: Action, at: float) -> None:
    log_action(action)
    stage = jobs.table.stages.get(action.stage_id) if isinstance(action, Start) else None
    jobs.history.note(action, at, stage.node if stage is not None else "")
    if isinstance(action, End):
        jobs.quota.ended(action.finished)
