"""What became of a stage process that held a job, in words and as a program reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ...errors import ErrorInfo, LeaseLost

if TYPE_CHECKING:
    from .job_record import JobRecord

LossCause = Literal["died", "silent", "left", "unreported"]
LOSSES: dict[LossCause, str] = {
    "died": "died: its connection ended, and it has not reported since",
    "silent": "fell silent: it hangs, or its link is cut",
    "left": "left in good order",
    "unreported": "lives and does not have it: the start never arrived",
}


def lease_lost(record: JobRecord, cause: LossCause) -> ErrorInfo:
    """Return the error of a job that its holder has no longer."""
    message = f"{record.phase} was lost with its stage process {record.stage_id}, which {LOSSES[cause]}"
    return LeaseLost(message, stage_id=record.stage_id, attempts=record.attempt, cause=cause).info()
