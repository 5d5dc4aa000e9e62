"""A group under way: the rollouts of one prompt that are in, those that run, and those that are still to be started."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from .group_filters import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable


class Rollout(NamedTuple):
    """A job of a group that has a reward."""

    job_id: str
    reward: float
    tokens: int
    version: int
    """The oldest weight version that one of its tokens was generated with."""
    seconds: float
    """From its start to its end."""


@dataclass(slots=True, eq=False)
class RolloutGroup:
    group_id: str
    prompt: Any
    """What was fed; the sampler does not look at it."""
    size: int
    number: int
    """Groups are numbered as they are opened, over all batches."""
    session: str
    batch_id: str
    """Empty: it is carried over, and belongs to no batch now."""
    verdict: Verdict = Verdict.OPEN
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    """By place."""
    running: dict[str, int] = field(default_factory=dict)
    """The place of each job that runs."""
    missing: list[int] = field(default_factory=list)
    """Places to start a job for, the next one last."""
    failures: Counter[str] = field(default_factory=Counter)
    """Why jobs brought no rollout."""
    started: int = 0
    """Jobs so far."""
    started_with: dict[str, int] = field(default_factory=dict)
    """The weight version that was announced when a job began; none of those that an earlier process started."""
    given_to: str = ""
    """The client that was sent it, and has not acknowledged it."""
    given_at: float = 0.0

    @property
    def is_complete(self) -> bool:
        return len(self.rollouts) == self.size

    @property
    def rewards(self) -> list[float]:
        """Of the rollouts that are in."""
        return [rollout.reward for rollout in self.rollouts.values()]

    def find_missing(self) -> None:
        taken = {*self.rollouts, *self.running.values()}
        self.missing = [index for index in range(self.size - 1, -1, -1) if index not in taken]

    def start(self) -> str:
        """Fill the next place that is missing; return the id of the new job."""
        job_id = f"{self.group_id}.{self.started}"
        self.started += 1
        self.running[job_id] = self.missing.pop()
        return job_id

    def stop(self) -> list[str]:
        """Forget all jobs that run, whose places are missing again; return them."""
        stopped, self.running = self.running, {}
        self.missing.extend(sorted(stopped.values(), reverse=True))
        return list(stopped)

    def drop(self, is_unusable: Callable[[Rollout], bool]) -> tuple[Rollout, ...]:
        """Forget rollouts, whose places are missing again; return them."""
        gone = {index: rollout for index, rollout in self.rollouts.items() if is_unusable(rollout)}
        for index in gone:
            del self.rollouts[index]
        if gone:
            self.find_missing()
            self.verdict = Verdict.OPEN
        return tuple(gone.values())
