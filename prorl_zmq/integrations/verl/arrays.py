"""verl: the batch of a rollout, as `DataProto` or as `AgentLoopOutput`s (after verl 0.9.1, `experimental/agent_loop`).

    batch = data_proto(groups, prompt_length=1024, response_length=8192, pad_token_id=tokenizer.pad_token_id)

Prompts are padded on the left and responses on the right, each to its configured length. `uid` is the group's id, by
which GRPO finds the rollouts of one prompt. Nothing is cut, as verl's own rollout does before it pads: a cut trajectory
is not what was rewarded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...data.rows import rows_of, single_rows_of
from ...errors import NotTrainable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ...data.group import Group
    from ...data.rows import Row

NO_EXTRA = ("turn_scores", "tool_rewards", "extras")
"""Columns that verl always has and that stay empty here."""


def data_proto(groups: Sequence[Group], *, prompt_length: int, response_length: int, pad_token_id: int) -> Any:
    """Return the `verl.DataProto` of `rollout_batch`; needs verl and torch.

    Raises:
        NotTrainable: as `rollout_batch`.
    """
    import torch
    from tensordict import TensorDict
    from verl import DataProto

    batch, non_tensor_batch, meta_info = rollout_batch(
        groups, prompt_length=prompt_length, response_length=response_length, pad_token_id=pad_token_id
    )
    tensors = {key: torch.from_numpy(array) for key, array in batch.items()}
    size = len(batch["prompts"])
    return DataProto(batch=TensorDict(tensors, batch_size=size), non_tensor_batch=non_tensor_batch, meta_info=meta_info)


def rollout_batch(
    groups: Sequence[Group], *, prompt_length: int, response_length: int, pad_token_id: int
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]], dict[str, Any]]:
    """Return a `DataProto`'s `batch`, `non_tensor_batch` and `meta_info`, the first as numpy arrays.

    `prompts` int64 [B, P], `responses` int64 [B, R], `response_mask` int64 [B, R], `input_ids`, `attention_mask` and
    `position_ids` int64 [B, P + R], `rollout_log_probs` float32 [B, R], and `rm_scores` float32 [B, R] with the reward
    at the last token of the response.

    Args:
        groups: what to train on.
        prompt_length: P, `rollout.prompt_length`.
        response_length: R, `rollout.response_length`.
        pad_token_id: the tokenizer's.

    Raises:
        NotTrainable: no groups, one that cannot be trained on, a trajectory of several segments, or one that is too
            long.
    """
    rows = single_rows_of(groups, "verl's DataProto", "hand them over with `agent_loop_outputs`")
    size, total = len(rows), prompt_length + response_length
    input_ids = np.full((size, total), pad_token_id, np.int64)
    attention_mask = np.zeros((size, total), np.int64)
    response_mask = np.zeros((size, response_length), np.int64)
    log_probs = np.zeros((size, response_length), np.float32)
    scores = np.zeros((size, response_length), np.float32)
    for index, row in enumerate(rows):
        response_tokens = len(row) - row.prompt_tokens
        _check_room(row, "prompt", row.prompt_tokens, prompt_length)
        _check_room(row, "response", response_tokens, response_length)
        span = slice(prompt_length - row.prompt_tokens, prompt_length + response_tokens)
        input_ids[index, span] = row.arrays.token_ids
        attention_mask[index, span] = 1
        response_mask[index, :response_tokens] = row.arrays.loss_mask[row.prompt_tokens :]
        log_probs[index, :response_tokens] = row.arrays.logprobs[row.prompt_tokens :]
        scores[index, response_tokens - 1] = row.reward
    batch = {
        "prompts": input_ids[:, :prompt_length].copy(),
        "responses": input_ids[:, prompt_length:].copy(),
        "response_mask": response_mask,
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": np.maximum(attention_mask.cumsum(1) - 1, 0),
        "rollout_log_probs": log_probs,
        "rm_scores": scores,
    }
    non_tensor_batch = {
        "__num_turns__": np.array([len(row.arrays.turns) for row in rows], np.int32),
        "uid": _objects([row.group_id for row in rows]),
        "min_global_steps": _objects([row.versions[0] for row in rows]),
        "max_global_steps": _objects([row.versions[-1] for row in rows]),
        **{key: _objects([None] * size) for key in NO_EXTRA},
    }
    return batch, non_tensor_batch, {"metrics": [_metrics(row) for row in rows], "reward_extra_keys": []}


def agent_loop_outputs(groups: Sequence[Group]) -> list[list[dict[str, Any]]]:
    """Return the fields of an `AgentLoopOutput` for each segment of each trajectory, all with the trajectory's reward.

    `[AgentLoopOutput(**fields) for fields in outputs[i]]` is what an agent loop's `run` returns for rollout i.

    Raises:
        NotTrainable: no groups, or one that cannot be trained on.
    """
    outputs: list[list[dict[str, Any]]] = [[] for group in groups for _ in group.trajectories]
    for row in rows_of(groups):
        arrays, start = row.arrays, row.prompt_tokens
        fields = {
            "prompt_ids": arrays.token_ids[:start].tolist(),
            "response_ids": arrays.token_ids[start:].tolist(),
            "response_mask": arrays.loss_mask[start:].astype(int).tolist(),
            "response_logprobs": arrays.logprobs[start:].tolist(),
            "reward_score": row.reward,
            "num_turns": len(arrays.turns),
            "metrics": _metrics(row),
            "extra_fields": {
                "reward_extra_info": {},
                "min_global_steps": row.versions[0],
                "max_global_steps": row.versions[-1],
            },
        }
        outputs[row.index].append(fields)
    return outputs


def _metrics(row: Row) -> dict[str, float]:
    """The fields of verl's `AgentLoopMetrics`, in seconds."""
    timings = row.trajectory.result.timings
    return {
        "generate_sequences": timings.get("engine", 0.0),
        "tool_calls": sum(seconds for name, seconds in timings.items() if name.startswith("tool.")),
        "compute_score": timings.get("eval", 0.0),
        "num_preempted": -1,
    }


def _check_room(row: Row, what: str, tokens: int, room: int) -> None:
    if tokens > room:
        job_id = row.trajectory.job_id
        raise NotTrainable(
            f"job {job_id} has a {what} of {tokens} tokens, and rollout.{what}_length is {room}",
            group_id=row.group_id,
            job_id=job_id,
        )


def _objects(values: Sequence[Any]) -> NDArray[Any]:
    array = np.empty(len(values), object)
    array[:] = values
    return array
