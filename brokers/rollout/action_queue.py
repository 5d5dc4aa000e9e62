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
from ..batches.batch_records import BatchAction
from .actions import End, Queued, Start

if TYPE_CHECKING:
    from ...wire.messages.jobs import Result
    from ..batches.batch_runner import BatchRunner
    from .actions import Action
    from .jobs import Jobs

QUEUES = tuple((f"{phase}_queue", phase.value) for phase in Phase)
"""The timing of each phase's queue."""

log = logging.getLogger("prorl.rollout_broker")


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
    _log_transition(action)
    stage = jobs.table.stages.get(action.stage_id) if isinstance(action, Start) else None
    jobs.history.note(action, at, stage.node if stage is not None else "")
    if isinstance(action, Queued) and action.phase == Phase.INIT:
        jobs.blocks.release(action.job_id)  # it begins anew
    losses = jobs.table.stages.losses
    match action:
        case Queued() if action.error is not None:
            losses.restarted(action.job_id, action.error)
        case Start() if stage is not None:
            losses.started(action.command.job_id, stage.node)
        case End():
            jobs.quota.ended(action.finished)
            result = action.finished.result
            if jobs.tracer is not None:
                jobs.tracer.ended(result.job_id)
            losses.ended(result.job_id, result.outcome, result.error)
            if Metric.counting:
                _count(result)


def _count(result: Result) -> None:
    JOBS_ENDED.add(result.task, result.outcome, result.error.code if result.error is not None else "")
    for name, phase in QUEUES:
        if (waited_s := result.timings.get(name)) is not None:
            QUEUE_SECONDS.observe(waited_s, phase)


def _log_transition(action: Action) -> None:
    if log.isEnabledFor(logging.DEBUG):
        _log(action, logging.DEBUG)
    elif isinstance(action, End) and action.finished.result.outcome != Outcome.COMPLETED:
        _log(action, logging.INFO)


def _log(action: Action, level: int) -> None:
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
