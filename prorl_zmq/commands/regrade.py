"""`prorl regrade` and `prorl cheats`: grade a stored run again, and find rollouts that may have cheated."""

from __future__ import annotations

import json
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ..config import SandboxSettings
from ..errors import ConfigError
from ..system.logs import one_line, say
from . import options
from .progress_display import Progress
from .tables import NOTHING, print_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..evaluation.plan import Plan
    from ..evaluation.problems import Problem
    from ..evaluation.regrading import Regrading
    from ..stages.handler import AgentHandler

SHOWN_DIFFERENCES = 20
SHOWN_TEXT = 60
SHOWN_IDS = 3


def regrade(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of `prorl eval`; it is only read.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The new run folder. [default: RUN-regraded]", show_default=False)
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The run's data file, if it is elsewhere now.", show_default=False),
    ] = None,
    task_module: options.TaskModule = None,
    sandbox: options.Sandbox = None,
    image: options.Image = None,
    threshold: Annotated[float, typer.Option(help="The least reward of a solved problem.")] = 1.0,
) -> None:
    """Grade a run again with the current graders, and list the differences.

    prorl regrade eval/aime

    prorl regrade eval/swe --sandbox apptainer --out eval/swe-new

    Only grading is repeated, on the answers, sources and patches in the results' notes. Results without them keep
    their rewards, and are counted. The new folder has all results, reports and differences.jsonl.
    """
    from ..evaluation.regrading import Regrading
    from ..evaluation.report import write_reports
    from ..evaluation.run_folder import PLAN, RESULTS, RunFolder, read_plan, read_samples
    from ..evaluation.summary import Counting, default_ks, summarise
    from ..stages.own_tasks import all_handlers

    if not (run / PLAN).exists():
        raise ConfigError(f"{run} is not a run folder of `prorl eval`: it has no {PLAN}", key="run")
    plan = read_plan(run)
    samples = sorted(read_samples(run / RESULTS), key=lambda one: one.index)
    if not samples:
        raise ConfigError(f"{run} has no results yet", key="run")
    whole = run.resolve()  # of `.` and `..`, too
    out = out if out is not None else whole.with_name(f"{whole.name}-regraded")
    if (out / PLAN).exists():
        raise ConfigError(f"--out {out} has a run already; name a new folder", key="out")
    if plan.settings.task_modules and not task_module:
        named = ", ".join(each.partition(" ")[0] for each in plan.settings.task_modules)
        raise ConfigError(
            f"the run's tasks are in files of their own ({named}): name them with --task-module", key="run"
        )
    handlers = all_handlers(task_module or (), warn=partial(say, "prorl regrade"))
    problems = _problems(plan, file, handlers, task_module or [])
    counting = Counting(default_ks(plan.settings.samples), threshold)
    with RunFolder(out, msgspec.structs.replace(plan, version=version("prorl-zmq"))) as folder:
        work = Regrading(samples, run, folder, problems, handlers, sandbox or SandboxSettings().kind, image or "")
        with Progress("prorl regrade", f"grading {len(samples)} rollouts"):
            work.run()
        summary = summarise(folder.plan, folder.samples, counting)
        write_reports(folder, summary)
    _show(work, out)


def _problems(
    plan: Plan, file: Path | None, handlers: Mapping[str, AgentHandler[Any]], task_modules: list[Path]
) -> list[Problem]:
    from ..evaluation.problems import checksum, load_problems
    from ..stages.known_row_formats import known_row_formats
    from ..stages.own_tasks import own_handlers

    path = file if file is not None else Path(plan.file)
    if not path.exists():
        raise ConfigError(f"the run's data file {path} is not there: name it with --file", key="file")
    if checksum(path) != plan.settings.data_sha256:
        raise ConfigError(f"{path} is not the run's data file: its checksum is another one", key="file")
    settings = plan.settings
    return load_problems(
        path,
        known_row_formats(handlers, own_handlers(task_modules)),
        row_format=settings.row_format,
        task=settings.task,
        limit=settings.limit,
        options=settings.options,
    )


def _show(work: Regrading, out: Path) -> None:
    if work.differences:
        rows = (
            (
                *(one.job_id, one_line(one.problem, SHOWN_TEXT)),
                *(NOTHING if one.before is None else f"{one.before:g}", f"{one.after:g}"),
            )
            for one in work.differences[:SHOWN_DIFFERENCES]
        )
        print_table("job", "problem", "before", "now", rows=rows, title="rewards that differ")
    judged = len(work.differences) + work.same
    say("prorl regrade", f"{len(work.differences)} of {judged} rewards differ; all are in {out}")
    if work.not_stored:
        say("prorl regrade", f"{work.not_stored} rollouts keep their rewards: their answers are not in their notes")
    if work.not_judged:
        say("prorl regrade", f"{work.not_judged} rollouts were never graded")
    for job_id, why in work.failed[:SHOWN_IDS]:
        say("prorl regrade", f"{job_id} keeps its reward, since its grader failed: {one_line(why, 200)}")
    if len(work.failed) > SHOWN_IDS:
        say("prorl regrade", f"{len(work.failed) - SHOWN_IDS} more graders failed")
    if work.failed:
        raise typer.Exit(1)


def cheats(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder of `prorl eval`, or of `prorl submit --out`.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print all signs and rollouts as JSON.")] = False,
) -> None:
    """List rollouts of a run that may have cheated: they earned a reward, and something about them is a sign.

    prorl cheats eval/swe

    Signs: one answer for many problems, texts that name what judges, texts that speak to a judge model, a reward
    without a tool call where the task needs one, many boxes, and rollouts much shorter than the others. A sign does
    not prove anything: look at the rollouts with `prorl view RUN --job ID`.
    """
    from ..evaluation.cheats import signs_of
    from ..evaluation.collection import open_collection

    signs = signs_of(open_collection(run))
    if as_json:
        typer.echo(json.dumps([sign._asdict() for sign in signs], indent=1))
        return
    if not signs:
        say("prorl cheats", "no signs")
        return
    rows = (
        (sign.name, one_line(sign.about, SHOWN_TEXT), len(sign.job_ids), " ".join(sign.job_ids[:SHOWN_IDS]))
        for sign in signs
    )
    print_table("sign", "about", "rollouts", "some of them", rows=rows, title="signs of cheating")
