"""NeMo RL: rollouts as message logs, and the arrays of its clipped policy-gradient loss (after `algorithms/grpo.py`).

    repeated_batch = batched_data_dict(rollout_batch(groups))            # as its rollout workers return it
    train_data = batched_data_dict(train_arrays(groups, pad_id=tokenizer.pad_token_id))

NeMo RL trains on all tokens of messages of the role `assistant`: what a template puts before an answer belongs to the
message before it, as in NeMo RL's own rollouts. The text of messages stays empty; training does not read it. A
trajectory of several segments is refused, since NeMo RL has one row per rollout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.collation import collate
from ..data.rows import single_rows_of
from ..data.trajectory import Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ..data.group import Group
    from ..data.rows import Row

ROLES = {Role.SYSTEM: "system", Role.USER: "user", Role.TOOL: "environment"}
"""NeMo RL's names of the roles whose tokens are not trained."""
REMEDY = "let the chat keep its history (`history = 'append'`)"


def message_log(row: Row) -> list[dict[str, Any]]:
    """Return a row's messages: `role`, `content`, `token_ids` int64 [n]; if trained, `generation_logprobs` float32 [n].

    The messages' tokens, concatenated, are the row's.
    """
    arrays = row.arrays
    flips = np.flatnonzero(np.diff(arrays.loss_mask)) + 1
    edges = np.unique(np.concatenate([[0, len(row)], flips, arrays.turns[:, 0], arrays.turns[:, 1]]))
    spans: list[tuple[str, int, int]] = []
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        before = spans[-1][0] if spans else "user"
        if arrays.loss_mask[start]:
            role = "assistant"
        else:
            role = _role(arrays.turns, start) or (before if before != "assistant" else "environment")
        if spans and role == before:
            spans[-1] = (role, spans[-1][1], end)
        else:
            spans.append((role, start, end))
    return [_message(row, *span) for span in spans]


def rollout_batch(groups: Sequence[Group], *, task_name: str | None = None) -> dict[str, Any]:
    """Return the rollouts under the names of NeMo RL's `DatumSpec`; one list entry or array element per rollout.

    Args:
        groups: what to train on.
        task_name: the name in NeMo RL's configuration; None: each job's own task.

    Raises:
        NotTrainable: no groups, one that cannot be trained on, or a trajectory of several segments.
    """
    rows = single_rows_of(groups, "NeMo RL", REMEDY)
    return {
        "message_log": [message_log(row) for row in rows],
        "length": np.array([row.prompt_tokens for row in rows], np.int64),
        "loss_multiplier": np.ones(len(rows), np.float32),
        "total_reward": np.array([row.reward for row in rows], np.float32),
        "truncated": np.array([row.truncated for row in rows], np.bool_),
        "idx": [row.group for row in rows],
        "task_name": [task_name or row.trajectory.result.task for row in rows],
        "extra_env_info": [dict(row.trajectory.result.metrics) for row in rows],
        "weight_version": [row.versions[0] for row in rows],
    }


def train_arrays(groups: Sequence[Group], *, pad_id: int, multiple_of: int = 1) -> dict[str, NDArray[Any]]:
    """Return the arrays of `ClippedPGLossDataDict` that rollouts determine, and what advantages are computed from.

    `input_ids` int64 [B, S] (padded on the right), `input_lengths` int64 [B], `token_mask` and `generation_logprobs`
    float32 [B, S], `sample_mask` and `total_reward` float32 [B], `prompt_ids_for_adv` int64 [B, 1]. NeMo RL takes
    rollouts for those of one group if these are equal, and uses them for nothing else: they are the groups' numbers,
    since the prompts of one group may differ, by a sandbox's path for instance.

    Args:
        groups: what to train on.
        pad_id: the tokenizer's.
        multiple_of: what S is rounded up to a multiple of (`make_sequence_length_divisible_by`).

    Raises:
        NotTrainable: as `rollout_batch`.
    """
    rows = single_rows_of(groups, "NeMo RL", REMEDY)
    arrays = collate(groups, pad_id=pad_id, multiple_of=multiple_of)
    return {
        "input_ids": arrays["token_ids"].astype(np.int64),
        "input_lengths": arrays["lengths"].astype(np.int64),
        "token_mask": arrays["loss_mask"].astype(np.float32),
        "sample_mask": np.ones(len(rows), np.float32),
        "generation_logprobs": np.array(arrays["logprobs"]),
        "total_reward": arrays["rewards"],
        "prompt_ids_for_adv": arrays["group"].astype(np.int64)[:, None],
    }


def batched_data_dict(columns: Mapping[str, Any]) -> Any:
    """Return `rollout_batch`'s or `train_arrays`' columns as a `BatchedDataDict` of tensors; needs NeMo RL, torch."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    return BatchedDataDict(tensors(columns))


def tensors(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns with every array in them as a tensor, those of the messages too; needs torch."""
    import torch

    def convert(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value)
        if isinstance(value, dict):
            return {key: convert(item) for key, item in value.items()}
        return [convert(item) for item in value] if isinstance(value, list) else value

    return {key: convert(value) for key, value in columns.items()}


def _role(turns: NDArray[np.int32], token: int) -> str:
    """Return the role of an untrained token's turn; empty: the policy's own turn, or none."""
    inside = np.flatnonzero((turns[:, 0] <= token) & (token < turns[:, 1]))
    return ROLES.get(Role(turns[inside[0], 2]), "") if len(inside) else ""


def _message(row: Row, role: str, start: int, end: int) -> dict[str, Any]:
    message = {"role": role, "content": "", "token_ids": row.arrays.token_ids[start:end].astype(np.int64)}
    if role == "assistant":
        message["generation_logprobs"] = np.array(row.arrays.logprobs[start:end])
    return message
