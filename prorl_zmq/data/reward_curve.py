"""Test whether the mean reward of a training rises, over its steps and at its end."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_STEPS = 6
"""Fewer have no third whose spread says anything."""
CLEAR = 2.0
"""Standard errors from which a change counts as one."""


class Rise(NamedTuple):
    first: float
    """Mean of the first third of the steps."""
    last: float
    """Mean of the last third."""
    errors: float
    """Their difference in standard errors; negative if the reward fell."""


def standard_error(rewards: Sequence[float]) -> float:
    """Return the standard error of the mean of independent rewards; NaN for fewer than two."""
    return statistics.stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else math.nan


def rise(means: Sequence[float]) -> Rise | None:
    """Compare the last third of a training's steps with the first, by each step's mean reward.

    Returns:
        None for fewer than six steps.
    """
    third = len(means) // 3
    if len(means) < LEAST_STEPS:
        return None
    first, last = means[:third], means[-third:]
    change = statistics.fmean(last) - statistics.fmean(first)
    error = math.hypot(standard_error(first), standard_error(last))
    errors = change / error if error else math.copysign(math.inf, change) if change else 0.0
    return Rise(statistics.fmean(first), statistics.fmean(last), errors)


def conclusion(means: Sequence[float]) -> str:
    """Return one line for the end of a training, such as `reward rose from 0.21 to 0.64 (8.3 standard errors)`."""
    found = rise(means)
    if found is None:
        return f"reward: {len(means)} steps are too few to tell a rise from chance; {LEAST_STEPS} are needed"
    verb = "rose" if found.errors >= CLEAR else "fell" if found.errors <= -CLEAR else "did not clearly change:"
    third = len(means) // 3
    return (
        f"reward {verb} from {found.first:.3f} to {found.last:.3f} ({abs(found.errors):.1f} standard errors; "
        f"means of the first and the last {third} of {len(means)} steps)"
    )


class RewardCurve:
    """Collects the rewards of a training's steps, and says in words how they are."""

    def __init__(self) -> None:
        self.means: list[float] = []
        """By step."""

    def add(self, rewards: Sequence[float]) -> str:
        """Add a step's rewards; return such as `reward 0.312 ± 0.021 (32 rollouts)`: mean and standard error."""
        self.means.append(statistics.fmean(rewards))
        return f"reward {self.means[-1]:.3f} ± {standard_error(rewards):.3f} ({len(rewards)} rollouts)"

    def conclusion(self) -> str:
        """Return one line for the end, as the function of this name does."""
        return conclusion(self.means)
