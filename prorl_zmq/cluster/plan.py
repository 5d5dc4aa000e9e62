"""What to submit and which jobs to end so that there are as many as wanted.

A job counts while it waits, runs or returns to the queue; not when it was asked to leave or is close to its end.
`Brake` delays replacements while submitted jobs keep ending young, as with a wrong `setup` line.
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
        """When what was submitted, by its id, or what is there, by its name, began to run or was last seen to wait."""
        self._not_before = -math.inf

    def submitted(self, job_id: str, now_s: float) -> None:
        self._since[job_id] = now_s

    def note(self, allocations: Sequence[Allocation], leaving: Collection[str], now_s: float) -> None:
        """Take note of the jobs that there are now."""
        present = [one for one in allocations if not one.is_ending]
        there = {one.name for one in present} | {one.job_id for one in allocations} | set(leaving)
        if any(now_s - since < YOUNG_S for name, since in self._since.items() if name not in there):
            self._not_before = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self._since = {one.name: self._since.get(one.name, now_s) if one.is_running else now_s for one in present}
        if any(now_s - since >= YOUNG_S for since in self._since.values()):
            self._pause_s = self._first_pause_s

    def allows(self, now_s: float) -> bool:
        return now_s >= self._not_before
