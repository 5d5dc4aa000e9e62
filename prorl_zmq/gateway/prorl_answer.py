"""The answer of `/process`: a trajectory in the form of ProRL's clients.

- `messages` is empty unless the rollout has a reward: clients retry it, and learn nothing from it.
- Clients in token mode concatenate all `token_ids` and train on those of assistants. So an assistant's message has
exactly the generated tokens; the template's tokens belong to the neighbouring messages.
- Only the last segment of a trajectory is returned; `notes` says so.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.rows import TRUNCATING
from ..data.trajectory import Role
from ..wire.messages.jobs import Outcome
from .tool_schemas import schemas_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ..data.trajectory import TokenArrays, Trajectory
    from ..wire.messages.jobs import Job, Result
    from .message_texts import MessageTexts

FINISHED = frozenset({"done", "finished"})
"""Stop reasons (see `stages.episode.StopReason`) that are the policy's own."""
MALFORMED = "malformed_tool_call"
"""Name of a call that could not be parsed; clients match calls and tool messages by number."""
NAMES = {Role.SYSTEM: "system", Role.USER: "user", Role.TOOL: "tool"}


def answer(
    instance: Mapping[str, Any], job_id: str | None, job: Job, trajectory: Trajectory, texts: MessageTexts | None
) -> dict[str, Any]:
    result = trajectory.result
    learnable = [arrays for arrays in trajectory.segments() if arrays.loss_mask.any()]
    told = result.reward is not None and bool(learnable)
    finished = result.stop_reason in FINISHED
    notes = dict(result.notes)
    if len(result.segments):
        notes["segments"] = f"the last of {len(result.segments) + 1} segments of the trajectory is returned"
    return {
        **_head(instance, job_id, result.error.message if result.error is not None else None),
        "resolved": (result.reward or 0.0) >= 1.0,
        "success": result.outcome == Outcome.COMPLETED,
        "finish": finished,
        "critical_error": None if told else _where(result),
        "end_properly": finished and result.stop_reason not in TRUNCATING,
        "filter": not told,
        "git_patch": result.notes.get("patch"),
        "messages": messages(learnable[-1], texts) if told else [],
        "tools": schemas_of(job.instance.get("tools")),
        "timing": dict(result.timings),
        "reward": result.reward,
        "outcome": str(result.outcome),
        "stop_reason": result.stop_reason,
        "metrics": dict(result.metrics),
        "notes": notes,
    }


def failure(instance: Any, job_id: str | None, message: str, where: str) -> dict[str, Any]:
    """Return the answer for a job without a trajectory; `where` is `init`, `run`, `eval` or `timeout`."""
    named = instance if isinstance(instance, dict) else {}
    flags = dict.fromkeys(("resolved", "success", "finish", "end_properly"), False)
    return {
        **_head(named, job_id, message),
        **flags,
        "critical_error": where,
        "filter": True,
        "git_patch": None,
        "messages": [],
        "tools": [],
        "timing": {},
        "reward": None,
    }


def messages(arrays: TokenArrays, texts: MessageTexts | None) -> list[dict[str, Any]]:
    """Return the messages of one segment, up to the policy's last."""
    told: list[dict[str, Any]] = []
    ids, mask = arrays.token_ids, arrays.loss_mask
    last_turn: NDArray[np.int32] | None = None
    unplaced = np.empty(0, np.int32)
    """Template tokens behind a policy's turn, which belong to the next message."""
    for start, end, number in arrays.turns.tolist():
        role = Role(number)
        if role != Role.ASSISTANT:
            content = texts.content(role, ids[start:end], last_turn) if texts is not None else ""
            whole = np.concatenate([unplaced, ids[start:end]])
            told.append({"role": NAMES[role], "content": content, "token_ids": whole.tolist()})
            unplaced = unplaced[:0]
            continue
        edges = [start, *(start + 1 + np.flatnonzero(np.diff(mask[start:end]))).tolist(), end]
        for begin, stop in pairwise(edges):
            if not mask[begin:stop].any():
                unplaced = np.concatenate([unplaced, ids[begin:stop]])
                continue
            _place(told, unplaced)
            unplaced, last_turn = unplaced[:0], ids[begin:stop]
            told.append(_assistant(arrays, begin, stop, texts))
    while told and told[-1]["role"] != "assistant":
        told.pop()
    return told


def _place(told: list[dict[str, Any]], context: NDArray[np.int32]) -> None:
    """Append the tokens that open the policy's turn to the message before it, which is never the policy's."""
    if not len(context):
        return
    if not told or told[-1]["role"] == "assistant":
        told.append({"role": "user", "content": "", "token_ids": []})
    told[-1]["token_ids"] += context.tolist()


def _assistant(arrays: TokenArrays, start: int, end: int, texts: MessageTexts | None) -> dict[str, Any]:
    generated, logprobs = arrays.token_ids[start:end], arrays.logprobs[start:end]
    content, calls = texts.said(generated) if texts is not None else ("", ())
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content,
        "token_ids": generated.tolist(),
        "input_ids": arrays.token_ids[:start].tolist(),
    }
    if np.isfinite(logprobs).all():
        message["logprobs"] = logprobs.tolist()
    if calls:
        message["tool_calls"] = [{"name": call.name or MALFORMED, "arguments": call.arguments} for call in calls]
    return message


def _head(instance: Mapping[str, Any], job_id: str | None, error: str | None) -> dict[str, Any]:
    named = {name: instance.get(name) for name in ("instance_id", "trajectory_id")}
    return {**named, "job_id": job_id, "error": error}


def _where(result: Result) -> str:
    """Return the phase in which a rollout without a reward ended."""
    if result.outcome == Outcome.TIMEOUT:
        return "timeout"
    if result.stop_reason:
        return "eval"  # RUN had ended
    return "run" if result.tokens or "run" in result.timings else "init"
