"""The account of bench/dapo.py for every rollout that ran, from the handler's records. Pure.

It is separate from the service's own account (`BatchReport`), and applies to any way of collecting.

- *used*: of a group that the trainer got and kept.
- *needed*: of a group whose rewards turned out to be equal. Any way of collecting has to run it to find out.
- *wasted*: any other. A surplus group that was kept, an aborted rollout, and all rollouts under way when the last batch
  is complete, as if the training ended there.

The bound is the work of the used and needed rollouts, by their drawn lengths, divided by the slots: no way of
collecting these groups can take less time. It leaves out other rollouts begun meanwhile, so a first batch alone cannot
reach it: the slots' work under way when the batch is complete belongs to the next one.
"""

from __future__ import annotations

from itertools import count, islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from dapo_prompts import GROUP, Ran, rollouts_of

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray


class Share(NamedTuple):
    """Part of what ran."""

    rollouts: int
    slot_s: float


class Account(NamedTuple):
    """All that ran."""

    used: Share
    needed: Share
    wasted: Share

    @property
    def wasted_rollouts(self) -> float:
        """Share of the rollouts."""
        return self.wasted.rollouts / sum(share.rollouts for share in self)

    @property
    def wasted_time(self) -> float:
        """Share of the slots' busy time."""
        return self.wasted.slot_s / sum(share.slot_s for share in self)


def alike(ran: Sequence[Ran]) -> set[int]:
    """Give the prompts that were found not to be informative: all their rollouts ran to their end."""
    whole: dict[int, int] = {}
    for one in ran:
        whole[one.prompt] = whole.get(one.prompt, 0) + one.whole
    return {prompt for prompt, count in whole.items() if count >= GROUP and not rollouts_of(prompt).informative}


def account(ran: Sequence[Ran], kept: Collection[int]) -> Account:
    """Say what became of all that ran.

    Args:
        ran: each RUN, up to the moment at which the last batch was complete.
        kept: the prompts whose groups the trainer kept.
    """
    needed = alike(ran)
    found: dict[str, list[float]] = {"used": [], "needed": [], "wasted": []}
    for one in ran:
        kind = "wasted"
        if one.whole:
            kind = "used" if one.prompt in kept else "needed" if one.prompt in needed else "wasted"
        found[kind].append(one.ended - one.started)
    return Account(*(Share(len(each), sum(each)) for each in found.values()))


def bound_s(prompts: Collection[int], mean_s: float, slots: int) -> float:
    """Give the least time in which so many slots can run all rollouts of these prompts."""
    return mean_s * float(sum(rollouts_of(prompt).lengths.sum() for prompt in prompts)) / slots


def until(ran: Sequence[Ran], at: float) -> list[Ran]:
    """Give what had run at a moment; what was running then was not whole."""
    early = [one for one in ran if one.started < at]
    return [one if one.ended <= at else Ran(one.job_id, one.prompt, one.started, at, False) for one in early]


def busy(ran: Sequence[Ran], origin: float) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Give the number of busy slots over time, as steps: times in seconds from the origin, and counts from then on."""
    changes = sorted([(one.started - origin, 1) for one in ran] + [(one.ended - origin, -1) for one in ran])
    times = np.array([0.0, *(at for at, _ in changes)])
    return times, np.cumsum([0, *(change for _, change in changes)])


def informative_length(prompts: Collection[int] | None, first: int = 0) -> float:
    """Give the mean length of rollouts, as a multiple of that of all: of prompts, or the first informative ones."""
    if prompts is None:
        prompts = list(islice((number for number in count() if rollouts_of(number).informative), first))
    return float(np.mean([rollouts_of(prompt).lengths for prompt in prompts]))
