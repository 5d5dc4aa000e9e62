"""What the rollout broker's log says of a job's way: one line per transition at DEBUG.

At INFO there is one line per job that did not complete, and none for others: a thousand jobs a second must not be
thousands of lines.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ...system.logs import of_job
from ...wire.messages.jobs import Outcome
from .actions import End, Queued, Start

if TYPE_CHECKING:
    from .actions import Action

log = logging.getLogger("prorl.rollout_broker")


def log_action(action: Action) -> None:
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
