"""`Recording`: a run's rollouts and slots, and the use of the slots over time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..wire.messages.jobs import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..wire.messages.front_door import ServiceStatus
    from .rollout import Rollout, Work

Slots = dict[tuple[Phase, str], int]
"""By stage and node."""


class StageUse(NamedTuple):
    """The use of a stage's slots; means over the whole time."""

    stage: Phase
    slots: int
    busy: float
    waiting: float
    """Jobs that waited for one."""
    waiting_share: float
    """Share of the time in which at least one waited."""
    busy_while_waiting: float
    """Slots busy in that time."""
    idle_while_others_waited: float
    """Slots idle while jobs waited for any other stage."""
    waiting_now: int = 0
    """Jobs that wait for one and have not got it."""


@dataclass(frozen=True)
class Recording:
    rollouts: tuple[Rollout, ...]
    """In the order of acceptance."""
    known_slots: Mapping[tuple[Phase, str], int]
    """As the service reported; empty: unknown."""
    now: float | None = None
    """When it was recorded; None: it has ended."""

    @cached_property
    def began(self) -> float:
        return min(rollout.accepted for rollout in self.rollouts)

    @cached_property
    def ended(self) -> float:
        if self.now is not None:
            return self.now
        ends = [rollout.ended for rollout in self.rollouts if rollout.ended is not None]
        return max([*ends, *(work.ended for work in self.works)], default=self.began)

    @property
    def wall_s(self) -> float:
        return self.ended - self.began

    @cached_property
    def works(self) -> list[Work]:
        return [work for rollout in self.rollouts for work in rollout.works]

    @cached_property
    def by_node(self) -> bool:
        """Whether a job stays on the node of its INIT, as one with a sandbox does."""
        nodes = [{work.node for work in rollout.counted} for rollout in self.rollouts]
        return all(len(each) <= 1 for each in nodes)

    @cached_property
    def slots(self) -> Slots:
        """Slots by stage and node: as reported, and at least as many as were busy at once."""
        slots = {key: count for key, count in self.known_slots.items() if count}
        stays: dict[tuple[Phase, str], list[tuple[float, float]]] = {}
        for work in self.works:
            stays.setdefault((work.phase, work.node), []).append((work.began, work.ended))
        return slots | {key: max(slots.get(key, 0), _most_at_once(each)) for key, each in stays.items()}

    def slots_of(self, stage: Phase) -> int:
        return sum(count for (phase, _), count in self.slots.items() if phase == stage)

    @cached_property
    def use(self) -> dict[Phase, StageUse]:
        """The use of each stage's slots."""
        stages = list(Phase)
        changes = [(work.began, index, 1) for work in self.works for index in [stages.index(work.phase)]]
        changes += [(work.ended, index, -1) for work in self.works for index in [stages.index(work.phase)]]
        waits = [(work.queued_at, work.began, work.phase) for work in self.works]
        waits += [(one.waits[1], self.ended, one.waits[0]) for one in self.rollouts if one.waits is not None]
        for since, until, phase in waits:
            index = len(stages) + stages.index(phase)
            changes += [(since, index, 1), (until, index, -1)]
        changes.sort()
        counts = np.zeros((len(changes) + 1, 2 * len(stages)))
        for row, (_, index, change) in enumerate(changes, start=1):
            counts[row, index] = change
        counts = counts.cumsum(axis=0)
        times = np.array([self.began, *(at for at, _, _ in changes), self.ended])
        seconds = np.diff(times).clip(min=0.0)
        return {stage: self._use(stage, stages, counts, seconds) for stage in stages}

    def _use(self, stage: Phase, stages: list[Phase], counts: np.ndarray, seconds: np.ndarray) -> StageUse:
        index = stages.index(stage)
        busy, waiting = counts[:, index], counts[:, len(stages) + index]
        others = np.delete(counts[:, len(stages) :], index, axis=1).sum(axis=1)
        slots = self.slots_of(stage)
        return StageUse(
            stage,
            slots,
            _mean(busy, seconds),
            _mean(waiting, seconds),
            _mean((waiting > 0).astype(float), seconds),
            _mean(busy, seconds * (waiting > 0)),
            _mean((slots - busy).clip(min=0.0), seconds * (others > 0)),
            sum(one.waits is not None and one.waits[0] == stage for one in self.rollouts) if self.now else 0,
        )


def slots_of_status(statuses: Iterable[ServiceStatus]) -> Slots:
    """Return a service's slots, the most at any of the times when it was asked."""
    most: Slots = {}
    for status in statuses:
        slots: Slots = {}
        for stage in status.stages:
            slots[stage.role, stage.node] = slots.get((stage.role, stage.node), 0) + stage.slots
        for key, count in slots.items():
            most[key] = max(most.get(key, 0), count)
    return most


def _mean(values: np.ndarray, weights: np.ndarray) -> float:
    total = weights.sum()
    return float((values * weights).sum() / total) if total > 0 else 0.0


def _most_at_once(intervals: Iterable[tuple[float, float]]) -> int:
    changes = sorted(change for began, ended in intervals for change in ((began, 1), (ended, -1)))
    return int(np.cumsum([change for _, change in changes]).max(initial=0))
