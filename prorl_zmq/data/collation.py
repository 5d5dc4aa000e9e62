"""`collate`: a batch's groups as padded arrays, ready for a loss.

Padding is on the right. Nothing is copied if no padding is needed and the rows already lie as in the array: a single
row, or rows of equal length at equal distances in one block. Such an array is a view of the received frame and may be
read-only: copy it before you write to it. Advantages, clipping and tensors (`torch.from_numpy`) are the trainer's.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import NotTrainable
from .rows import rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .group import Group
    from .rows import Row


def collate(
    groups: Sequence[Group], *, pad_id: int = 0, length: int | None = None, multiple_of: int = 1
) -> dict[str, NDArray[Any]]:
    """Return the arrays of B rows of up to T tokens.

    A row is a segment of a trajectory, and nearly all trajectories have one; rows are ordered by group, then by place
    in it, then by segment.

    | key | dtype, shape | meaning |
    |---|---|---|
    | `token_ids` | int32 [B, T] | the whole conversation; `pad_id` behind it |
    | `attention_mask` | bool [B, T] | true on all tokens, false on padding |
    | `loss_mask` | bool [B, T] | true where the policy generated the token |
    | `logprobs` | float32 [B, T] | log-prob of each generated token when it was sampled; 0.0 elsewhere |
    | `weight_versions` | int32 [B, T] | the weights that generated each token; -1 elsewhere |
    | `lengths` | int32 [B] | tokens of the row |
    | `prompt_lengths` | int32 [B] | tokens before the first generated one |
    | `rewards` | float32 [B] | the trajectory's reward, on each of its rows |
    | `token_rewards` | float32 [B, T] | the reward by token (`Row.token_rewards`); a row's sum is its reward |
    | `group` | int32 [B] | index into `groups` |
    | `trajectory` | int32 [B] | counts the trajectories of all groups; rows of one share it |
    | `is_last` | bool [B] | the last row of its trajectory: sum what counts once per trajectory over these |
    | `truncated` | bool [B] | a limit ended the trajectory, not the policy |
    | `oldest_version` | int32 [B] | the oldest weights of the row; the trainer's version minus this is its staleness |

    Args:
        groups: of one or several batches, of any sizes.
        pad_id: the token id of padding.
        length: T; None: that of the longest row.
        multiple_of: what T is rounded up to a multiple of.

    Raises:
        NotTrainable: no groups, or or one of them cannot be trained on: no finite reward, no generated token, log-probs
            of two kinds, a row longer than `length`. `job_id` names the job.
    """
    rows = rows_of(groups)
    width = _width(rows, length, multiple_of)
    lengths = np.array([len(row) for row in rows], np.int32)
    return {
        "token_ids": _stack([row.arrays.token_ids for row in rows], width, pad_id),
        "attention_mask": np.arange(width) < lengths[:, None],
        "loss_mask": _stack([row.arrays.loss_mask for row in rows], width, False),
        "logprobs": _stack([row.arrays.logprobs for row in rows], width, 0.0),
        "weight_versions": _stack([row.arrays.weight_versions for row in rows], width, -1),
        "lengths": lengths,
        "prompt_lengths": np.array([row.prompt_tokens for row in rows], np.int32),
        "rewards": np.array([row.reward for row in rows], np.float32),
        "token_rewards": _stack([row.token_rewards for row in rows], width, 0.0),
        "group": np.array([row.group for row in rows], np.int32),
        "trajectory": np.array([row.index for row in rows], np.int32),
        "is_last": np.array([row.is_last for row in rows], np.bool_),
        "truncated": np.array([row.truncated for row in rows], np.bool_),
        "oldest_version": np.array([row.versions[0] for row in rows], np.int32),
    }


def _width(rows: list[Row], length: int | None, multiple_of: int) -> int:
    if multiple_of < 1 or (length is not None and (length < 1 or length % multiple_of)):
        raise ValueError(f"length {length} is not a positive multiple of {multiple_of}")
    longest = max(rows, key=len)
    if length is None:
        return -(-len(longest) // multiple_of) * multiple_of
    if len(longest) > length:
        job_id = longest.trajectory.job_id
        raise NotTrainable(
            f"job {job_id} has {len(longest)} tokens, more than {length}; give jobs an `episode.max_tokens` that fits",
            group_id=longest.group_id,
            job_id=job_id,
        )
    return length


def _stack(arrays: list[NDArray[Any]], width: int, fill: float) -> NDArray[Any]:
    """Return [B, width]: a view if the rows lie in memory as its rows would."""
    view = _as_they_lie(arrays) if all(len(array) == width for array in arrays) else None
    if view is not None:
        return view
    stacked = np.full((len(arrays), width), fill, arrays[0].dtype)
    for row, array in zip(stacked, arrays, strict=True):
        row[: len(array)] = array
    return stacked


def _as_they_lie(arrays: list[NDArray[Any]]) -> NDArray[Any] | None:
    """Return arrays of one length as the rows of one view; None if they are not at equal distances in one block."""
    first = arrays[0]
    if len(arrays) == 1:
        return first[None, :]
    starts = [array.ctypes.data for array in arrays]
    steps = {after - before for before, after in pairwise(starts)}
    in_one_block = first.base is not None and all(array.base is first.base for array in arrays)
    if not in_one_block or len(steps) > 1 or min(steps) < first.nbytes:
        return None
    return np.lib.stride_tricks.as_strided(
        first, (len(arrays), len(first)), (steps.pop(), first.itemsize), writeable=first.flags.writeable
    )
