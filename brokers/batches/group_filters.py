"""Keep policies: which groups a batch keeps, and early verdicts on incomplete groups. Pure.

A group is decided early if no further reward can change the verdict: two different rewards make it informative. The
sampler runs decided groups first and may stop those that can no longer be kept. Policies judge the rollouts' rewards;
`informative` also those of each role of self-play, since the rewards of a zero-sum game always have one sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ...errors import ConfigError, InvalidBatch
from ...system.plugins import load_plugin, offered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...wire.messages.batches import GroupFilter

    Roles: TypeAlias = Sequence[Sequence[float]]

ENTRY_POINTS = "prorl_zmq.keep_policies"
"""Entry-point group of users' policies: functions from a group's rewards to bool, which block the rollout broker."""
PROBLEM_LIMIT = 500
"""Most characters of a policy's error message."""
SAME = 1e-9
"""Rewards that differ by at most this much are equal."""


class Verdict(StrEnum):
    """What is known of a group."""

    KEEP = "keep"
    """The group is kept once it is complete, whatever the rewards."""
    OPEN = "open"
    DROP = "drop"
    """The group will not be kept, whatever the rewards to come."""


class KeepPolicy(Protocol):
    """Decides which groups a batch keeps."""

    def check(self, group_size: int) -> None:
        """Raise `InvalidBatch` if no group of this size can be kept."""

    def verdict(self, rewards: Sequence[float], group_size: int, roles: Roles = ()) -> Verdict:
        """Judge a group by the rewards so far, and those of each role; never `OPEN` for a complete group."""


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Keeps every group."""

    def check(self, group_size: int) -> None:
        """Accept any size."""

    def verdict(self, rewards: Sequence[float], group_size: int, roles: Roles = ()) -> Verdict:
        del rewards, group_size, roles
        return Verdict.KEEP


@dataclass(frozen=True, slots=True)
class KeepInformative:
    """Keeps groups in which rewards differ, of the rollouts or of a role; the others have zero advantage (DAPO)."""

    def check(self, group_size: int) -> None:
        if group_size < 2:
            raise InvalidBatch(
                f"`informative` keeps groups whose rewards differ, which those of {group_size} never do; ask for a "
                "group_size of 2 or more, or keep `all`",
                field="group_size",
            )

    def verdict(self, rewards: Sequence[float], group_size: int, roles: Roles = ()) -> Verdict:
        if any(each and max(each) - min(each) > SAME for each in (rewards, *roles)):
            return Verdict.KEEP
        return Verdict.DROP if len(rewards) >= group_size else Verdict.OPEN


@dataclass(frozen=True, slots=True)
class KeepMeanReward:
    """Keeps groups whose mean reward is from `low` to `high`; rewards are from `least` to `most`."""

    low: float
    high: float
    least: float = -math.inf
    most: float = math.inf

    def check(self, group_size: int) -> None:
        del group_size
        if not (self.low <= self.high and self.least <= self.most):
            raise InvalidBatch(f"no mean reward is from {self.low:g} to {self.high:g}", field="keep")

    def verdict(self, rewards: Sequence[float], group_size: int, roles: Roles = ()) -> Verdict:
        """Compare the range with the means that the group can still reach."""
        del roles
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
    """Keeps complete groups for which a user's function returns True."""

    name: str
    keeps: Callable[[Sequence[float]], bool]

    def check(self, group_size: int) -> None:
        """Accept any size."""

    def verdict(self, rewards: Sequence[float], group_size: int, roles: Roles = ()) -> Verdict:
        del roles
        if len(rewards) < group_size:
            return Verdict.OPEN
        kept = self.keeps(tuple(rewards))
        if str(kept) not in ("True", "False"):  # numpy has its own bool
            raise TypeError(f"`{self.name}` gave a {type(kept).__name__}, not a bool")
        return Verdict.KEEP if kept else Verdict.DROP


def keep_policy(chosen: GroupFilter) -> KeepPolicy:
    """Return the policy that a client chose.

    Raises:
        InvalidBatch: the policy is unknown, cannot be imported, or has missing or unexpected bounds.
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


def failure_of(error: BaseException) -> str:
    """Return what a batch says of an error that its policy raised."""
    return f"the keep policy failed: {type(error).__name__}: {str(error)[:PROBLEM_LIMIT]}"
