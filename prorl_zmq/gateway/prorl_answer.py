"""What `/process` answers: a trajectory as ProRL's clients read it.

- `messages` is empty unless the rollout has a reward: clients retry such, and learn nothing from them.
- In token mode clients concatenate all `token_ids`, and train on those of assistants. So these have what the policy
  generated, and nothing else; what a template writes around it belongs to the messages before and behind.
- A trajectory of several segments does not fit this form: only the last one is returned, and `notes` says so.
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
"""Reasons to stop (see `stages.episode.StopReason`) that are the policy's own."""
MALFORMED = "malformed_tool_call"
"""How a call is told that could not be read: the tool messages behind it are counted."""
NAMES = {Role.SYSTEM: "system", Role.USER: "user", Role.TOOL: "tool"}


def answer(
    instance: Mapping[str, Any], job_id: str | None, job: Job, trajectory: Trajectory, texts: MessageTexts | None
) -> dict[str, Any]:
    """Return the answer for a job that ended, which its client calls `job_id`."""
    result = trajectory.result
    learnable = [arrays for arrays in trajectory.segments() if arrays.loss_mask.any()]
    told = result.reward is not None and bool(learnable)
    finished = result.stop_reason in FINISHED
    notes = dict(result.notes)
    if len(result.segments):
        notes["segments"] = f"the last of {len(result.segments) + 1} segments of the trajectory is told"
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
    """Return the answer for a job that has no trajectory; `where` is `init`, `run`, `eval` or `timeout`."""
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
    """Return the messages of one segment, in order; those behind the last of the policy's are left out."""
    told: list[dict[str, Any]] = []
    ids, mask = arrays.token_ids, arrays.loss_mask
    last_turn: NDArray[np.int32] | None = None
    unplaced = np.empty(0, np.int32)
    """What a template wrote behind a turn of the policy: it belongs to the message that follows."""
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
    """Put what opens the policy's turn into the message before it, which is never one of the policy's own."""
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
    """Say in which phase a rollout without a reward ended."""
    if result.outcome == Outcome.TIMEOUT:
        return "timeout"
    if result.stop_reason:
        return "eval"  # RUN had ended
    return "run" if result.tokens or "run" in result.timings else "init"
