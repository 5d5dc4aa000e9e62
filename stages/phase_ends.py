"""Make the events that end a phase fit for the wire: finite rewards, short errors, notes within their limit."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import (
    FIELDS_LIMIT,
    NAME_LIMIT,
    ErrorInfo,
    GraderFailed,
    HandlerFailed,
    MalformedMessage,
    shortened,
)
from ..wire import codec
from ..wire.messages.base import METRICS_LIMIT, NOTE_LIMIT
from ..wire.messages.stages import PhaseDone, PhaseFailed
from .cut_text import cut_text
from .phase_data import sendable

if TYPE_CHECKING:
    from .handler import Evaluation

EVENT_LIMIT_BYTES = codec.HEADER_LIMIT_BYTES // 2
"""Largest event: the phase data of a handler, its metrics and the rest. Bulk data goes into the sandbox."""

log = logging.getLogger("prorl.stage")


def reward_of(evaluation: Evaluation) -> float:
    reward: Any = evaluation.reward
    try:
        number = float(reward) if not isinstance(reward, str | bytes) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise GraderFailed(f"EVAL gave the reward {reward!r}; it must be a finite number", reason="result", output="")
    return number


def notes_of(notes: dict[str, str]) -> dict[str, str]:
    """Return notes within their limit: of long ones the beginning and the end, which has a judge's verdict."""
    return {name: cut_text(sendable(note), NOTE_LIMIT) for name, note in notes.items()}


def checked(done: PhaseDone) -> PhaseDone:
    """Return an event as the broker will read it, with plain data only."""
    if len(done.metrics) > METRICS_LIMIT:
        raise HandlerFailed(f"{done.phase} gave {len(done.metrics)} metrics; at most {METRICS_LIMIT} can be passed on")
    try:
        return codec.read_back(done, PhaseDone, EVENT_LIMIT_BYTES, is_plain=not done.phase_data)
    except MalformedMessage as error:
        raise HandlerFailed(f"{done.phase} gave something that cannot be passed on: {error.message}") from error


def readable(failed: PhaseFailed) -> PhaseFailed:
    """Return an event as the broker will read it: with a short error, and without its record if that is too large.

    The error may be a handler's own, of any length; were its event dropped, the job would wait until its lease expires.
    """
    failed = msgspec.structs.replace(failed, error=_in_short(failed.error))
    try:
        failed = codec.read_back(failed, PhaseFailed, EVENT_LIMIT_BYTES, is_plain=False)
    except MalformedMessage as problem:
        log.error("the record of a failed %s is left out: %s", failed.phase, problem.message)  # noqa: TRY400
        bare = {"metrics": {}, "timings": {}, "stop_reason": "", "tokens": 0, "turns": 0, "segments": (), "notes": {}}
        failed = msgspec.structs.replace(failed, **bare, steps=(), logprobs_mode="")
    return failed


def _in_short(error: ErrorInfo) -> ErrorInfo:
    try:
        fields = {name[:NAME_LIMIT]: shortened(value) for name, value in [*error.fields.items()][:FIELDS_LIMIT]}
        short = ErrorInfo(error.code[:NAME_LIMIT], shortened(error.message), fields)
        short = codec.read_back(short, ErrorInfo, is_plain=False)
    except (MalformedMessage, AttributeError, TypeError) as problem:
        return HandlerFailed(f"the error of the task's code cannot be passed on: {problem}").info()
    return short
