"""Make a phase's result, and the event that ends it, fit for the wire.

Lone surrogates, which JSON can spell and no encoding can, are replaced. Data of RUN beyond the limit raise
`SandboxLimitExceeded`, a failure of the agent, so that no output of an agent ends its job without a reward.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ..data.conversations import finite_reward, rewards_problem
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
from ..wire.messages.jobs import MAIN, Phase
from ..wire.messages.stages import PhaseDone, PhaseFailed
from .cut_text import cut_text
from .handler import Evaluation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .episode import ConversationRecord

MUST_BE_FINITE = "it must be a finite number"
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
    """Return the reward.

    Raises:
        GraderFailed: it is not a finite number.
    """
    number = finite_reward(evaluation.reward)
    if number is None:
        raise _not_finite(evaluation.reward, "EVAL gave the reward")
    return number


def rewards_of(evaluation: Evaluation, names: Sequence[str]) -> dict[str, float]:
    """Return the rewards of the conversations that have one of their own.

    Args:
        evaluation: EVAL's.
        names: of RUN's conversations; empty: one, `main`.

    Raises:
        GraderFailed: one is not a finite number.
        HandlerFailed: it is not a dict, or names an unknown conversation.
    """
    given: Any = evaluation.rewards
    if not isinstance(given, Mapping):
        raise HandlerFailed(f"EVAL gave the rewards {_named(given)}; they must be a dict of numbers by conversation")
    rewards: dict[str, float] = {}
    for name, reward in given.items():
        if name not in (names or (MAIN,)):
            known = ", ".join(names or (MAIN,))
            raise HandlerFailed(f"EVAL gave a reward for the conversation {name!r:.100}; the rollout has: {known}")
        number = finite_reward(reward)
        if number is None:
            raise _not_finite(reward, f"EVAL gave the conversation {name} the reward")
        rewards[name] = number
    if not names and rewards and rewards[MAIN] != reward_of(evaluation):
        raise HandlerFailed(
            f"EVAL gave the reward {evaluation.reward!r}, and the rollout's only conversation {rewards[MAIN]!r}; "
            "give one reward"
        )
    return rewards


def _not_finite(reward: Any, what: str) -> GraderFailed:
    return GraderFailed(f"{what} {reward!r:.100}; {MUST_BE_FINITE}", reason="result", output="")


def notes_of(notes: dict[str, str]) -> dict[str, str]:
    """Return notes within their limit; a long note keeps its beginning and its end, where a judge's verdict stands."""
    return {name: cut_text(sendable(note), NOTE_LIMIT) for name, note in notes.items()}


def conversation_notes(records: Iterable[ConversationRecord], room: int) -> dict[str, str]:
    """Return the texts of conversations that are not trained as at most `room` notes; the last one has all others."""
    texts = [(f"conversation {one.name}"[:NAME_LIMIT], one.note) for one in records if one.note]
    if len(texts) <= room:
        return dict(texts)
    kept, others = texts[: max(0, room - 1)], texts[max(0, room - 1) :]
    return {**dict(kept), "conversations": "\n\n".join(f"{name}\n{text}" for name, text in others)} if room > 0 else {}


def checked(done: PhaseDone) -> PhaseDone:
    """Return an event as the broker will decode it, with plain data only."""
    if len(done.metrics) > METRICS_LIMIT:
        raise HandlerFailed(f"{done.phase} gave {len(done.metrics)} metrics; at most {METRICS_LIMIT} can be passed on")
    try:
        if done.conversations or done.rewards or done.turn_rewards:
            _check_rewards(done, done.rewards)
        return codec.read_back(done, PhaseDone, EVENT_LIMIT_BYTES, is_plain=not done.phase_data)
    except MalformedMessage as error:
        raise HandlerFailed(f"{done.phase} gave something that cannot be passed on: {error.message}") from error


def readable(failed: PhaseFailed) -> PhaseFailed:
    """Return an event as the broker will decode it: with a short error, and without its record if that is too large.

    A handler's error may have any length; if its event were dropped, the job would wait until its lease expires.
    """
    failed = msgspec.structs.replace(failed, error=_in_short(failed.error))
    try:
        if failed.conversations or failed.turn_rewards:
            _check_rewards(failed, {})
        failed = codec.read_back(failed, PhaseFailed, EVENT_LIMIT_BYTES, is_plain=False)
    except MalformedMessage as problem:
        log.error("the record of a failed %s is left out: %s", failed.phase, problem.message)  # noqa: TRY400
        bare = {"metrics": {}, "timings": {}, "stop_reason": "", "tokens": 0, "turns": 0, "segments": (), "notes": {}}
        bare |= {"conversations": (), "turn_rewards": (), "steps": (), "logprobs_mode": ""}
        bare |= {"records": (), "records_dropped": {}, "chat": None}
        failed = msgspec.structs.replace(failed, **bare)
    return failed


def _check_rewards(event: PhaseDone | PhaseFailed, rewards: Mapping[str, float]) -> None:
    """Raise `MalformedMessage` where the broker would drop the event."""
    if problem := rewards_problem(event, rewards.values()):
        raise MalformedMessage(problem)


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
    metrics = event.metrics
    if event.phase == Phase.SCORE:
        catalog.TOKENS.add(task, "scored", amount=metrics.get("scored_tokens", 0.0))
    if event.phase != Phase.RUN:
        return
    catalog.TURNS.add(task, amount=metrics.get("turns", 0.0))
    catalog.TOOL_CALLS_MALFORMED.add(task, amount=metrics.get("malformed_tool_calls", 0.0))
    for kind in ("prompt", "cached", "generated", "scored"):
        catalog.TOKENS.add(task, kind, amount=metrics.get(f"{kind}_tokens", 0.0))
