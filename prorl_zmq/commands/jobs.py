"""`prorl submit` and `prorl cancel`."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ..client.submission import Submission
from ..client.trace_log import TRACES, TraceLog
from ..errors import ConfigError, InvalidJob, ProrlError, UnknownTask
from ..service.rollout_brokers import fates
from ..system.files import put_aside
from ..system.logs import say
from ..system.processes import stop_signals
from ..system.stopping import Stopping
from ..wire.messages.base import Identifier
from ..wire.messages.jobs import Job, Outcome
from .progress_display import Progress
from .tables import console, end_with, table
from .target import Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from ..client.asynchronous.client import AsyncRolloutClient
    from ..data.trajectory import Trajectory

END_S = 2.0
"""Seconds that Ctrl-C waits for cancelled jobs."""
ARRAYS = ("token_ids", "loss_mask", "logprobs", "weight_versions", "turns")
RECORDS = "records"


def submit(
    target: Target,
    tasks: Annotated[
        Path | None,
        typer.Argument(metavar="TASKS.jsonl", help='One job per line: {"task": …, "instance": …}.', show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write results.jsonl, traces.jsonl, and per job one .npz of arrays and one of records there; `prorl "
            "explain DIR` says what bounded the run. Existing results move to DIR/earlier; without TASKS.jsonl, they "
            "stay.",
        ),
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The session of these jobs. Its earlier results are collected too; without TASKS.jsonl, nothing "
            "else. [default: a new session]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Submit jobs, wait until all have ended, and sum up. Ctrl-C cancels those that have not ended; a second one quits.

    Jobs are submitted in parts, as the service has room. The exit code is 0 if all jobs have ended, regardless of their
    outcomes, which the table shows, and 130 after Ctrl-C.
    """
    if tasks is None and session is None:
        raise typer.BadParameter("Missing argument 'TASKS.jsonl', or --session NAME, to collect what it has")
    jobs, line_of = read_jobs(tasks) if tasks is not None else ([], {})
    client = target.async_client(_checked(session))
    made = _make_folder(out, new=tasks is not None) if out is not None else []
    report = _Report(len(jobs), out, named=session is not None)
    screen = console()
    try:
        done = asyncio.run(_run(client, jobs, report, out))
    except (InvalidJob, UnknownTask) as error:
        number = line_of.get(str(error.fields.get("job_id", "")))
        if number is None:
            raise
        raise ConfigError(f"{tasks}, line {number}: {error.message}") from error
    finally:
        if report.finished:
            screen.print(_summary(report.finished))
        else:
            _remove_empty(made)
        if report.note:
            say("prorl submit", report.note)
    if not done:
        raise typer.Abort


class _Report:
    """The results of a file's jobs: progress, files, and a summary."""

    def __init__(self, jobs: int, out: Path | None, *, named: bool) -> None:
        self.finished: list[Trajectory] = []
        self.note = ""
        """The reason of an abnormal end."""
        self._out = out
        self._named = named
        self.progress = Progress("prorl submit", "", counted="rollouts", total=jobs or None)

    def add(self, trajectory: Trajectory) -> None:
        if self._out is not None:
            _write(trajectory, self._out)
        self.finished.append(trajectory)
        self.progress.update(_mean_reward(self.finished), advance=1)

    def conclude(self, submission: Submission, session: str) -> None:
        """Record the outcomes, and how to collect the remaining jobs."""
        counts = Counter(str(trajectory.outcome) for trajectory in self.finished)
        parts = [f"{count} {outcome}" for outcome, count in sorted(counts.items())]
        parts += [f"{submission.unsent} not submitted"] if submission.unsent else []
        if submission.waiting:
            parts.append(
                f"{submission.waiting} not collected: `prorl submit --session {session}` collects them (name "
                "--connect, --config, --keys and --out as here)"
                + ("" if self._named else ", within 10 minutes: the service then ends a session without a name")
            )
        self.note = ", ".join(parts) or "nothing was submitted"


async def _run(client: AsyncRolloutClient, jobs: list[Job], report: _Report, out: Path | None) -> bool:
    """Take jobs through the service; false: interrupted."""
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


def cancel(
    target: Target,
    job_ids: Annotated[list[str], typer.Argument(metavar="JOB…", help="Ids of the jobs to end.")],
) -> None:
    """End jobs with outcome `cancelled`, whichever rollout broker has them."""
    with target.brokers() as brokers:
        answers = brokers.ask(lambda client: client.cancel(job_ids))
    answers.check()
    told = fates(answers.found.values())
    for job_id, fate in told.items():
        print(f"{job_id}: {fate}")
    end_with(answers.silent(), "prorl cancel")
    if "unknown" in told.values():
        raise typer.Exit(1)


def read_jobs(path: Path) -> tuple[list[Job], dict[str, int]]:
    """Read a file of one JSON job per line, and return the line of each job's id too; blank lines are skipped."""
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
                fields = f"; a job has {', '.join(Job.__struct_fields__)}" if "unknown field" in str(error) else ""
                raise ConfigError(f"{path}, line {number}: {error}{fields}") from error
            if job.job_id in line_of:
                raise ConfigError(f"{path}, line {number}: job_id {job.job_id!r} is on line {line_of[job.job_id]} too")
            line_of[job.job_id] = number
            jobs.append(job)
    if not jobs:
        raise ConfigError(f"{path} has no jobs in it")
    return jobs, line_of


def _make_folder(out: Path, *, new: bool) -> list[Path]:
    """Make the folder of a submission and return the folders that were missing, the innermost first.

    A new submission moves existing results aside.
    """
    results, arrays = out / "results.jsonl", out / "arrays"
    try:
        if new and results.exists() and results.stat().st_size:
            earlier = put_aside(out, (TRACES, RECORDS, arrays.name, results.name))  # the results last
            say("prorl submit", f"the results that {out} had are in {earlier}")
        made = [each for each in (arrays, *arrays.parents) if not each.exists()]
        arrays.mkdir(parents=True, exist_ok=True)
        if new:
            for name in (results.name, TRACES):
                (out / name).write_bytes(b"")
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error
    return made


def _remove_empty(made: Sequence[Path]) -> None:
    """Remove the folders that a submission without a result made."""
    if len(made) > 1:  # the submission's own folder is new
        for name in ("results.jsonl", TRACES):
            (made[1] / name).unlink(missing_ok=True)
    for folder in made:
        with suppress(OSError):  # something else is in it
            folder.rmdir()


def _write(trajectory: Trajectory, out: Path) -> None:
    with (out / "results.jsonl").open("ab") as results:
        results.write(msgspec.json.encode(trajectory.result) + b"\n")
    import numpy as np  # which `prorl status` does not need

    file = f"{trajectory.job_id}.npz"
    np.savez(out / "arrays" / file, **{name: getattr(trajectory, name) for name in ARRAYS})
    if records := trajectory.records:
        kept: dict[str, Any] = {**records, **{f"{name}_rows": records.rows(name) for name in records.names}}
        (out / RECORDS).mkdir(exist_ok=True)
        np.savez(out / RECORDS / file, **kept)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_reward(finished: list[Trajectory]) -> str:
    rewards = [trajectory.reward for trajectory in finished if trajectory.reward is not None]
    return f"mean reward {_mean(rewards):.3f}" if rewards else ""


def _summary(finished: list[Trajectory]) -> Table:
    rows: defaultdict[tuple[str, Outcome], list[Trajectory]] = defaultdict(list)
    for trajectory in finished:
        rows[trajectory.result.task, trajectory.result.outcome].append(trajectory)
    return table(
        *("task", "outcome", ">jobs", ">mean reward", ">mean tokens", ">mean turns", "first error"),
        rows=(_summary_row(*of, group) for of, group in sorted(rows.items())),
        title="results",
    )


def _summary_row(task: str, outcome: Outcome, group: list[Trajectory]) -> tuple[object, ...]:
    rewards = [trajectory.reward for trajectory in group if trajectory.reward is not None]
    return (
        *(task, outcome, len(group), f"{_mean(rewards):.3f}" if rewards else None),
        f"{_mean([trajectory.result.tokens for trajectory in group]):.0f}",
        f"{_mean([trajectory.result.metrics.get('turns', 0.0) for trajectory in group]):.1f}",
        next((trajectory.error.message for trajectory in group if trajectory.error is not None), None),
    )
