"""`prorl eval`: a model's pass@k on a data file."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from ..errors import ConfigError
from ..system.logs import say
from ..trackers.adapter import TRACKERS
from . import options
from .evaluation_options import PROGRAM, CountingOptions, OwnOptions, RunningService, WhatOptions, plan_evaluation
from .progress_display import Progress
from .tables import console

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..evaluation.run_folder import RunFolder, Sample
    from ..evaluation.summary import Counting, Summary
    from ..evaluation.tracking import EvaluationLog
    from ..trackers import Tracker
    from .evaluation_options import Planned

LOG_CLOSE_S = 15.0
"""Seconds in which trackers must end their run after the evaluation."""
CONNECT_S, LOOK_S = 5.0, 0.5


def evaluate(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Problems: a folder of Harbor tasks; or .jsonl, .parquet, .csv or a JSON list, in any row format that "
            "`prorl tasks list` shows.",
        ),
    ],
    what: WhatOptions,
    own: OwnOptions,
    running: RunningService,
    counted: CountingOptions,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run folder; a stopped run continues there. [default: eval/FILE]")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start from nothing; existing results move to DIR/earlier.")
    ] = False,
    start_limit: options.StartLimit = None,
    log: options.Log = None,
    log_project: Annotated[str, typer.Option(metavar="NAME", help="The project in the trackers.")] = "prorl",
) -> None:
    """Evaluate a model on a data file: pass@1 and pass@k with 95 % intervals, cost, time, and failures by reason.

    prorl eval aime.jsonl --samples 8 --k 1,8 --engine vllm --model Qwen/Qwen3-8B --max-tokens 8192

    prorl eval problems.parquet --engine http --url http://gpu-7:8000 --temperature 0.6

    prorl eval swe.jsonl --connect tcp://gpu-7:5555

    prorl eval swe-mini.jsonl --harness codex --url http://gpu-7:8000

    The model is an engine that is started for this run, or that of a running service (--connect, --config, --service).
    Results are kept in the run folder as they come: after Ctrl-C, a crash or a reboot, the same command continues with
    what is missing, and retries what ended with an error of the infrastructure or the task: no wrong answer is retried.
    The folder gets report.md and report.html, and `prorl view DIR` shows each rollout. With nothing missing, the
    command makes new reports, also for another --k, --threshold or prices. Exit codes: 0 each rollout has a result that
    counts; 1 some ended with errors; 2 a wrong flag, file or setting; 130 after Ctrl-C.
    """
    from ..evaluation.report import write_reports  # needs an extra, so before anything is made
    from ..evaluation.run_folder import RunFolder
    from ..evaluation.tracking import run_config
    from ..trackers import open_tracker

    planned = plan_evaluation(file, what, own, running, counted)
    with RunFolder(
        out if out is not None else Path("eval") / file.absolute().stem, planned.plan, fresh=fresh
    ) as folder:
        _say_where_it_stands(folder)
        with open_tracker(
            *log or (),
            project=log_project,
            run=folder.plan.session,
            folder=folder.path / TRACKERS,
            config=run_config(folder.plan),
            close_s=LOG_CLOSE_S,
        ) as tracker:
            done = _run(folder, planned, tracker, start_limit, write_reports)
        missing = len(folder.missing())
    for name, where in tracker.where.items():
        say(PROGRAM, f"logged to {name}: {where}")
    if not done:
        if not folder.samples:
            say(PROGRAM, "stopped before a rollout had ended; the same command starts it")
        raise typer.Abort
    if missing:
        raise typer.Exit(1)


def _run(
    folder: RunFolder,
    planned: Planned,
    tracker: Tracker,
    start_limit_s: float | None,
    write_reports: Callable[[RunFolder, Summary], None],
) -> bool:
    """Run the missing rollouts, then write and print the figures; false: a signal stopped it."""
    from ..evaluation.display import summary_tables
    from ..evaluation.evaluator import Evaluator
    from ..evaluation.summary import summarise
    from ..evaluation.tracking import EvaluationLog

    tracking = EvaluationLog(tracker, folder)
    done = not folder.missing()
    try:
        if not done:
            _wait_for_servers(planned, options.start_limit_s(start_limit_s, url=True))
            display = _Display(folder, planned.counting, tracking)
            with display.progress:
                limit_s = options.start_limit_s(start_limit_s, url=False)
                done = Evaluator(folder, planned.problems, planned.service, display, limit_s).run()
    finally:
        if folder.samples:
            summary = summarise(folder.plan, folder.samples, planned.counting)
            write_reports(folder, summary)
            tracking.summed_up(summary)
            console().print(summary_tables(summary))
            _say_whats_next(folder, done=done)
    return done


def _wait_for_servers(planned: Planned, limit_s: float) -> None:
    """Return once the servers of `--url` accept connections.

    Raises:
        ConfigError: one does not within `limit_s`.
    """
    until = time.monotonic() + limit_s
    for url in getattr(getattr(planned.service, "backend", None), "urls", ()):
        place = urlsplit(url)
        address = (place.hostname or "", place.port or (443 if place.scheme == "https" else 80))
        while True:
            try:
                socket.create_connection(address, CONNECT_S).close()
                break
            except OSError as error:
                if time.monotonic() >= until:
                    words = "is the server up? --start-limit SECONDS waits longer"
                    message = f"{url} takes no connections within {limit_s:g} s ({error.strerror or error}); {words}"
                    raise ConfigError(message, key="url") from error
            time.sleep(LOOK_S)


class _Display:
    """Shows the progress of an evaluation: ended rollouts, and pass@1 so far."""

    def __init__(self, folder: RunFolder, counting: Counting, tracking: EvaluationLog) -> None:
        self._folder = folder
        self._tracking = tracking
        self._threshold = counting.threshold
        self._errors = self._counted = self._solved = 0
        rollouts = folder.plan.rollouts
        there = rollouts - len(folder.missing())
        self.progress = Progress(PROGRAM, "", counted="rollouts", total=rollouts, completed=there)
        for sample in folder.samples:
            self._count(sample)
        self._errors = 0  # stored ones with errors are run again

    def waits(self, what: str) -> None:
        self.progress.update(f"waiting for {what}")

    def starts(self) -> None:
        self.progress.update(self._note())

    def ended(self, sample: Sample) -> None:
        self._tracking.ended(sample)
        errors, error = self._errors, sample.result.error
        self._count(sample)
        self.progress.update(self._note(), advance=1)
        if errors == 0 < self._errors and error is not None:
            self.troubled(f"the first error, of {sample.problem}: {error.code}: {error.message}")

    def troubled(self, message: str) -> None:
        say(PROGRAM, message)

    def _note(self) -> str:
        parts = [f"pass@1 {self._solved / self._counted:.3f}"] if self._counted else []
        parts += [f"{self._errors} errors"] if self._errors else []
        return ", ".join(parts) or "at work"

    def _count(self, sample: Sample) -> None:
        from ..evaluation.run_folder import is_solved
        from ..evaluation.summary import counts

        self._counted += counts(sample)
        self._errors += not counts(sample)
        self._solved += is_solved(sample.result, self._threshold)


def _say_where_it_stands(folder: RunFolder) -> None:
    if folder.earlier is not None:
        say(PROGRAM, f"what {folder.path} had is in {folder.earlier}")
    there = folder.plan.rollouts - len(folder.missing())
    if folder.samples:
        again = len(folder.samples) - there
        errors = f"; {again} that ended with errors of the infrastructure or the task are run again" if again else ""
        say(PROGRAM, f"{folder.path} has {there} of {folder.plan.rollouts} rollouts{errors}")


def _say_whats_next(folder: RunFolder, *, done: bool) -> None:
    missing = len(folder.missing())
    where = f"report: {folder.path / 'report.html'}; rollouts: `prorl view {folder.path}`"
    if done and missing:
        where += f". {missing} rollouts ended with errors that are not the model's: the same command runs them again"
    elif missing:
        where += f". {missing} of {folder.plan.rollouts} rollouts are missing: the same command continues with them"
    say(PROGRAM, where)
