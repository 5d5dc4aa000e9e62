"""Performs what the job table and the batch sampler decided, one action after the other, until nothing is left to do.

    event, request or time → JobTable    ──actions──▶ queue
    end of a batch's job   → BatchSampler ──actions──▶ queue

What an action would send is handed to `WriteAhead`, which sends it once the journal has all that led to it.

The log has one line per transition at DEBUG. At INFO it has one line per job that did not complete, and none for
others: a thousand jobs a second must not be thousands of lines.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ...metrics.catalog import JOBS_ENDED, QUEUE_SECONDS
from ...metrics.metric import Metric
from ...system.logs import of_job
from ...wire.messages.jobs import Outcome, Phase
from ..batches.batch_records import CancelJobs, Discard, StartJobs
from .actions import Drop, End, Queued, Start

if TYPE_CHECKING:
    from ...wire.messages.jobs import Result
    from ..batches.batch_records import BatchAction
    from .actions import Action
    from .batch_runner import BatchRunner
    from .jobs import Jobs

QUEUES = tuple((f"{phase}_queue", phase.value) for phase in Phase)
"""The timing of each phase's queue."""

log = logging.getLogger("prorl.rollout_broker")


def perform_queue(jobs: Jobs, batches: BatchRunner, now: float, at: float) -> None:
    """Perform all actions, those too that performing adds; `at` is the time of day, for histories."""
    is_logged = log.isEnabledFor(logging.DEBUG)
    queue, history, writes, losses = jobs.queue, jobs.history, jobs.writes, jobs.table.stages.losses
    while queue:
        action = queue.popleft()
        if is_logged:
            _log(action, logging.DEBUG)
        match action:
            case Start():
                stage = jobs.table.stages.get(action.stage_id)
                history.note(action, at, stage.node if stage is not None else "")
                if stage is not None:
                    losses.started(action.command.job_id, stage.node)
                writes.perform(action)
            case Queued():
                history.note(action, at)
                if action.phase == Phase.INIT:
                    jobs.blocks.release(action.job_id)  # it begins anew
                if action.error is not None:
                    losses.restarted(action.job_id, action.error)
            case End():
                _note_end(jobs, action, at)
                writes.perform(action)
                if action.finished.in_batch:
                    batches.job_ended(action.finished, now)
            case StartJobs() | CancelJobs() | Discard():
                batches.perform(action, now)
            case Drop():
                jobs.discard(*action)
            case _:
                writes.perform(action)


def _note_end(jobs: Jobs, action: End, at: float) -> None:
    result = action.finished.result
    if result.outcome != Outcome.COMPLETED and not log.isEnabledFor(logging.DEBUG):
        _log(action, logging.INFO)
    jobs.history.note(action, at)
    jobs.quota.ended(action.finished)
    if jobs.tracer is not None:
        jobs.tracer.ended(result.job_id)
    jobs.table.stages.losses.ended(result.job_id, result.outcome, result.error)
    if Metric.counting:
        _count(result)


def _count(result: Result) -> None:
    JOBS_ENDED.add(result.task, result.outcome, result.error.code if result.error is not None else "")
    for name, phase in QUEUES:
        if (waited_s := result.timings.get(name)) is not None:
            QUEUE_SECONDS.observe(waited_s, phase)


def _log(action: Action | BatchAction, level: int) -> None:
    match action:
        case Queued():
            lost = f"; the attempt before was lost: {action.error.message}" if action.error is not None else ""
            fields = of_job(action.job_id, action.attempt, action.phase)
            log.log(level, "queued for %s%s", action.phase, lost, extra=fields)
        case Start():
            command = action.command
            fields = of_job(command.job_id, command.attempt, command.phase, stage_id=action.stage_id)
            log.log(level, "%s given to %s", command.phase, action.stage_id, extra=fields)
        case End():
            result = action.finished.result
            error = f": {result.error.code}: {result.error.message}" if result.error is not None else ""
            log.log(level, "ended as %s%s", result.outcome, error, extra=of_job(result.job_id, result.attempt))
