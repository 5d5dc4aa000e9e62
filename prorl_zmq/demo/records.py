"""What a run of the demo records: batches, the lines of `steps.jsonl`, and `summary.json`. Times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..data.group import Group
    from ..data.trajectory import Trajectory
    from ..wire.messages.batches import BatchReport
    from .grpo import StepStats


class Collected(NamedTuple):
    """A batch that has ended; times are seconds since this process began to train."""

    groups: list[Group]
    report: BatchReport
    opened_s: float
    met_s: float

    @property
    def reward(self) -> float:
        """Mean over the rollouts of all whole groups, kept or not."""
        parts = (self.report.kept.reward, self.report.dropped.reward)
        return sum(part.mean * part.count for part in parts) / max(sum(part.count for part in parts), 1)

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that was made: a line of `steps.jsonl`; times as in `Collected`."""

    step: int
    reward: float
    rollouts: int
    """Completed while the batch was open."""
    failed: int
    """Jobs that ended without a reward, and were replaced."""
    kept_groups: int
    dropped_groups: int
    opened_s: float
    met_s: float
    learn_from_s: float
    learned_s: float
    """With the checkpoint written."""
    pushed_s: float
    """When the engine served the new weights."""
    stats: StepStats


@dataclass(slots=True)
class Summary:
    """What a run measured: `summary.json`."""

    seed: int
    sandbox: str
    reward_first: float = 0.0
    """Mean reward of the first step, before anything was learned."""
    reward_last: float = 0.0
    """Of the last three steps."""
    rollouts: int = 0
    failed: int = 0
    seconds: float = 0.0
    """Of this process, from its first batch to the last step's end."""
    logprob_gap: float = 0.0
    """Largest, see `StepStats`."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward per step."""
