"""`RunList`: the folders of `prorl eval` below one folder, for a page that compares them. Reads only, and in threads.

A run's name is its path below that folder. Figures are made from the results as they are now, with the threshold and
the k of the run's own `summary.json`, so that an evaluation that is still going on is seen too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import ConfigError
from ...evaluation.collection import open_collection
from ...evaluation.plan import Plan  # noqa: TC001 - msgspec reads annotations at run time
from ...evaluation.run_comparison import Comparison, Figures, compare, read_figures, read_written
from ...evaluation.run_folder import PLAN, RESULTS, read_plan
from ...evaluation.summary import PassRow, Summary, seconds_of
from ...wire.messages.jobs import Outcome  # noqa: TC001
from ..bodies import Body
from .job_views import JobView

if TYPE_CHECKING:
    from pathlib import Path

RUNS_LIMIT = 1000
KEPT = 32
"""Runs whose figures are kept."""
RESULTS_BYTES = 2**30
"""Most results of a run that are read here: the process serves others too."""


class RunRow(Body, frozen=True):
    """One run, in short."""

    run: str
    plan: Plan
    changed_at: float
    """When its results last changed: wall clock, seconds since 1970."""
    passes: tuple[PassRow, ...] = ()
    """Empty: it has no summary yet."""
    ended: int = 0
    models: tuple[str, ...] = ()
    """Those that the engines named."""


class Runs(Body, frozen=True):
    """The runs that there are, the newest first."""

    folder: str
    """Empty: the dashboard has no folder of runs (`--runs`)."""
    runs: tuple[RunRow, ...] = ()


class RunFigures(Body, frozen=True):
    """The figures of one run."""

    run: str
    plan: Plan
    summary: Summary


class RunComparison(Body, frozen=True):
    """Two runs compared: problems that both have, and a paired test."""

    run: str
    other: str
    comparison: Comparison


class RolloutRow(Body, frozen=True):
    """One rollout of a run, in short."""

    job_id: str
    sample: str
    outcome: Outcome
    reward: float | None
    solved: bool
    turns: int
    tokens: int
    seconds: float
    code: str


class Rollouts(Body, frozen=True):
    """The rollouts of one problem of a run."""

    text: str
    """What the model was asked; empty: no rollout has kept its texts."""
    rollouts: tuple[RolloutRow, ...]


class RunList:
    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._figures: dict[tuple[str, int, int], RunFigures] = {}

    def rows(self) -> Runs:
        if self._folder is None:
            return Runs(folder="")
        rows = []
        for name, path in self._paths().items():
            try:
                written = read_written(path)
                row = RunRow(
                    run=name,
                    plan=read_plan(path),
                    changed_at=_state(path)[0] / 1e9,
                    passes=written.passes,
                    ended=written.ended,
                    models=written.models,
                )
            except (ConfigError, OSError):
                continue  # a plan of another version, or none at all
            rows.append(row)
        rows.sort(key=lambda row: row.changed_at, reverse=True)
        return Runs(folder=str(self._folder), runs=tuple(rows))

    def figures(self, run: str) -> RunFigures:
        """Return a run's figures.

        Raises:
            ConfigError: there is no such run, or its files are damaged.
        """
        path = self._path(run)
        key = run, *_state(path)
        if key not in self._figures:
            if len(self._figures) >= KEPT:
                self._figures.clear()
            figures = read_figures(path)
            self._figures[key] = RunFigures(run=run, plan=figures.plan, summary=figures.summary)
        return self._figures[key]

    def comparison(self, run: str, other: str) -> RunComparison:
        """Compare a run with another one.

        Raises:
            ConfigError: as `figures`.
        """
        first, second = (self.figures(name) for name in (run, other))
        figures = (Figures(one.plan, one.summary) for one in (first, second))
        return RunComparison(run=run, other=other, comparison=compare(*figures))

    def rollouts(self, run: str, problem: str) -> Rollouts:
        collection = open_collection(self._path(run))
        found = [one for one in collection.rollouts if one.problem == problem]
        return Rollouts(
            text=collection.prompt(found),
            rollouts=tuple(
                RolloutRow(
                    job_id=one.job_id,
                    sample=one.name,
                    outcome=one.result.outcome,
                    reward=one.result.reward,
                    solved=one.solved,
                    turns=int(one.result.metrics.get("turns", 0)),
                    tokens=one.result.tokens,
                    seconds=seconds_of(one.result),
                    code=one.result.error.code if one.result.error is not None else "",
                )
                for one in found
            ),
        )

    def view(self, run: str, job_id: str) -> JobView:
        collection = open_collection(self._path(run))
        rollout = collection.find(job_id)
        return JobView(result=rollout.result, transcript=collection.transcript(rollout))

    def _path(self, run: str) -> Path:
        paths = self._paths()
        if run not in paths:
            raise ConfigError(f"no run {run} is below {self._folder}", key="run")
        if _state(paths[run])[1] > RESULTS_BYTES:
            raise ConfigError(
                f"the results of {run} are larger than {RESULTS_BYTES / 2**30:g} GiB: see its report.html",
                key="run",
            )
        return paths[run]

    def _paths(self) -> dict[str, Path]:
        """Return the runs by their names: the folder itself, those in it, and those in folders of it."""
        if self._folder is None:
            return {}
        found = {}
        for pattern in (PLAN, f"*/{PLAN}", f"*/*/{PLAN}"):
            for plan in sorted(self._folder.glob(pattern)):
                name = plan.parent.relative_to(self._folder).as_posix()
                found[self._folder.name if name == "." else name] = plan.parent
                if len(found) == RUNS_LIMIT:
                    return found
        return found


def _state(path: Path) -> tuple[int, int]:
    """Return when a run's results changed, in nanoseconds since 1970, and how large they are."""
    file = path / RESULTS
    state = (file if file.exists() else path / PLAN).stat()
    return state.st_mtime_ns, state.st_size
