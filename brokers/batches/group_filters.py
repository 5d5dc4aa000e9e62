"""Which groups a batch keeps, and what can be said of a group before its last rollout is in. Pure.

A group is decided early where nothing that may still come can change it: two rewards that differ make it informative
regardless of the others. The batch sampler runs decided groups first, and may stop those that can no longer be kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from ...errors import ConfigError, InvalidBatch
from ...system.plugins import load_plugin, offered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...wire.messages.batches import GroupFilter

ENTRY_POINTS = "prorl_zmq.keep_policies"
"""Group of the entry points that name a user's policies: functions of all rewards of a group that say whether it is
kept. They run in the rollout broker, which waits for them."""
SAME = 1e-9
"""Rewards that differ by less are equal."""


class Verdict(StrEnum):
    """What is known of a group."""

    KEEP = "keep"
    """It is kept once all its rollouts are in, regardless of their rewards."""
    OPEN = "open"
    DROP = "drop"
    """It will not be kept, regardless of the rewards to come."""


class KeepPolicy(Protocol):
    """Decides which groups a batch keeps."""

    def check(self, group_size: int) -> None:
        """Raise unless some group of this size can be kept.

        Raises:
            InvalidBatch: none can.
        """

    def verdict(self, rewards: Sequence[float], group_size: int) -> Verdict:
        """Judge a group by the rewards of those of its rollouts that are in; of a whole group, never `OPEN`."""


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Every group."""

    def check(self, group_size: int) -> None:
        """Any size will do."""

    def verdict(self, rewards: Sequence[float], group_size: int) -> Verdict:
        del rewards, group_size
        return Verdict.KEEP


@dataclass(frozen=True, slots=True)
class KeepInformative:
    """Groups whose rewards are not all equal: others have no advantage to learn from (DAPO's dynamic sampling)."""

    def check(self, group_size: int) -> None:
        if group_size < 2:
            raise InvalidBatch(
                f"`informative` keeps groups whose rewards differ, which those of {group_size} never do; ask for a "
                "group_size of 2 or more, or keep `all`",
                field="group_size",
            )

    def verdict(self, rewards: Sequence[float], group_size: int) -> Verdict:
        if rewards and max(rewards) - min(rewards) > SAME:
            return Verdict.KEEP
        return Verdict.DROP if len(rewards) >= group_size else Verdict.OPEN


@dataclass(frozen=True, slots=True)
class KeepMeanReward:
    """Groups whose mean reward is from `low` to `high`."""

    low: float
    high: float
    least: float = -math.inf
    most: float = math.inf

    def check(self, group_size: int) -> None:
        del group_size
        if not (self.low <= self.high and self.least <= self.most):
            raise InvalidBatch(f"no mean reward is from {self.low:g} to {self.high:g}", field="keep")

    def verdict(self, rewards: Sequence[float], group_size: int) -> Verdict:
        """Compare the means that the group can still have with the range."""
        missing = group_size - len(rewards)
        total = math.fsum(rewards)
        lowest = (total + missing * self.least) / group_size if missing else total / group_size
        highest = (total + missing * self.most) / group_size if missing else total / group_size
        if self.low - SAME <= lowest and highest <= self.high + SAME:
            return Verdict.KEEP
        if highest < self.low - SAME or lowest > self.high + SAME:
            return Verdict.DROP
        return Verdict.OPEN


@dataclass(frozen=True, slots=True)
class KeepWhere:
    """Groups of which a function of the user's says so, once all rewards are in."""

    name: str
    keeps: Callable[[Sequence[float]], bool]

    def check(self, group_size: int) -> None:
        """Any size will do."""

    def verdict(self, rewards: Sequence[float], group_size: int) -> Verdict:
        if len(rewards) < group_size:
            return Verdict.OPEN
        kept = self.keeps(tuple(rewards))
        if str(kept) not in ("True", "False"):  # numpy has a bool of its own
            raise TypeError(f"`{self.name}` gave a {type(kept).__name__}, not a bool")
        return Verdict.KEEP if kept else Verdict.DROP


def keep_policy(chosen: GroupFilter) -> KeepPolicy:
    """Return the policy that a client asked for.

    Raises:
        InvalidBatch: there is none of that name, it cannot be imported, or it lacks its range.
    """
    bounds = {name: getattr(chosen, name) for name in ("low", "high", "least", "most")}
    given = {name: value for name, value in bounds.items() if value is not None}
    if chosen.policy == "mean_reward":
        if chosen.low is None and chosen.high is None:
            raise InvalidBatch("`mean_reward` needs `low`, `high` or both", field="keep")
        defaults = {"low": -math.inf, "high": math.inf}
        return KeepMeanReward(**{**defaults, **given})
    if given:
        raise InvalidBatch(f"`{chosen.policy}` takes no {', '.join(given)}; `mean_reward` does", field="keep")
    if chosen.policy in BUILT_IN:
        return BUILT_IN[chosen.policy]
    found = offered(ENTRY_POINTS)
    if chosen.policy not in found:
        known = ", ".join(sorted({*BUILT_IN, "mean_reward", *found}))
        raise InvalidBatch(
            f"the service has no keep policy `{chosen.policy}`; it has {known}, and those that packages installed "
            f"beside it register as entry points in `{ENTRY_POINTS}`",
            field="keep",
        )
    try:
        return KeepWhere(chosen.policy, load_plugin(ENTRY_POINTS, chosen.policy, "keep policy", key="keep"))
    except ConfigError as error:
        raise InvalidBatch(error.message, field="keep") from error


BUILT_IN: dict[str, KeepPolicy] = {"all": KeepAll(), "informative": KeepInformative()}
