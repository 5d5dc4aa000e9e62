"""`prorl explain`: what bounded a run, a batch or a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Group

from ..errors import NotAllowed, UnknownJob
from ..system.duration import duration
from ..system.logs import one_line
from . import options
from .tables import console, table, text
from .target import Target

if TYPE_CHECKING:
    from rich.table import Table

    from ..explain.explanation import Explanation
    from ..explain.one_job import JobExplanation
    from ..explain.recording import Recording
    from ..service.rollout_brokers import RolloutBrokers
    from ..watching.recorded_jobs import RecordedJobs
    from ..wire.messages.watching import BatchView

SHOWN_PARTS, SHOWN_UNFINISHED = 10, 3


def explain(
    target: Target,
    what: Annotated[
        str,
        typer.Argument(
            metavar="[BATCH|JOB|RUN]",
            help="A batch or a job, by its id or a beginning of it, or the folder of a run (`prorl eval`, "
            "`prorl submit --out`). [default: what the service did last]",
            show_default=False,
        ),
    ] = "",
    as_json: options.AsJson = False,
) -> None:
    """Find what limited a run, a batch or a job: a stage, its slots, a task, node, engine or tool, losses, the client.

    prorl explain eval/aime

    prorl explain 3f2a90c1d5e7

    It replays the recorded times of each rollout without each suspect, and estimates how long the run would have taken.
    Of a running service it reads the newest jobs; running ones count up to now. With keys, it needs an operator's.
    """
    if what and Path(what).is_dir():
        _explain_folder(Path(what), as_json=as_json)
        return
    from ..watching.recorded_jobs import record_batch

    with target.brokers() as brokers:
        if not what:
            _explain_service(brokers, as_json=as_json)
        elif (batch := record_batch(brokers, what)) is not None:
            _show_batch(*batch, as_json=as_json)
        else:
            _explain_job(brokers, what, as_json=as_json)


def _explain_folder(folder: Path, *, as_json: bool) -> None:
    from ..evaluation.recorded_run import mean_seconds, read_recorded

    recorded = read_recorded(folder)
    if recorded.recording is not None:
        _show(recorded.recording, "this run", recorded.notes, as_json=as_json)
        return
    seconds = mean_seconds(recorded.results)
    said = (
        f"{folder} has no traces of its rollouts (a run of an earlier version, or one that just began): what waited "
        "for what is not known, only where the seconds of a rollout went."
    )
    lines = [said, *(f"{note[0].upper()}{note[1:]}." for note in recorded.notes)]
    if as_json:
        print(json.dumps({"kind": "unknown", "sentences": lines, "mean_s": seconds}))
        return
    rows = ((name, duration(mean_s)) for name, mean_s in seconds.items())
    console().print(Group(text(" ".join(lines)), "", table("what", ">mean of a rollout", rows=rows, title="seconds")))


def _explain_service(brokers: RolloutBrokers, *, as_json: bool) -> None:
    from ..watching.recorded_jobs import record_service

    recorded = record_service(brokers)
    if recorded.recording is None:
        raise UnknownJob("the service has no job: nothing was submitted, or it was restarted and all was collected")
    _show(recorded.recording, "the service's newest work", recorded.notes, as_json=as_json)


def _show_batch(view: BatchView, recorded: RecordedJobs, *, as_json: bool) -> None:
    from ..watching.recorded_jobs import KEPT

    waits = [f"The batch waits for this now: {view.waits_for}"] if view.waits_for else []
    if recorded.recording is not None:
        _show(recorded.recording, f"batch {view.status.batch_id[:12]}", (*waits, *recorded.notes), as_json=as_json)
        return
    why = f"none of its {view.rollouts} rollouts is kept any more: {KEPT}"
    why = why if view.rollouts else "no rollout of it was started"
    _tell_unknown([f"Of batch {view.status.batch_id} nothing can be explained: {why}.", *waits], as_json=as_json)


def _tell_unknown(said: list[str], *, as_json: bool) -> None:
    print(json.dumps({"kind": "unknown", "sentences": said}) if as_json else one_line(" ".join(said)))


def _explain_job(brokers: RolloutBrokers, what: str, *, as_json: bool) -> None:
    from ..explain.one_job import explain_job, with_job
    from ..watching.recorded_jobs import record_job, record_service

    try:
        trace = brokers.trace(what)
    except UnknownJob as error:
        if error.fields.get("matches"):
            raise
        raise UnknownJob(
            f"{what} is neither a folder nor a batch that is known here, and {error.message}", job_id=what
        ) from error
    try:
        recorded = record_service(brokers, lambda row: row.task == trace.task or not trace.task)
        jobs = brokers.ask(lambda client: record_job(client, trace.job_id))
    except NotAllowed as error:
        raise NotAllowed(f"{error.message}; only an operator's key may see the other jobs") from error
    job = next(one for one in jobs.found.values() if one is not None)
    recording = with_job(recorded.recording, job) if recorded.recording is not None else None
    explanation = explain_job(job, recording.rollouts if recording is not None else (), recording)
    if as_json:
        print(json.dumps(msgspec.to_builtins(explanation)))
    else:
        console().print(job_layout(explanation))


def _show(recording: Recording, of: str, notes: tuple[str, ...], *, as_json: bool) -> None:
    from ..explain.diagnosis import diagnose

    if recording.now is not None:
        notes = (*notes, *unfinished(recording))
    explanation = diagnose(recording, of, notes)
    if as_json:
        print(json.dumps(msgspec.to_builtins(explanation)))
    else:
        console().print(layout(explanation))


def unfinished(recording: Recording) -> list[str]:
    """Report the unfinished rollouts: the oldest ones, those at work first."""
    going_on = sorted((one for one in recording.rollouts if one.ended is None), key=lambda one: one.waits is not None)
    lines = []
    for rollout in going_on[:SHOWN_UNFINISHED]:
        if rollout.waits is not None:
            phase, since = rollout.waits
            lines.append(f"job {rollout.job_id} has waited for {phase.upper()} for {duration(rollout.seen - since)}")
        elif rollout.works:
            work = rollout.works[-1]
            where = f" on node {work.node}" + (f", backend {work.backend}" if work.backend else "")
            lines.append(f"job {rollout.job_id} is in {work.phase.upper()}{where} for {duration(work.seconds)}")
    return lines


def layout(explanation: Explanation) -> Group:
    """Lay out an explanation, in 80 columns."""
    lines = [f"Also: {one.evidence} (without that: {duration(one.without_s)})." for one in explanation.others]
    lines += [f"{note[0].upper()}{note[1:].rstrip('.')}." for note in explanation.notes]
    tables = _stage_table(explanation), _part_table(explanation)
    return Group(text(" ".join(explanation.sentences)), "", *tables, *map(text, lines))


def _stage_table(explanation: Explanation) -> Table:
    rows = (
        (row.stage, row.slots, *(f"{number:.1f}" for number in (row.busy, row.waiting, row.idle_while_others_waited)))
        for row in explanation.stages
    )
    return table("stage", ">slots", ">busy", ">jobs waiting", ">idle while others waited", rows=rows)


def _part_table(explanation: Explanation) -> Table:
    whole, work = explanation.took_s or 1.0, sum(row.work_s for row in explanation.parts) or 1.0
    rows = (
        (
            *(row.part, duration(row.path_s), f"{row.path_s / whole:.0%}", f"{row.work_s / work:.0%}"),
            duration(row.without_s),
        )
        for row in explanation.parts[:SHOWN_PARTS]
    )
    return table("what", ">critical path", ">share", ">of all work", ">without it", rows=rows)


def job_layout(explanation: JobExplanation) -> Group:
    rows = (
        (
            *(row.part, duration(row.seconds), duration(row.usual_s)),
            f"{round(row.seconds - row.usual_s, 3) + 0.0:+.3f} s",  # not -0.000
        )
        for row in explanation.parts
    )
    parts = table("what", ">this job", ">others, median", ">more", rows=rows)
    return Group(text(" ".join(explanation.sentences)), "", parts, *map(text, explanation.notes))
