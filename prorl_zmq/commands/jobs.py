"""`prorl submit`, `prorl status` and `prorl cancel`."""

from __future__ import annotations

import threading
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import typer
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..errors import ConfigError
from ..messages import Job, Outcome, Phase
from .backends import QUICK_S, backend_table
from .options import Config, Connect, Keys, client_of, console

if TYPE_CHECKING:
    from ..messages import BackendStatus, ServiceStatus
    from ..trajectory import Trajectory

ARRAYS = ("token_ids", "loss_mask", "logprobs", "weight_versions", "turns")


def submit(
    tasks: Annotated[Path, typer.Argument(metavar="TASKS.jsonl", help='One job per line: {"task": …, "instance": …}.')],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write results.jsonl (over an older one) and one .npz of arrays per job there."
        ),
    ] = None,
    connect: Connect = None,
    config: Config = None,
    keys: Keys = None,
) -> None:
    """Submit jobs, wait until all have ended, and sum up. Ctrl-C cancels those that have not ended.

    The exit code is 0 if all jobs have ended, whatever their outcomes, which the table shows.
    """
    jobs = read_jobs(tasks)
    progress_console = console(stderr=True)
    columns = (
        TextColumn("rollouts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    finished: list[Trajectory] = []
    if out is not None:
        _make_folder(out)
    with (
        client_of(connect, config, keys) as client,
        Progress(*columns, console=progress_console) as progress,
    ):
        bar = progress.add_task("rollouts", total=len(jobs), note="")
        waiting = set(client.submit(jobs))
        try:
            for trajectory in client.stream():
                if out is not None:
                    _write(trajectory, out)
                waiting.discard(trajectory.job_id)
                finished.append(trajectory)
                progress.update(bar, advance=1, note=_mean_reward(finished))
        except KeyboardInterrupt:
            client.cancel(waiting)
            raise
    console().print(_summary(finished))


def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep the tables up to date until Ctrl-C.")] = False,
    connect: Connect = None,
    config: Config = None,
    keys: Keys = None,
) -> None:
    """Show the stage processes, queues, outcomes and backends of a service."""
    with client_of(connect, config, keys, timeout_s=QUICK_S) as client:
        if not watch:
            console().print(status_tables(client.status(), client.backends.list()))
            return
        with Live(console=console(), auto_refresh=False) as live:
            while True:
                live.update(status_tables(client.status(), client.backends.list()), refresh=True)
                threading.Event().wait(1.0)


def cancel(
    job_ids: Annotated[list[str], typer.Argument(metavar="JOB…", help="Ids of the jobs to end.")],
    connect: Connect = None,
    config: Config = None,
    keys: Keys = None,
) -> None:
    """End jobs with outcome `cancelled`."""
    with client_of(connect, config, keys, timeout_s=QUICK_S) as client:
        fates = client.cancel(job_ids)
    for job_id, fate in fates.items():
        print(f"{job_id}: {fate}")
    if "unknown" in fates.values():
        raise typer.Exit(1)


def read_jobs(path: Path) -> list[Job]:
    """Read a file of one JSON job per line; blank lines are skipped.

    Raises:
        ConfigError: it cannot be read, is empty, or a line is not a job; the error names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    jobs: list[Job] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                job = msgspec.json.decode(line, type=Job)
            except msgspec.MsgspecError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
            if job.job_id in line_of:
                raise ConfigError(f"{path}, line {number}: job_id {job.job_id!r} is on line {line_of[job.job_id]} too")
            line_of[job.job_id] = number
            jobs.append(job)
    if not jobs:
        raise ConfigError(f"{path} has no jobs in it")
    return jobs


def status_tables(status: ServiceStatus, backends: tuple[BackendStatus, ...]) -> Group:
    """Lay out a service's state for the terminal."""
    stages = Table(title="stages", title_justify="left")
    stages.add_column("stage")
    for column in ("processes", "busy", "slots", "queued"):
        stages.add_column(column, justify="right")
    for phase in Phase:
        of_phase = [stage for stage in status.stages if stage.role == phase]
        numbers = (
            len(of_phase),
            sum(stage.busy for stage in of_phase),
            sum(stage.slots for stage in of_phase),
            status.queued.get(phase, 0),
        )
        stages.add_row(phase.upper(), *map(str, numbers))
    ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(status.outcomes.items())) or "none"
    line = f"ended: {ended}; uncollected: {status.uncollected}; redelivered: {status.redelivered}"
    served = f"tasks: {', '.join(status.tasks) or 'none'}; up for {status.uptime_s:.0f} s"
    return Group(stages, backend_table(backends), line, served)


def _make_folder(out: Path) -> None:
    try:
        (out / "arrays").mkdir(parents=True, exist_ok=True)
        (out / "results.jsonl").write_bytes(b"")
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error


def _write(trajectory: Trajectory, out: Path) -> None:
    with (out / "results.jsonl").open("ab") as results:
        results.write(msgspec.json.encode(trajectory.result) + b"\n")
    np.savez(out / "arrays" / f"{trajectory.job_id}.npz", **{name: getattr(trajectory, name) for name in ARRAYS})


def _mean_reward(finished: list[Trajectory]) -> str:
    rewards = [trajectory.reward for trajectory in finished if trajectory.reward is not None]
    return f"mean reward {np.mean(rewards):.3f}" if rewards else ""


def _summary(finished: list[Trajectory]) -> Table:
    rows: defaultdict[tuple[str, Outcome], list[Trajectory]] = defaultdict(list)
    for trajectory in finished:
        rows[trajectory.result.task, trajectory.result.outcome].append(trajectory)
    table = Table(title="results", title_justify="left")
    for column in ("task", "outcome"):
        table.add_column(column)
    for column in ("jobs", "mean reward", "mean tokens", "mean turns"):
        table.add_column(column, justify="right")
    table.add_column("first error", overflow="fold")
    for (task, outcome), group in sorted(rows.items()):
        rewards = [trajectory.reward for trajectory in group if trajectory.reward is not None]
        error = next((trajectory.error.message for trajectory in group if trajectory.error is not None), "")
        table.add_row(
            task,
            outcome,
            str(len(group)),
            f"{np.mean(rewards):.3f}" if rewards else "",
            f"{np.mean([trajectory.result.tokens for trajectory in group]):.0f}",
            f"{np.mean([trajectory.result.metrics.get('turns', 0.0) for trajectory in group]):.1f}",
            error,
        )
    return table
