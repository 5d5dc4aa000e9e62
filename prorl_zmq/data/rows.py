"""Rows: what a trainer learns from, one per segment of each trajectory of a batch's groups.

The tokens before a row's first trained token are its prompt; the rest is the response, including tools' output.
`collate` and `integrations` use this split. Rows that no trainer can use are rejected here, because trainers silently
read a missing reward as a number and a missing token as padding. A row is a view of its trajectory. A segment without
generated tokens has no row. Trajectories of several trained conversations are rejected: split them by role first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import NotTrainable
from .conversations import trained_rewards

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .group import Group
    from .trajectory import Segment, Trajectory

TRUNCATING = frozenset({"max_turns", "max_tokens", "context_length", "turn_length"})
"""Reasons to stop (see `stages.episode.StopReason`) that are limits: the policy had not finished."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One segment of one trajectory."""

    arrays: Segment
    """Over the segment's T tokens, with its records."""
    first_token: int
    """Where the segment begins in its trajectory."""
    prompt_tokens: int
    """Tokens before the first trained one."""
    trajectory: Trajectory
    group_id: str
    group: int
    """Its group's index in the batch."""
    place: int
    """Its trajectory's index in the group."""
    index: int
    """Its trajectory's index in the batch."""
    is_last: bool
    """It is the last row of its trajectory."""

    def __len__(self) -> int:
        return len(self.arrays.token_ids)

    @property
    def reward(self) -> float:
        return float(self.trajectory.reward or 0.0)

    @property
    def token_rewards(self) -> NDArray[np.float32]:
        """The reward by token, float32 [T]: each turn's at its last generated token, the rest at the last trained one.

        The sum is `reward`.
        """
        return self.rewards_within(len(self))

    def rewards_within(self, length: int) -> NDArray[np.float32]:
        """Return `token_rewards` of the row cut to `length` tokens; of one without a trained token: zeros."""
        rewards = np.zeros(length, np.float64)
        trained = np.flatnonzero(self.arrays.loss_mask[:length])
        if len(trained):
            for place, reward in self.trajectory.reward_places():
                if 0 <= place - self.first_token < length:
                    rewards[place - self.first_token] = np.float32(reward)
            rewards[trained[-1]] += self.reward - rewards.sum()
        return rewards.astype(np.float32)

    @property
    def truncated(self) -> bool:
        return self.trajectory.result.stop_reason in TRUNCATING

    @property
    def versions(self) -> list[int]:
        """The weight versions of its trained tokens, ascending."""
        versions = self.arrays.weight_versions[self.arrays.loss_mask]
        changed = np.flatnonzero(np.diff(versions))  # few places are cheap to sort, all tokens are not
        return sorted({int(versions[0]), *versions[changed + 1].tolist()})

    @property
    def seconds(self) -> float:
        """How long the trajectory's phases took, time in queues excluded."""
        timings = self.trajectory.result.timings
        return sum(timings.get(phase, 0.0) for phase in ("init", "run", "eval"))


def rows_of(groups: Sequence[Group]) -> list[Row]:
    """Return the rows of all groups, in order: by group, by place in it, by segment.

    Raises:
        NotTrainable: there are no groups, or one cannot be trained on; `group_id` and `job_id` name it.
    """
    if not groups:
        raise NotTrainable("there are no groups; ask the batch why (`batch.state`, `batch.report`)")
    rows: list[Row] = []
    seen: set[str] = set()
    index = 0
    for number, group in enumerate(groups):
        if group.group_id in seen:
            raise NotTrainable(f"group {group.group_id} is there twice", group_id=group.group_id)
        if not group.trajectories:
            raise NotTrainable(f"group {group.group_id} has no trajectories", group_id=group.group_id)
        seen.add(group.group_id)
        for place, trajectory in enumerate(group.trajectories):
            conversation = _conversation(trajectory, group)
            _check(conversation, group, rows[0].trajectory if rows else conversation)
            conversation.reward_places()
            starts = (0, *conversation.result.segments)
            segments = [
                (arrays, start)
                for arrays, start in zip(conversation.segments(), starts, strict=True)
                if arrays.loss_mask.any()
            ]
            for position, (arrays, start) in enumerate(segments, 1):
                prompt_tokens = int(arrays.loss_mask.argmax())
                where = (group.group_id, number, place, index, position == len(segments))
                rows.append(Row(arrays, start, prompt_tokens, conversation, *where))
            index += 1
    return rows


def single_rows_of(groups: Sequence[Group], framework: str, remedy: str) -> list[Row]:
    """Return the rows of groups whose trajectories have one each, for a framework that takes no others.

    Raises:
        NotTrainable: as `rows_of`; or a trajectory has several rows, each of which would count as a rollout of its own.
    """
    rows = rows_of(groups)
    for row in rows:
        if not row.is_last:
            raise NotTrainable(
                f"job {row.trajectory.job_id} has several segments, each of which {framework} would take for a rollout "
                f"of its own; {remedy}",
                group_id=row.group_id,
                job_id=row.trajectory.job_id,
            )
    return rows


def check_sizes(groups: Sequence[Group], size: int, framework: str) -> None:
    """Refuse groups of other sizes, for a framework that finds a group's members by counting.

    Raises:
        NotTrainable: a group has more or fewer trajectories; `group_id` names it.
    """
    for group in groups:
        if len(group) != size:
            raise NotTrainable(
                f"group {group.group_id} has {len(group)} trajectories, and {framework} counts on {size} in each",
                group_id=group.group_id,
            )


def _conversation(trajectory: Trajectory, group: Group) -> Trajectory:
    """Return the only trained conversation."""
    found = trajectory.split()
    if len(found) > 1 or any(one.result.model != trajectory.result.model for one in found):
        names = ", ".join(trained_rewards(trajectory.result))
        problem = f"has the trained conversations {names}; split its group by role with `Group.split`"
        raise NotTrainable(f"job {trajectory.job_id} {problem}", group_id=group.group_id, job_id=trajectory.job_id)
    return found[0] if found else trajectory


def _check(trajectory: Trajectory, group: Group, first: Trajectory) -> None:
    reward = trajectory.reward
    if reward is None or not math.isfinite(reward):
        problem = f"ended as {trajectory.outcome} with reward {reward}; only a finite reward can be learned from"
    elif not trajectory.loss_mask.any() or trajectory.result.conversations:
        problem = "has no token that the policy generated"
    elif not np.isfinite(trajectory.logprobs[trajectory.loss_mask]).all():
        problem = "has log-probs that are not finite: its engine did not give them for all tokens"
    elif trajectory.result.model != first.result.model:
        problem = (
            f"has tokens of the model {trajectory.result.model}, and job {first.job_id} of {first.result.model}; a "
            "trainer trains one model: `Group.split(model)`"
        )
    elif trajectory.logprobs_mode != first.logprobs_mode:
        problem = (
            f"has {trajectory.logprobs_mode or 'unnamed log-probs'}, and job {first.job_id} "
            f"{first.logprobs_mode or 'unnamed ones'}; give all engines one --logprobs-mode"
        )
    else:
        return
    raise NotTrainable(f"job {trajectory.job_id} {problem}", group_id=group.group_id, job_id=trajectory.job_id)
