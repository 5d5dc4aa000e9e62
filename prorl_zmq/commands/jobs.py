"""`prorl submit`, `prorl status` and `prorl cancel`."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from ..client.submission import Submission
from ..client.trace_log import TRACES, TraceLog
from ..errors import ConfigError, ProrlError
from ..service.rollout_brokers import RolloutBrokers, fates, summed
from ..system.logs import one_line, say
from ..system.processes import stop_signals
from ..system.stopping import Stopping
from ..wire.messages.backends import BackendList, ListBackends
from ..wire.messages.base import Identifier, new_id
from ..wire.messages.jobs import Job, Outcome, Phase
from .backends import backend_table, show
from .options import Config, Connect, Keys, Service, all_brokers, async_client_of, columns, console, taking

if TYPE_CHECKING:
    from ..client.asynchronous.client import AsyncRolloutClient
    from ..data.trajectory import Trajectory
    from ..wire.messages.batches import BatchStatus
    from ..wire.messages.front_door import ServiceStatus

END_S = 2.0
"""How long Ctrl-C waits for what it has cancelled."""
ARRAYS = ("token_ids", "loss_mask", "logprobs", "weight_versions", "turns")


def submit(
    tasks: Annotated[
        Path | None,
        typer.Argument(metavar="TASKS.jsonl", help='One job per line: {"task": …, "instance": …}.', show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write results.jsonl and traces.jsonl (over older ones; without TASKS.jsonl, behind them) and one "
            ".npz of arrays per job there; `prorl explain DIR` says what bounded the run.",
        ),
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Whose jobs these are. All that the session still has is collected too; without TASKS.jsonl, nothing "
            "else. [default: a new session]",
            show_default=False,
        ),
    ] = None,
    connect: Connect = None,
    config: Config = None,
    keys: Keys = None,
    service: Service = None,
) -> None:
    """Submit jobs, wait until all have ended, and sum up. Ctrl-C cancels those that have not ended; a second one quits.

    Jobs are submitted in parts, as the service has room. The exit code is 0 if all jobs have ended, regardless of their
    outcomes, which the table shows, and 130 after Ctrl-C.
    """
    if tasks is None and session is None:
        raise typer.BadParameter("Missing argument 'TASKS.jsonl', or --session NAME, to collect what it has")
    jobs = read_jobs(tasks) if tasks is not None else []
    client = async_client_of(connect, config, keys, service, session=_checked(session))
    if out is not None:
        _make_folder(out, empty=tasks is not None)
    report = _Report(len(jobs), out)
    screen = console()
    try:
        done = asyncio.run(_run(client, jobs, report, out))
    finally:
        if report.finished:
            screen.print(_summary(report.finished))
        if report.note:
            say("prorl submit", report.note)
    if not done:
        raise typer.Abort


class _Report:
    """What came of a file's jobs: a bar on the terminal, files, and a summary."""

    def __init__(self, jobs: int, out: Path | None) -> None:
        self.finished: list[Trajectory] = []
        self.note = ""
        """How it ended, if not as it should."""
        self._out = out
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("rollouts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, TextColumn("{task.fields[note]}"), console=console(stderr=True))
        self._bar = self.progress.add_task("rollouts", total=jobs or None, note="")

    def add(self, trajectory: Trajectory) -> None:
        if self._out is not None:
            _write(trajectory, self._out)
        self.finished.append(trajectory)
        self.progress.update(self._bar, advance=1, note=_mean_reward(self.finished))

    def conclude(self, submission: Submission, session: str) -> None:
        """Note what became of jobs that were not waited for, and where the rest is."""
        counts = Counter(str(trajectory.outcome) for trajectory in self.finished)
        parts = [f"{count} {outcome}" for outcome, count in sorted(counts.items())]
        parts += [f"{submission.unsent} not submitted"] if submission.unsent else []
        if submission.waiting:
            parts.append(
                f"{submission.waiting} not collected: `prorl submit --session {session}` collects them (name "
                "--connect, --config, --keys and --out as here)"
            )
        self.note = ", ".join(parts) or "nothing was submitted"


async def _run(client: AsyncRolloutClient, jobs: list[Job], report: _Report, out: Path | None) -> bool:
    """Take jobs through the service; false: we were interrupted."""
    stopping = Stopping()
    traces = TraceLog(client, out)

    def take(trajectory: Trajectory) -> None:
        report.add(trajectory)
        traces.note(trajectory.job_id)

    submission = Submission(client, jobs, take)
    with stop_signals(stopping.stop), report.progress:
        async with client, traces:
            try:
                done = await stopping.until_stopped(submission.run())
            except ProrlError:
                await stopping.until_stopped(submission.end(END_S))
                report.conclude(submission, client.session)
                raise
            if not done:
                await stopping.until_stopped(submission.end(END_S))
                report.conclude(submission, client.session)
    return done


def _checked(session: str | None) -> str | None:
    try:
        return msgspec.convert(session, Identifier) if session is not None else None
    except msgspec.ValidationError:
        raise typer.BadParameter(
            f"--session {session!r}: a session's name is 1 to 128 letters, digits and `._:-`, and begins with a "
            "letter, a digit or `_`"
        ) from None


class _Seen(NamedTuple):
    status: ServiceStatus
    listed: BackendList
    problems: list[str]


@taking(all_brokers)
def status(
    brokers: RolloutBrokers,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep the tables up to date until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Show the stage processes, queues, outcomes and backends of a service, summed up over its rollout brokers.

    The exit code is 1 if a broker did not answer; what others say is shown all the same.
    """
    if as_json:
        seen = _look(brokers)
        told = {"status": seen.status, "backends": seen.listed.backends, "problems": seen.problems}
        print(msgspec.json.encode(told).decode())
    else:
        seen = show(lambda: _look(brokers), _layout, watch=watch)
    if seen.problems:
        raise typer.Exit(1)


def _look(brokers: RolloutBrokers) -> _Seen:
    answers = brokers.ask(lambda client: client.status())
    answers.check()
    backends = brokers.ask(lambda client: client.backends.ask(ListBackends(new_id())), only=next(iter(answers.found)))
    problems = answers.silent()
    problems += [f"the backend broker does not answer: {error.message}" for error in backends.problems.values()]
    listed = next(iter(backends.found.values()), BackendList(""))
    return _Seen(summed(answers.found.values()), listed, problems)


def _layout(seen: _Seen) -> Group:
    tables = status_tables(seen.status, seen.listed)
    problems = (Text(one_line(problem)) for problem in seen.problems)
    return Group(tables, f"up for {seen.status.uptime_s:.0f} s", *problems)


@taking(all_brokers)
def cancel(
    brokers: RolloutBrokers,
    job_ids: Annotated[list[str], typer.Argument(metavar="JOB…", help="Ids of the jobs to end.")],
) -> None:
    """End jobs with outcome `cancelled`, whichever rollout broker has them."""
    answers = brokers.ask(lambda client: client.cancel(job_ids))
    answers.check()
    told = fates(answers.found.values())
    for job_id, fate in told.items():
        print(f"{job_id}: {fate}")
    for problem in answers.silent():
        say("prorl cancel", problem, logging.ERROR)
    if answers.problems or "unknown" in told.values():
        raise typer.Exit(1)


def read_jobs(path: Path) -> list[Job]:
    """Read a file of one JSON job per line; blank lines are skipped."""
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


def status_tables(status: ServiceStatus, listed: BackendList) -> Group:
    numbers = columns("processes", "busy", "slots", "queued", justify="right")
    stages = Table("stage", *numbers, title="stages", title_justify="left")
    for phase in Phase:
        of_phase = [stage for stage in status.stages if stage.role == phase]
        busy, slots = sum(stage.busy for stage in of_phase), sum(stage.slots for stage in of_phase)
        counts = (len(of_phase), busy, slots, status.queued.get(phase, 0))
        stages.add_row(phase.upper(), *map(str, counts))
    ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(status.outcomes.items())) or "none"
    line = f"ended: {ended}; uncollected: {status.uncollected}; redelivered: {status.redelivered}"
    if status.lost_blocks:
        line += f"; trajectories lost with their nodes: {status.lost_blocks}"
    served = f"tasks: {', '.join(status.tasks) or 'none'}"
    batches = [batch_table(status.batches)] if status.batches else []
    return Group(stages, backend_table(listed.backends, listed.starts), *batches, line, served)


def batch_table(batches: tuple[BatchStatus, ...]) -> Table:
    names = ("kept", "target", "size", "dropped", "given up", "under way", "jobs", "failed", "prompts")
    counts = columns(*names, justify="right")
    table = Table("batch", "session", "state", *counts, title="batches", title_justify="left")
    for batch in batches:
        groups = (batch.kept, batch.target_groups, batch.group_size, batch.dropped, batch.given_up, batch.under_way)
        numbers = (*groups, batch.in_flight, batch.failed, batch.prompts)
        state = f"{batch.state}: {batch.problem}" if batch.problem else batch.state
        table.add_row(batch.batch_id[:12], batch.session[:12], Text(one_line(state)), *map(str, numbers))
    return table


def _make_folder(out: Path, *, empty: bool) -> None:
    try:
        (out / "arrays").mkdir(parents=True, exist_ok=True)
        if empty:
            for name in ("results.jsonl", TRACES):
                (out / name).write_bytes(b"")
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error


def _write(trajectory: Trajectory, out: Path) -> None:
    with (out / "results.jsonl").open("ab") as results:
        results.write(msgspec.json.encode(trajectory.result) + b"\n")
    import numpy as np  # which `prorl status` can do without

    np.savez(out / "arrays" / f"{trajectory.job_id}.npz", **{name: getattr(trajectory, name) for name in ARRAYS})


def _mean_reward(finished: list[Trajectory]) -> str:
    rewards = [trajectory.reward for trajectory in finished if trajectory.reward is not None]
    return f"mean reward {fmean(rewards):.3f}" if rewards else ""


def _summary(finished: list[Trajectory]) -> Table:
    rows: defaultdict[tuple[str, Outcome], list[Trajectory]] = defaultdict(list)
    for trajectory in finished:
        rows[trajectory.result.task, trajectory.result.outcome].append(trajectory)
    numbers = columns("jobs", "mean reward", "mean tokens", "mean turns", justify="right")
    errors = Column("first error", overflow="fold")
    table = Table("task", "outcome", *numbers, errors, title="results", title_justify="left")
    for (task, outcome), group in sorted(rows.items()):
        rewards = [trajectory.reward for trajectory in group if trajectory.reward is not None]
        error = next((trajectory.error.message for trajectory in group if trajectory.error is not None), "")
        table.add_row(
            task,
            outcome,
            str(len(group)),
            f"{fmean(rewards):.3f}" if rewards else "",
            f"{fmean([trajectory.result.tokens for trajectory in group]):.0f}",
            f"{fmean([trajectory.result.metrics.get('turns', 0.0) for trajectory in group]):.1f}",
            Text(one_line(error)),  # of another machine, on its way to a terminal
        )
    return table
