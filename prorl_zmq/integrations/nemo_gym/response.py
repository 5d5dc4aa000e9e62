"""NeMo Gym's answer for a rollout: a response with the items to train on, or a failure.

Plain data, made without NeMo Gym. Each stretch of policy tokens is one output message, whose `prompt_token_ids` are all
tokens before it. So each item begins with all of the previous one, as NeMo RL asserts, and a rollout's JSON grows with
the square of its turns. Tokens after the last stretch are in no item and not trained on. A tool's answer is an item
without tokens that only marks its place. Texts are empty, since the service returns tokens; NeMo RL decodes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...data.trajectory import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ...data.rows import Row
    from ...errors import ErrorInfo

FAILURE_CLASS = "_ng_failure_class"
"""The error class: the row goes to Gym's file of failures, and a resumed run makes the rollout again."""
TERMINAL = "_ng_failure_terminal"
"""Making the rollout again would fail again."""
NO_PERSIST = "_ng_no_persist"
"""The row goes into no file; a resumed run makes the rollout as if for the first time."""
COUNTS = ("tool_calls", "malformed_tool_calls", "invalid_tool_arguments", "continued_turns")
"""Metrics that jobs omit when they are 0; Gym averages over the rows that have them."""


def output_items(row: Row) -> list[dict[str, Any]]:
    """Return a row's output items, in order, as Gym's JSON.

    One message per stretch of policy tokens, as `NeMoGymResponseOutputMessageForTraining`: `prompt_token_ids` and
    `generation_token_ids` lists of int, `generation_log_probs` a list of float as long as the latter. The last one is
    `incomplete` if a limit stopped the rollout. One `function_call_output` per tool turn.
    """
    arrays = row.arrays
    edges = np.flatnonzero(np.diff(arrays.loss_mask.astype(np.int8), prepend=0, append=0)).tolist()
    token_ids, logprobs = arrays.token_ids.tolist(), arrays.logprobs.tolist()
    name = row.trajectory.job_id
    items: list[tuple[int, dict[str, Any]]] = []
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        message = {
            "type": "message",
            "id": f"msg_{name}_{start}",
            "role": "assistant",
            "status": "incomplete" if row.truncated and end == edges[-1] else "completed",
            "content": [],
            "prompt_token_ids": token_ids[:start],
            "generation_token_ids": token_ids[start:end],
            "generation_log_probs": logprobs[start:end],
        }
        items.append((start, message))
    for start in arrays.turns[arrays.turns[:, 2] == Role.TOOL, 0].tolist():
        answer = {"type": "function_call_output", "call_id": f"call_{name}_{start}", "output": ""}
        items.append((start, answer))
    return [item for _, item in sorted(items, key=lambda placed: placed[0])]


def rollout(request: Mapping[str, Any], row: Row, created_at: float) -> dict[str, Any]:
    """Return the answer of `/run` for a trainable rollout.

    It has all of the request, `reward`, and `response`, whose status is `incomplete` if a limit stopped the rollout,
    and values that Gym averages: the service's metrics, `truncated`, `weight_version` (the oldest), `seconds` (not
    queued).

    Args:
        request: the row of the data, as Gym sent it.
        row: the rollout.
        created_at: seconds since the epoch.
    """
    result = row.trajectory.result
    generated = int(row.arrays.loss_mask.sum())
    usage = {
        "input_tokens": len(row) - generated,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(row),
    }
    response = {
        **_response(result.job_id, created_at),
        "model": result.backend,
        "status": "incomplete" if row.truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if row.truncated else None,
        "output": output_items(row),
        "usage": usage,
    }
    return {
        **request,
        **dict.fromkeys(COUNTS, 0.0),
        **result.metrics,
        "reward": row.reward,
        "response": response,
        "job_id": result.job_id,
        "stop_reason": result.stop_reason,
        "truncated": row.truncated,
        "weight_version": row.versions[0],
        "seconds": row.seconds,
    }


def failure(
    request: Mapping[str, Any], error: ErrorInfo, job_id: str, created_at: float, mark: str = ""
) -> dict[str, Any]:
    """Return the answer of `/run` for a rollout without a reward.

    Args:
        request: the row of the data, as Gym sent it.
        error: its code becomes the class of the failure.
        job_id: the job's; empty: there is no job.
        created_at: seconds since the epoch.
        mark: `TERMINAL`, `NO_PERSIST`, or empty.
    """
    told = {name: value for name, value in request.items() if name != "reward"}
    marks = {FAILURE_CLASS: error.code} | ({mark: True} if mark else {})
    response = {
        **_response(job_id, created_at),
        "model": "",
        "status": "failed",
        "error": {"code": "server_error", "message": error.message},
        "output": [],
    }
    return {**told, **marks, "job_id": job_id, "error_message": error.message, "response": response}


def split_failures(answers: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the answers with a reward, and the number of the others by class."""
    rewarded: list[dict[str, Any]] = []
    failed: dict[str, int] = {}
    for answer in answers:
        if (kind := answer.get(FAILURE_CLASS)) is None:
            rewarded.append(dict(answer))
        else:
            failed[kind] = failed.get(kind, 0) + 1
    return rewarded, failed


def _response(job_id: str, created_at: float) -> dict[str, Any]:
    return {
        "id": f"resp_{job_id}",
        "object": "response",
        "created_at": created_at,
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
    }
