"""Which jobs to submit or end to reach the wanted number. Pure.

A job counts while it waits, runs or is requeued; not when it was asked to leave or is close to its end. `Brake` delays
replacements while submitted jobs keep ending early, for example because of a wrong `setup` line.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from .slurm import Allocation

YOUNG_S = 60.0
"""A job that ran for less than this counts as ended early."""
MAX_PAUSE_S = 600.0


class Plan(NamedTuple):
    submit: int
    leave: tuple[Allocation, ...]


def plan(
    wanted: int, limit: int, allocations: Iterable[Allocation], leaving: Collection[str] = (), soon_s: float = 0.0
) -> Plan:
    """Return how to bring the jobs of one kind to their wanted number.

    Args:
        wanted: the wanted number.
        limit: the largest number, including jobs that are about to leave.
        allocations: the current jobs.
        leaving: names of jobs that were asked to leave.
        soon_s: jobs with less time left, in seconds, count as leaving; 0: they are requeued.
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
    """Order jobs by the loss if they end: queued jobs first, then those with little time left."""
    return (one.is_running, math.inf if one.left_s is None else one.left_s, -int(one.raw_id))


class Brake:
    """Decides when the next job may be submitted."""

    def __init__(self, pause_s: float) -> None:
        self._first_pause_s = self._pause_s = pause_s
        self._since: dict[str, float] = {}
        """When a submitted job (by id) or a present one (by name) began to run or was last seen queued."""
        self._not_before = -math.inf

    def submitted(self, job_id: str, now_s: float) -> None:
        self._since[job_id] = now_s

    def note(self, allocations: Sequence[Allocation], leaving: Collection[str], now_s: float) -> None:
        """Record the current jobs."""
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
