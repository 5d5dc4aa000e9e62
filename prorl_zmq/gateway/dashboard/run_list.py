"""`RunList`: the `prorl eval` folders below one folder, for the page. Read-only and blocking: call it in threads.

A run's name is its path below that folder. Figures are computed from the current results, so a running evaluation is
included.
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
"""Largest results file that is read."""


class RunRow(Body, frozen=True):
    """A run in the list."""

    run: str
    plan: Plan
    changed_at: float
    """When its results last changed, in seconds since 1970."""
    passes: tuple[PassRow, ...] = ()
    """Empty: there is no summary yet."""
    ended: int = 0
    models: tuple[str, ...] = ()
    """Those that the engines reported."""


class Runs(Body, frozen=True):
    """All runs, the newest first."""

    folder: str
    """Empty: the dashboard was started without `--runs`."""
    runs: tuple[RunRow, ...] = ()


class RunFigures(Body, frozen=True):
    """The figures of one run."""

    run: str
    plan: Plan
    summary: Summary


class RunComparison(Body, frozen=True):
    """Two runs compared: shared problems and a paired test."""

    run: str
    other: str
    comparison: Comparison


class RolloutRow(Body, frozen=True):
    """A rollout in the list."""

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
    """The prompt; empty: no rollout has stored its texts."""
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
            ConfigError: the run is unknown, or its files are damaged.
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
        """Return the runs by name: the folder itself, and folders up to two levels below."""
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
    """Return when a run's results changed, in nanoseconds since 1970, and their size."""
    file = path / RESULTS
    state = (file if file.exists() else path / PLAN).stat()
    return state.st_mtime_ns, state.st_size
