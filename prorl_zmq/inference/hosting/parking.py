"""`Parking`: the turns that an engine's host holds back while the KV cache is full. Pure: no clock, no sockets.

A net: `Room` admits no more rollouts than the cache holds, but rollouts grow, and a cache may shrink. Then all rollouts
compute their prefixes again at each turn, and hardly one ends. So turns of the newest groups wait while others end. A
turn under way is never held.

With u the share of KV that running requests used since the last report, each report does what the first row says that
applies:

| condition | effect |
|---|---|
| it is missing or invalid | none; after `SILENT_S`, it is not tight, and all parked turns continue |
| u > `FULL` and requests wait, or one was preempted | it is tight |
| u < `CALM` | it is not tight; parked turns continue while u and their prompts stay below `CALM` |
| else | none |

A parked turn also continues once its group is one of those that fit.

| a turn arrives | it is parked |
|---|---|
| more than half of the rollouts would be parked | no |
| it is tight | unless its group is one of the oldest, whose contexts fit into the cache together |
| it is not tight | if turns are parked, all of older groups |

A rollout's context is the prompt of its latest turn. As many rollouts count as hold the engine: those with a turn under
way, then those whose turns ended last. Parked turns continue in the order of their group's age, each after `park_s` at
the latest.

`bench/scheduling.py` measures what parking gains.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

    from .room import KvReport

Turn = TypeVar("Turn")

FULL, CALM = 0.9, 0.75
PARK_S, SILENT_S = 120.0, 15.0
HEARD_S = 3.0
"""After this time the broker's count of rollouts has a new one."""


class _Rollout(NamedTuple):
    began: float
    tokens: int
    under_way: int
    """Its turns that have not ended, parked ones included."""


@dataclass(frozen=True, slots=True)
class _Parked:
    began: float
    tokens: int
    since: float


class Parking(Generic[Turn]):
    """The parked turns of one engine.

    Args:
        park_s: the longest time for which a turn is parked.
    """

    def __init__(self, park_s: float = PARK_S) -> None:
        self.park_s = park_s
        self._rollouts: dict[Hashable, _Rollout] = {}
        """By job."""
        self._idle: OrderedDict[Hashable, float] = OrderedDict()
        """The jobs without a turn under way, with the end of their latest turn, in this order."""
        self._parked: dict[Turn, _Parked] = {}
        self._capacity = 0.0
        self._is_tight = False
        self._first_out = math.inf
        """When the oldest group began that does not fit into the cache with those before it; inf: all fit."""
        self._fitting = 0
        """The tokens of the groups before it."""
        self._is_counted = False
        """Whether these two are of now."""
        self._valid_at = -math.inf
        """The time of the last valid report."""

    def __len__(self) -> int:
        return len(self._parked)

    def hold(self, turn: Turn, job_id: Hashable, began: float, tokens: int, now: float) -> bool:
        """Return whether a turn that arrives is parked, until `update` returns it or it is withdrawn.

        `ended` must follow once the turn has ended, or was withdrawn.

        Args:
            turn: the turn.
            job_id: its rollout.
            began: when the rollout's group began. It is rounded to seconds, and a rollout's first value stays, since
                other processes measure it, and the values of a group differ a little.
            tokens: of its prompt.
            now: the time in seconds, which never decreases.
        """
        before = self._rollouts.get(job_id)
        began = before.began if before is not None else float(round(began))
        rollout = _Rollout(began, tokens, (before.under_way if before is not None else 0) + 1)
        self._rollouts[job_id] = rollout
        self._idle.pop(job_id, None)
        self._count(before, rollout)
        if 2 * (len(self._parked) + 1) > len(self._rollouts):
            return False
        if self._is_tight:
            is_held = not self._fits(began)
        else:
            is_held = bool(self._parked) and all(one.began < began for one in self._parked.values())
        if is_held:
            self._parked[turn] = _Parked(began, tokens, now)
        return is_held

    def withdraw(self, turn: Turn) -> None:
        """Forget a turn; one that is not parked is ignored."""
        self._parked.pop(turn, None)

    def ended(self, job_id: Hashable, now: float) -> None:
        """Record the end of a turn of which `hold` was asked."""
        rollout = self._rollouts[job_id]
        self._rollouts[job_id] = rollout._replace(under_way=rollout.under_way - 1)
        if rollout.under_way == 1:
            self._idle[job_id] = now

    def update(self, report: KvReport | None, rollouts: int, now: float) -> list[Turn]:
        """Apply the table above; return the turns that may continue, in this order.

        Args:
            report: since the last update; None: the engine reported nothing.
            rollouts: those that hold the engine. If more are known, those without a turn under way are forgotten, the
                longest silent first.
            now: the time.
        """
        while self._idle and len(self._rollouts) > rollouts:
            job_id, at = next(iter(self._idle.items()))
            if at + HEARD_S > now:
                break
            del self._idle[job_id], self._rollouts[job_id]
        self._is_counted = False
        free = -math.inf
        if report is not None and report.is_valid:
            self._valid_at, self._capacity = now, report.capacity_tokens
            if report.preempted or (report.used > FULL and report.waiting):
                self._is_tight = True
            elif report.used < CALM:
                self._is_tight, free = False, (CALM - report.used) * self._capacity
        elif self._valid_at + SILENT_S <= now:
            self._is_tight, free = False, math.inf
        going: list[Turn] = []
        for turn, one in sorted(self._parked.items(), key=lambda item: item[1].began):
            if one.tokens <= free or one.since + self.park_s <= now or self._fits(one.began):
                going.append(turn)
                del self._parked[turn]
            free -= one.tokens
        return going

    def _fits(self, began: float) -> bool:
        """Return whether the contexts of all groups up to this one fit into the cache."""
        if not self._is_counted:
            self._is_counted, self._fitting, self._first_out = True, 0, math.inf
            for group, rollouts in groupby(sorted(self._rollouts.values()), key=lambda one: one.began):
                tokens = sum(one.tokens for one in rollouts)
                if self._fitting + tokens > self._capacity:
                    self._first_out = group
                    break
                self._fitting += tokens
        return began < self._first_out

    def _count(self, before: _Rollout | None, now: _Rollout) -> None:
        """Follow the change of one rollout without a look at the others, unless other groups fit because of it."""
        out = self._first_out
        if now.began > out and (before is None or before.began > out):
            return
        more = now.tokens - (before.tokens if before is not None else 0)
        if now.began < out and (before is None or before.began < out) and 0 <= more <= self._capacity - self._fitting:
            self._fitting += more
        else:
            self._is_counted = False
