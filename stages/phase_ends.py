"""Make a phase's result, and the event that ends it, fit for the wire.

Lone surrogates, which JSON can spell and no encoding can, are replaced. Data of RUN beyond the limit raise
`SandboxLimitExceeded`, a failure of the agent, so that no output of an agent ends its job without a reward.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import msgspec

from ..errors import (
    FIELDS_LIMIT,
    NAME_LIMIT,
    ErrorInfo,
    GraderFailed,
    HandlerFailed,
    MalformedMessage,
    SandboxLimitExceeded,
    shortened,
)
from ..metrics import catalog
from ..metrics.metric import Metric
from ..wire import codec
from ..wire.messages.base import METRICS_LIMIT, NOTE_LIMIT
from ..wire.messages.jobs import Phase
from ..wire.messages.stages import PhaseDone, PhaseFailed
from .cut_text import cut_text
from .handler import Evaluation

DATA_LIMIT_BYTES = 3 * codec.HEADER_LIMIT_BYTES // 8
"""Most bytes of RUN's data on the wire. The rest of an event's limit is for its notes, metrics and steps."""
EVENT_LIMIT_BYTES = codec.HEADER_LIMIT_BYTES // 2
"""Largest event in bytes: the phase data of a handler, its metrics and the rest. Bulk data belongs in the sandbox."""

log = logging.getLogger("prorl.stage")


def sendable(text: str) -> str:
    """Return a text that UTF-8 can encode."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def checked_data(phase: Phase, data: Any) -> dict[str, Any]:
    """Check the data that INIT or RUN returned.

    Raises:
        HandlerFailed: they are not a dict.
    """
    if not isinstance(data, dict):
        following = Phase.RUN if phase == Phase.INIT else Phase.EVAL
        raise HandlerFailed(
            f"{phase} returned {_named(data)}; it must return a dict with what {following} needs, which may be empty"
        )
    return data


def passed_on(data: Any) -> dict[str, Any]:
    """Return RUN's data as EVAL will receive them.

    Raises:
        SandboxLimitExceeded: they are too large.
        HandlerFailed: they are not a dict of plain data.
    """
    sendable_data: dict[str, Any] = _sendable(checked_data(Phase.RUN, data))
    try:
        size = len(codec.pack(sendable_data))
    except MalformedMessage as error:
        place, value = _misfit(sendable_data, "the dict")
        raise HandlerFailed(
            f"run returned a dict that cannot be passed on to eval: {place} is {_named(value)}; plain data are None, "
            "bool, int, float, str, bytes, and lists and dicts of these"
        ) from error
    if size > DATA_LIMIT_BYTES:
        message = f"the agent's output takes {size} bytes on the wire; at most {DATA_LIMIT_BYTES} are passed on to EVAL"
        raise SandboxLimitExceeded(message, limit="output_bytes")
    return sendable_data


def checked_evaluation(made_by: str, evaluation: Any) -> Evaluation:
    """Check the evaluation that EVAL returned.

    Raises:
        HandlerFailed: it is not an evaluation, but for example a number.
    """
    if not isinstance(evaluation, Evaluation):
        raise HandlerFailed(
            f"{made_by} returned {_named(evaluation)}; it must return an Evaluation, such as Evaluation(reward=1.0)"
        )
    return evaluation


def _named(value: Any) -> str:
    return "None" if value is None else f"{value!r:.100} ({type(value).__name__})"


def _misfit(value: Any, place: str) -> tuple[str, Any]:
    """Return the innermost part of a value that cannot be packed, and its place."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, part in parts:
        try:
            codec.pack(part)
        except MalformedMessage:
            return _misfit(part, f"{place}[{name!r}]")
    return place, value


def _sendable(value: Any) -> Any:
    match value:
        case str():
            return sendable(value)
        case list() | tuple():
            return [_sendable(each) for each in value]
        case dict():
            return {_sendable(name): _sendable(each) for name, each in value.items()}
    return value


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
    """Return notes within their limit; a long note keeps its beginning and its end, where a judge's verdict stands."""
    return {name: cut_text(sendable(note), NOTE_LIMIT) for name, note in notes.items()}


def checked(done: PhaseDone) -> PhaseDone:
    """Return an event as the broker will decode it, with plain data only."""
    if len(done.metrics) > METRICS_LIMIT:
        raise HandlerFailed(f"{done.phase} gave {len(done.metrics)} metrics; at most {METRICS_LIMIT} can be passed on")
    try:
        return codec.read_back(done, PhaseDone, EVENT_LIMIT_BYTES, is_plain=not done.phase_data)
    except MalformedMessage as error:
        raise HandlerFailed(f"{done.phase} gave something that cannot be passed on: {error.message}") from error


def readable(failed: PhaseFailed) -> PhaseFailed:
    """Return an event as the broker will decode it: with a short error, and without its record if that is too large.

    A handler's error may have any length; if its event were dropped, the job would wait until its lease expires.
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


def count_phase(task: str, event: PhaseDone | PhaseFailed) -> None:
    """Count an ended phase in the metrics, from its event."""
    if not Metric.counting:
        return
    catalog.PHASE_SECONDS.observe(event.timings.get(event.phase, 0.0), event.phase, task)
    if isinstance(event, PhaseFailed):
        catalog.PHASE_FAILURES.add(event.phase, task, event.error.code)
    if event.phase != Phase.RUN:
        return
    metrics = event.metrics
    catalog.TURNS.add(task, amount=metrics.get("turns", 0.0))
    catalog.TOOL_CALLS_MALFORMED.add(task, amount=metrics.get("malformed_tool_calls", 0.0))
    for kind in ("prompt", "cached", "generated"):
        catalog.TOKENS.add(task, kind, amount=metrics.get(f"{kind}_tokens", 0.0))
