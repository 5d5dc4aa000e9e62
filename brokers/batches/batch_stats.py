"""Statistics of a batch: jobs, unused rollouts with reasons, and the distributions of kept and dropped rollouts.

Comparing the two distributions shows whether a batch was biased towards short rollouts.
"""

from __future__ import annotations

import math
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from ...wire.messages.base import GIVEN_UP_LIMIT, UNUSED_LIMIT
from ...wire.messages.batches import BatchReport, Distribution, GivenUpGroup, RolloutDistribution

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .rollout_group import Rollout

ADVICE = {
    "record_dropped": "the log of the rollout broker says which records, and why",
    "no_backend": "`prorl backends list` says why no backend takes jobs",
    "older_weights_than_announced": "`prorl backends list` says which weights each engine serves: load the announced "
    "ones with `update_weights`, or say with `set_weight_version` which ones they are",
}
"""What to do about some failure reasons."""


class DiscardReason(StrEnum):
    """Why a rollout was run but not used."""

    NOT_KEPT = "not_kept"
    NOT_NEEDED = "not_needed"
    STALE = "stale"
    GIVEN_UP = "given_up"
    """Its group lost too many jobs."""
    ABANDONED = "abandoned"
    """Its client is gone."""
    LOST = "lost"
    """Its trajectory was lost with the node that stored it."""
    UNRECORDED = "record_dropped"
    """A record required by its batch is missing."""


class _Values(msgspec.Struct, array_like=True):
    """Numbers rounded to two significant digits, so their memory is bounded."""

    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf
    counts: dict[float, int] = {}

    def add(self, value: float) -> None:
        self.total += value
        self.least = min(self.least, value)
        self.most = max(self.most, value)
        rounded = float(f"{value:.2g}")
        self.counts[rounded] = self.counts.get(rounded, 0) + 1

    def distribution(self) -> Distribution:
        count = sum(self.counts.values())
        if not count:
            return Distribution()
        shares = {"p50": 0.5, "p90": 0.9}
        found: dict[str, float] = {}
        seen = 0
        for value in sorted(self.counts):
            seen += self.counts[value]
            for name, share in shares.items():
                if name not in found and seen >= share * count:
                    found[name] = min(max(value, self.least), self.most)
        return Distribution(count=count, mean=self.total / count, least=self.least, most=self.most, **found)


class RolloutCounts(msgspec.Struct, array_like=True):
    """Distributions of rewards, tokens, seconds and staleness (in weight versions)."""

    reward: _Values = msgspec.field(default_factory=_Values)
    tokens: _Values = msgspec.field(default_factory=_Values)
    seconds: _Values = msgspec.field(default_factory=_Values)
    staleness: _Values = msgspec.field(default_factory=_Values)

    def add(self, rollouts: Iterable[Rollout], version: int) -> None:
        """Add rollouts; `version` is the current weight version."""
        for rollout in rollouts:
            self.staleness.add(max(0, version - rollout.version))
            self.reward.add(rollout.reward)
            self.tokens.add(rollout.tokens)
            self.seconds.add(rollout.seconds)

    def distribution(self) -> RolloutDistribution:
        return RolloutDistribution(
            reward=self.reward.distribution(),
            tokens=self.tokens.distribution(),
            seconds=self.seconds.distribution(),
            staleness=self.staleness.distribution(),
        )


class BatchStats(msgspec.Struct, array_like=True):
    """Counts for one batch, also as stored in the journal."""

    launched: int = 0
    completed: int = 0
    failed: int = 0
    adopted: int = 0
    carried: int = 0
    withdrawn: int = 0
    failures: dict[str, int] = {}
    given_up_in_row: int = 0
    kept_groups: int = 0
    dropped_groups: int = 0
    given_up_groups: int = 0
    given_up: list[GivenUpGroup] = []
    wasted: dict[str, int] = {}
    wasted_s: dict[str, float] = {}
    kept: RolloutCounts = msgspec.field(default_factory=RolloutCounts)
    """Rollouts that a client was sent."""
    dropped: RolloutCounts = msgspec.field(default_factory=RolloutCounts)
    returned_prompts: int = 0
    unused_prompts: list[str] = []

    def leave(self, prompt_ids: Iterable[str]) -> None:
        """Record prompts that were not used and go to no other batch."""
        self.unused_prompts.extend(islice(prompt_ids, UNUSED_LIMIT - len(self.unused_prompts)))

    def fail(self, reason: str) -> None:
        self.failed += 1
        self.failures[reason] = self.failures.get(reason, 0) + 1

    def drop(self, rollouts: Iterable[Rollout], version: int) -> None:
        self.dropped_groups += 1
        self.dropped.add(rollouts, version)

    def give_up(self, prompt_id: str, failures: dict[str, int]) -> None:
        self.given_up_groups += 1
        self.given_up_in_row += 1
        self.given_up.append(GivenUpGroup(prompt_id, failures))
        del self.given_up[:-GIVEN_UP_LIMIT]

    def waste(self, why: DiscardReason, seconds: Iterable[float]) -> None:
        """Record unused jobs by their working time in seconds; 0 counts as withdrawn."""
        for one in seconds:
            if not one:
                self.withdrawn += 1
                continue
            self.wasted[why] = self.wasted.get(why, 0) + 1
            self.wasted_s[why] = self.wasted_s.get(why, 0.0) + one

    def report(self) -> BatchReport:
        return BatchReport(
            launched=self.launched,
            completed=self.completed,
            failed=self.failed,
            adopted=self.adopted,
            carried=self.carried,
            withdrawn=self.withdrawn,
            kept_groups=self.kept_groups,
            dropped_groups=self.dropped_groups,
            given_up_groups=self.given_up_groups,
            given_up=tuple(self.given_up),
            wasted=dict(self.wasted),
            wasted_s=dict(self.wasted_s),
            kept=self.kept.distribution(),
            dropped=self.dropped.distribution(),
            returned_prompts=self.returned_prompts,
            unused_prompts=tuple(self.unused_prompts),
        )


def described_failures(failures: Mapping[str, int]) -> str:
    """Return the failure reasons and advice on them."""
    reasons = ", ".join(f"{reason} ({count} jobs)" for reason, count in failures.items())
    return "; ".join([reasons, *(ADVICE[reason] for reason in failures if reason in ADVICE)])
