"""`Group`: the completed rollouts of one prompt, as a batch hands them to the trainer.

Left out on purpose: advantages, which are the trainer's (see `collation` for the arrays that they are computed from).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .trajectory import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The completed rollouts of one prompt, as a batch kept them."""

    group_id: str
    """The group's unique id, from the service."""
    prompt_id: str
    """The `job_id` of the prompt that was fed; the same prompt fed twice gives two groups with one prompt id."""
    trajectories: tuple[Trajectory, ...]
    """All `completed`, by place; as many as the batch's `group_size`, and none a copy of another."""

    def __len__(self) -> int:
        return len(self.trajectories)

    @property
    def rewards(self) -> NDArray[np.float64]:
        """The rewards, float64 [n], by place; NaN where a trajectory has none."""
        return np.array([trajectory.reward for trajectory in self.trajectories], np.float64)

    @property
    def versions(self) -> tuple[int, ...]:
        """The weight versions that generated its tokens, ascending; several if weights changed on the way."""
        return tuple(sorted({version for trajectory in self.trajectories for version in trajectory.versions}))
