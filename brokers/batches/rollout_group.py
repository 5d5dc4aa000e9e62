"""`RolloutGroup`: the finished rollouts, running jobs and missing places of one prompt."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ...wire.messages.base import POLICY
from .group_filters import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Rollout(NamedTuple):
    """A completed job of a group, with its reward."""

    job_id: str
    reward: float
    tokens: int
    version: int
    """The oldest weight version of the tokens of the group's model."""
    seconds: float
    """Time in INIT, RUN and EVAL, without queues; SCORE waits for a teacher."""
    roles: tuple[tuple[str, float], ...] = ()
    """The trained conversations with the group's model, each with its reward; empty: there is one, `main`."""
    others: tuple[tuple[str, int], ...] = ()
    """Other trained models, each with the oldest weight version of its tokens."""
    records: tuple[str, ...] = ()
    """The names of its records that have all rows."""


@dataclass(slots=True, eq=False)
class RolloutGroup:
    group_id: str
    prompt: Any
    """The prompt as fed; opaque to the sampler."""
    size: int
    number: int
    """Order of opening over all batches."""
    session: str
    batch_id: str
    """Empty for a carried group without a batch."""
    model: str = POLICY
    """The model of its jobs."""
    verdict: Verdict = Verdict.OPEN
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    """By place."""
    running: dict[str, int] = field(default_factory=dict)
    """The place of each running job."""
    missing: list[int] = field(default_factory=list)
    """Places that need a job; the next one is last."""
    failures: Counter[str] = field(default_factory=Counter)
    """Reasons why jobs produced no rollout."""
    started: int = 0
    """Number of jobs so far."""
    started_with: dict[str, Mapping[str, int]] = field(default_factory=dict)
    """Announced weight versions, by model, when a job began; jobs of an earlier process are missing."""
    given_to: str = ""
    """The client that was sent the group and has not acknowledged it."""
    given_at: float = 0.0

    @property
    def is_complete(self) -> bool:
        return len(self.rollouts) == self.size

    @property
    def rewards(self) -> list[float]:
        """Rewards of the finished rollouts."""
        return [rollout.reward for rollout in self.rollouts.values()]

    @property
    def role_rewards(self) -> list[list[float]]:
        """Rewards of the finished rollouts, by role."""
        roles: dict[str, list[float]] = {}
        for rollout in self.rollouts.values():
            for name, reward in rollout.roles:
                roles.setdefault(name, []).append(reward)
        return [*roles.values()]

    def find_missing(self) -> None:
        taken = {*self.rollouts, *self.running.values()}
        self.missing = [index for index in range(self.size - 1, -1, -1) if index not in taken]

    def start(self) -> str:
        """Fill the next missing place; return the new job's id."""
        job_id = f"{self.group_id}.{self.started}"
        self.started += 1
        self.running[job_id] = self.missing.pop()
        return job_id

    def stop(self) -> list[str]:
        """Remove all running jobs and return them; their places are missing again."""
        stopped, self.running = self.running, {}
        self.missing.extend(sorted(stopped.values(), reverse=True))
        return list(stopped)

    def drop(self, is_unusable: Callable[[Rollout], bool]) -> tuple[Rollout, ...]:
        """Remove unusable rollouts and return them; their places are missing again."""
        gone = {index: rollout for index, rollout in self.rollouts.items() if is_unusable(rollout)}
        for index in gone:
            del self.rollouts[index]
        if gone:
            self.find_missing()
            self.verdict = Verdict.OPEN
        return tuple(gone.values())
