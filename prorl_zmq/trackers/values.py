"""Figures for a tracker, as flat names and numbers: of a batch's report, and of rollouts.

Names are `batch/…`, `reward/…`, `staleness/…`, `seconds/…`, `rollouts/…`, `tokens/…` and `metrics/…`. Characters that
some tracker rejects become `_`, the number of names is bounded, and values that are not finite are left out.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Protocol

import msgspec

from ..wire.messages.jobs import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ..wire.messages.batches import BatchReport
    from ..wire.messages.jobs import Result

NAMES = 400
"""Most values of one step."""
NAME_CHARACTERS = 120
_OTHERS = re.compile(r"[^A-Za-z0-9_./-]")


class Ended(Protocol):
    """A rollout that has ended: a `Trajectory`, or a sample of an evaluation."""

    @property
    def result(self) -> Result: ...

    @property
    def versions(self) -> tuple[int, ...]: ...


def batch_values(report: BatchReport) -> dict[str, float]:
    """Return a batch's report: `batch/launched`, `batch/wasted/stale`, `batch/kept/reward/mean`, and so on."""
    return dict(_flat("batch", msgspec.structs.asdict(report)))


def rollout_values(rollouts: Sequence[Ended], weight_version: int | None = None) -> dict[str, float]:
    """Return figures of some rollouts, those of a step for example.

    `seconds/NAME` is the mean over the rollouts that have this timing: a phase (`seconds/run`), its queue, the
    `engine`, or a tool (`seconds/tool.bash`). `staleness/…` says how many versions the oldest token of a rollout is
    behind `weight_version`.

    Args:
        rollouts: Trajectories, also those that failed.
        weight_version: The trainer's version now; None leaves staleness out.
    """
    outcomes = Counter(str(each.result.outcome) for each in rollouts)
    values = {"rollouts/count": float(len(rollouts))}
    values |= {f"rollouts/{outcome}": float(outcomes[outcome]) for outcome in Outcome}
    rewards = [each.result.reward for each in rollouts if each.result.reward is not None]
    values |= _spread("reward", rewards)
    values |= _spread("tokens", [float(each.result.tokens) for each in rollouts])
    if weight_version is not None:
        values |= _spread("staleness", [float(weight_version - each.versions[0]) for each in rollouts if each.versions])
    values |= _means("seconds", [each.result.timings for each in rollouts])
    return values | _means("metrics", [each.result.metrics for each in rollouts])


def loggable(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values that every tracker takes: plain names, finite numbers, at most `NAMES`."""
    named = {_OTHERS.sub("_", name)[:NAME_CHARACTERS]: float(value) for name, value in values.items()}
    finite = [(name, value) for name, value in named.items() if math.isfinite(value)]
    return dict(finite[:NAMES])


def _flat(name: str, fields: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    for key, value in fields.items():
        inner = f"{name}/{key}"
        if isinstance(value, msgspec.Struct):
            yield from _flat(inner, msgspec.structs.asdict(value))
        elif isinstance(value, dict):
            yield from _flat(inner, value)
        elif isinstance(value, int | float):
            yield inner, float(value)


def _spread(name: str, numbers: Sequence[float]) -> dict[str, float]:
    if not numbers:
        return {}
    figures = {"mean": sum(numbers) / len(numbers), "least": min(numbers), "most": max(numbers)}
    return {f"{name}/{figure}": value for figure, value in figures.items()}


def _means(name: str, tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for table in tables:
        for key, value in table.items():
            columns[key].append(value)
    return {f"{name}/{key}": sum(column) / len(column) for key, column in sorted(columns.items())}
