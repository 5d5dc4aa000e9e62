"""The figures of run folders as they are now, and two of them compared: settings, problems solved, a paired test.

Figures are counted with the threshold and the k of the run's own `summary.json`, as far as its results are written.

Problems are paired by name. A problem that has only its row's number for a name is paired only if both runs read the
same data file. A problem is shared if both runs have a sample of it that counts.

The test takes the problem as the unit, as the intervals of `passes` do. If both runs were equally good, each problem's
difference would be as likely with the other sign: p is the share of all sign patterns whose sum is at least as far
from 0 as the observed one, computed exactly. With one sample of each problem this is McNemar's exact test.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from ..errors import ConfigError
from .passes import Estimate, mean_estimate
from .plan import Plan, differing_settings
from .run_folder import PLAN, RESULTS, SUMMARY, read_file, read_plan, read_samples
from .summary import Counting, PassRow, Summary, default_ks, summarise

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .summary import ProblemRow

CELLS = 200_000
"""Most cells of the test's distribution on each side of 0; shares with larger denominators are rounded."""


class Figures(NamedTuple):
    plan: Plan
    summary: Summary


class WrittenSummary(msgspec.Struct, frozen=True):
    """What is read of a `summary.json`."""

    threshold: float = 1.0
    ended: int = 0
    passes: tuple[PassRow, ...] = ()
    models: tuple[str, ...] = ()


class SettingRow(msgspec.Struct, frozen=True):
    """A setting that differs."""

    name: str
    first: str
    second: str


class SharedProblem(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    first_solved: int
    first_samples: int
    second_solved: int
    second_samples: int
    first_reward: float | None
    second_reward: float | None

    @property
    def change(self) -> float:
        """How much larger the share of solved samples is in the second run."""
        return self.second_solved / self.second_samples - self.first_solved / self.first_samples


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    settings: tuple[SettingRow, ...]
    same_data: bool
    shared: int
    only_first: int
    """Problems without a counterpart that counts in the second run."""
    only_second: int
    solved_by_both: int
    """Problems solved at least once in each run; so the next three, as they say."""
    solved_by_first: int
    solved_by_second: int
    solved_by_none: int
    first_share: float | None
    """The mean share of solved samples over the shared problems; None: there are none."""
    second_share: float | None
    difference: Estimate | None
    """Of the second run's share to the first's, with Student's t interval; None: no problem is shared."""
    p_value: float | None
    one_sample: bool
    """Each run has one sample of each shared problem: the test is McNemar's."""
    changed: tuple[SharedProblem, ...]
    """Shared problems that were not solved equally often, those that became worse first."""

    @property
    def test(self) -> str:
        """The name of the test."""
        return "McNemar's exact test" if self.one_sample else "exact sign-flip test over problems"


def compare(first: Figures, second: Figures) -> Comparison:
    same_data = first.plan.settings.data_sha256 == second.plan.settings.data_sha256
    ours, theirs = (
        {row.name: row for row in figures.summary.problems if row.samples and (same_data or _has_name(row))}
        for figures in (first, second)
    )
    shared = [_shared(ours[name], theirs[name]) for name in ours if name in theirs]
    solved = Counter((each.first_solved > 0, each.second_solved > 0) for each in shared)
    counted = [sum(row.samples > 0 for row in figures.summary.problems) for figures in (first, second)]
    changes = [each.change for each in shared]
    return Comparison(
        settings=_settings(first, second),
        same_data=same_data,
        shared=len(shared),
        only_first=counted[0] - len(shared),
        only_second=counted[1] - len(shared),
        solved_by_both=solved[True, True],
        solved_by_first=solved[True, False],
        solved_by_second=solved[False, True],
        solved_by_none=solved[False, False],
        first_share=_mean([each.first_solved / each.first_samples for each in shared]),
        second_share=_mean([each.second_solved / each.second_samples for each in shared]),
        difference=_difference(changes),
        p_value=paired_p_value(changes, _denominator(shared)) if shared else None,
        one_sample=all(each.first_samples == each.second_samples == 1 for each in shared),
        changed=tuple(sorted((each for each in shared if each.change), key=lambda each: each.change)),
    )


def read_figures(path: Path) -> Figures:
    """Read a folder of `prorl eval`.

    Raises:
        ConfigError: the folder was not made by `prorl eval`, or its files are damaged.
    """
    if not (path / PLAN).exists():
        raise ConfigError(f"{path} is not a folder of `prorl eval`: it has no {PLAN}", key="folder")
    plan, written = read_plan(path), read_written(path)
    samples = sorted(read_samples(path / RESULTS), key=lambda sample: sample.index)
    newest = {(sample.index.problem, sample.index.sample): sample for sample in samples}
    ks = tuple(row.k for row in written.passes) or default_ks(plan.settings.samples)
    return Figures(plan, summarise(plan, list(newest.values()), Counting(ks=ks, threshold=written.threshold)))


def read_written(path: Path) -> WrittenSummary:
    """Read the summary of a run folder; a missing or damaged one is empty."""
    try:
        return msgspec.json.decode(read_file(path / SUMMARY), type=WrittenSummary)
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError):
        return WrittenSummary()


def paired_p_value(changes: Sequence[float], denominator: int) -> float:
    """Return the two-sided p value of differences that are multiples of 1 / `denominator`."""
    scale = max(1, min(denominator, CELLS // max(1, len(changes))))
    steps = [round(change * scale) for change in changes]
    reach = sum(map(abs, steps))
    chances = np.zeros(2 * reach + 1)
    chances[reach] = 1.0
    for step in map(abs, steps):
        if step:
            chances = (np.roll(chances, step) + np.roll(chances, -step)) / 2  # the ends are still 0: nothing wraps
    far = abs(sum(steps))
    return min(1.0, float(chances[: reach - far + 1].sum() + chances[reach + far :].sum()))


def _has_name(row: ProblemRow) -> bool:
    return row.name != str(row.line)


def _shared(ours: ProblemRow, theirs: ProblemRow) -> SharedProblem:
    return SharedProblem(
        name=ours.name,
        first_solved=ours.solved,
        first_samples=ours.samples,
        second_solved=theirs.solved,
        second_samples=theirs.samples,
        first_reward=ours.reward,
        second_reward=theirs.reward,
    )


def _settings(first: Figures, second: Figures) -> tuple[SettingRow, ...]:
    rows = [SettingRow(*row) for row in differing_settings(first.plan.settings, second.plan.settings)]
    others = (
        ("data file", first.plan.file, second.plan.file),
        ("problems", f"{first.plan.problems}", f"{second.plan.problems}"),
        ("served model", ", ".join(first.summary.models), ", ".join(second.summary.models)),
        ("weight versions", *(", ".join(map(str, one.summary.weight_versions)) for one in (first, second))),
        ("threshold", f"{first.summary.threshold:g}", f"{second.summary.threshold:g}"),
        ("prorl_zmq version", first.plan.version, second.plan.version),
    )
    return (*rows, *(SettingRow(name, one or "–", other or "–") for name, one, other in others if one != other))


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _difference(changes: Sequence[float]) -> Estimate | None:
    """Return the mean difference; its interval stays within what a difference of shares can be."""
    estimate = mean_estimate(changes)
    if estimate is None:
        return None
    return Estimate(estimate.value, max(-1.0, estimate.low), min(1.0, estimate.high), estimate.problems)


def _denominator(shared: Sequence[SharedProblem]) -> int:
    return math.lcm(*(count for each in shared for count in (each.first_samples, each.second_samples)))
