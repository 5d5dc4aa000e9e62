"""What to submit and whom to send away so that there are as many jobs as wanted. No scheduler: Slurm is one.

A job counts while it waits, runs, or is on its way back to the queue; not when it was told to leave, or is so near its
end that it takes nothing new. `Brake` holds replacements back while what is submitted keeps ending young, as it does
where a `setup` line or an image is wrong.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from .slurm import Allocation

YOUNG_S = 60.0
"""A job that ran for less than that did no work worth its start."""
MAX_PAUSE_S = 600.0


class Plan(NamedTuple):
    submit: int
    leave: tuple[Allocation, ...]


def plan(
    wanted: int, limit: int, allocations: Iterable[Allocation], leaving: Collection[str] = (), soon_s: float = 0.0
) -> Plan:
    """Return what brings the jobs of one kind to their wanted number.

    Args:
        wanted: how many there should be.
        limit: how many there may be, with those that are about to leave.
        allocations: what there is.
        leaving: names of those that were told to go.
        soon_s: those that have less time left are about to leave; 0: they come back by themselves.
    """
    living = [one for one in allocations if not one.is_ending]
    staying = [one for one in living if one.name not in leaving and not _leaves_soon(one, soon_s)]
    missing = wanted - len(staying)
    if missing >= 0:
        return Plan(max(0, min(missing, limit - len(living))), ())
    return Plan(0, tuple(sorted(staying, key=_value)[:-missing]))


def _leaves_soon(one: Allocation, soon_s: float) -> bool:
    return one.is_running and one.left_s is not None and one.left_s < soon_s


def _value(one: Allocation) -> tuple[bool, float, int]:
    """Order jobs by what is lost with them: those that wait are worth least, then those with little time left."""
    return (one.is_running, math.inf if one.left_s is None else one.left_s, -int(one.raw_id))


class Brake:
    """Says when the next job may be submitted."""

    def __init__(self, pause_s: float) -> None:
        self._first_pause_s = self._pause_s = pause_s
        self._since: dict[str, float] = {}
        """When each job that runs was first seen to."""
        self._not_before = -math.inf

    def note(self, allocations: Sequence[Allocation], leaving: Collection[str], now_s: float) -> None:
        """Take note of the jobs that there are now."""
        running = {one.name for one in allocations if one.is_running}
        gone = [since for name, since in self._since.items() if name not in running and name not in leaving]
        if any(now_s - since < YOUNG_S for since in gone):
            self._not_before = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self._since = {name: self._since.get(name, now_s) for name in running}
        if any(now_s - since >= YOUNG_S for since in self._since.values()):
            self._pause_s = self._first_pause_s

    def allows(self, now_s: float) -> bool:
        return now_s >= self._not_before
