"""The figures of a run folder as it is now, counted with the threshold and the k of its own `summary.json`.

An evaluation that is still running is read as far as it is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..errors import ConfigError
from .plan import Plan  # noqa: TC001 - of a NamedTuple
from .run_file import read_file
from .run_folder import PLAN, RESULTS, SUMMARY, read_plan, read_samples
from .summary import Counting, PassRow, Summary, default_ks, summarise

if TYPE_CHECKING:
    from pathlib import Path


class Figures(NamedTuple):
    plan: Plan
    summary: Summary


class WrittenSummary(msgspec.Struct, frozen=True):
    """What is read of a `summary.json`."""

    threshold: float = 1.0
    ended: int = 0
    passes: tuple[PassRow, ...] = ()
    models: tuple[str, ...] = ()


def read_figures(path: Path) -> Figures:
    """Read a folder of `prorl eval`.

    Raises:
        ConfigError: the folder was not made by `prorl eval`, or its files are damaged.
    """
    if not (path / PLAN).exists():
        raise ConfigError(f"{path} is no folder of `prorl eval`: it has no {PLAN}", key="folder")
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
