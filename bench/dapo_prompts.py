"""The groups of bench/dapo.py: the duration and the reward of each rollout of a prompt.

Lengths are those of bench/dispatch.py: log-normal with sigma 1.2, cut at 20 times the mean, so that half of the work is
in an eighth of the jobs. Half of the logarithm's variance is the prompt's, since hard prompts are long for all of their
rollouts. A prompt's number determines everything, so each way of collecting gets the same work.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUP = 8
"""Rollouts of a prompt."""
NOT_INFORMATIVE = 0.6
"""Share of the prompts whose rollouts all bring the same reward."""
SIGMA = 1.2
LONGEST = 20.0
"""Times the mean: limits of turns and tokens end the longest rollouts."""


class Rollouts(NamedTuple):
    """What becomes of a prompt."""

    lengths: NDArray[np.float64]
    """float64 [GROUP]: by place, as multiples of the mean."""
    rewards: NDArray[np.float64]
    """float64 [GROUP]: 0 or 1."""

    @property
    def informative(self) -> bool:
        """Its rewards differ."""
        return bool(self.rewards.min() < self.rewards.max())


class Ran(msgspec.Struct, frozen=True, array_like=True):
    """A RUN that is over, by the machine's monotonic clock; a line of a ledger."""

    job_id: str
    prompt: int
    started: float
    ended: float
    whole: bool
    """It was not cut short."""


@lru_cache(maxsize=4096)
def rollouts_of(prompt: int) -> Rollouts:
    """Give what becomes of the rollouts of a prompt."""
    draw = np.random.default_rng(prompt)
    part = SIGMA / math.sqrt(2)
    lengths = draw.lognormal(sigma=part) * draw.lognormal(sigma=part, size=GROUP) / math.exp(SIGMA**2 / 2)
    if draw.random() < NOT_INFORMATIVE:
        rewards = np.full(GROUP, float(draw.integers(2)))
    else:
        rewards = draw.permutation(np.arange(GROUP) < draw.integers(1, GROUP)).astype(np.float64)
    return Rollouts(np.minimum(lengths, LONGEST), rewards)
