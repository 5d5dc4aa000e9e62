"""`Group`: the completed rollouts of one prompt, as a batch returns them to the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .printed import RolloutLine, group_html, group_line

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
    def model(self) -> str:
        """The model of its jobs, whose weights the batch's trainer trains."""
        return self.trajectories[0].result.model

    @property
    def rewards(self) -> NDArray[np.float64]:
        """The rewards, float64 [n], by place; NaN where a trajectory has none."""
        return np.array([trajectory.reward for trajectory in self.trajectories], np.float64)

    @property
    def versions(self) -> tuple[int, ...]:
        """The weight versions that generated its tokens, ascending; several if weights changed on the way."""
        return tuple(sorted({version for trajectory in self.trajectories for version in trajectory.versions}))

    def split(self, model: str | None = None) -> list[Group]:
        """Return a group for each role: for each name of a trained conversation, these conversations of all rollouts.

        Self-play needs it: a baseline over both players of a zero-sum game is always 0. The groups' ids end with the
        name, such as `7f3a/white`. A group of rollouts whose conversations have no names is returned as it is. A
        role that two models had in different rollouts is two groups.

        Args:
            model: only conversations with this model, as a trainer of `group.model` needs them; None: all.
        """
        roles: dict[tuple[str, str], list[Trajectory]] = {}
        for trajectory in self.trajectories:
            for part in trajectory.split():
                if model is None or part.result.model == model:
                    roles.setdefault((part.result.agent, part.result.model), []).append(part)
        if not any(agent for agent, _ in roles):
            return [self] if roles else []
        named = {role: f"{self.group_id}/{role[0]}" if role[0] else self.group_id for role in roles}
        return [Group(named[role], self.prompt_id, tuple(parts)) for role, parts in roles.items()]

    def __repr__(self) -> str:
        return f"<Group {self._line()}>"

    def _repr_html_(self) -> str:
        """Return the form in which a notebook shows it."""
        rollouts = [RolloutLine(one.result, one.generated_tokens, one.versions) for one in self.trajectories]
        return group_html(self._line(), rollouts)

    def _line(self) -> str:
        return group_line(self.group_id, self.prompt_id, self.rewards.tolist(), self.versions)
