"""`prorl eval`: a model's pass@k on a data file.

The fields of the option groups are named as those of `Settings`, `BackendSettings`, `OwnService` and `Counting`.
"""

from __future__ import annotations

import socket
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import typer

from ..config import BackendSettings, SandboxSettings
from ..errors import ConfigError
from ..system.logs import say
from ..trackers.adapter import TRACKERS
from . import options
from .option_groups import ModelOptions, OptionGroup, flag_of
from .progress_display import Progress
from .tables import console
from .target import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..client.asynchronous.client import AsyncRolloutClient
    from ..evaluation.plan import Plan
    from ..evaluation.problems import Problem
    from ..evaluation.run_folder import RunFolder, Sample
    from ..evaluation.service import OwnService
    from ..evaluation.summary import Counting, Summary
    from ..evaluation.tracking import EvaluationLog
    from ..trackers import Tracker

PROGRAM = "prorl eval"
LOG_CLOSE_S = 15.0
"""Seconds in which trackers must end their run after the evaluation."""
SLOTS = 8
"""Default of concurrent rollouts in each stage of this run's own service."""
CHECKSUM_DIGITS = 12
CONNECT_S, LOOK_S = 5.0, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatOptions(OptionGroup):
    """The rollouts to run: fields of `Settings`."""

    samples: Annotated[int, typer.Option("--samples", "-n", min=1, max=10_000, help="Rollouts of each problem.")] = 1
    limit: Annotated[int, typer.Option(min=0, help="Evaluate only the first N problems; 0: all.")] = 0
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling; each rollout derives its own from it.")] = 0
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="[default: the job's, or 1]")] = None
    top_p: Annotated[float | None, typer.Option(min=0.001, max=1, help="[default: the job's, or 1]")] = None
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of one turn. [default: the job's, or 1024]")
    ] = None
    max_turns: Annotated[
        int | None, typer.Option(min=1, help="Most turns of the model. [default: the job's, or 16]")
    ] = None
    context: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", min=1, help="Most tokens of a conversation. [default: the job's, or 32768]"),
    ] = None
    template_arguments: options.TemplateArguments = None
    harness: Annotated[
        str,
        typer.Option(
            metavar="NAME[==VERSION]",
            help="Let an agent program lead the rollouts, such as claude-code, codex or opencode (see prorl harness).",
        ),
    ] = ""
    row_format: options.RowFormatName = ""
    task: options.TaskName = ""
    task_modules: options.TaskModule = None
    instance_fields: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=JSON", help='Set a field of all instances, such as tools=["ipython"].'),
    ] = None

    def values(self) -> dict[str, Any]:
        from ..evaluation.problems import checksum

        values = asdict(self)
        values["options"] = options.named_values("--set", values.pop("instance_fields"))
        values["template_arguments"] = options.named_values("--template-argument", self.template_arguments)
        modules = tuple(f"{each.name} {checksum(each)[:CHECKSUM_DIGITS]}" for each in self.task_modules or ())
        return values | {"task_modules": modules}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnOptions(ModelOptions):
    """The service of this run's own: fields of `BackendSettings` and `OwnService`."""

    kind: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="KIND",
            help="The model's engine, in a service for this run: the small policy of the package, vLLM, or a server "
            "that runs already. [default: embedded]",
            show_default=False,
        ),
    ] = None
    urls: Annotated[
        list[str] | None,
        typer.Option("--url", help="http: such as http://gpu-7:8000; may be repeated. Their key is in $PRORL_API_KEY."),
    ] = None
    python: Annotated[
        str, typer.Option(metavar="PATH", help="vllm: the interpreter of its environment. [default: ours]")
    ] = ""
    slots: Annotated[int, typer.Option(min=1, max=10_000, help="Rollouts at a time, per stage.")] = SLOTS
    sandbox: options.Sandbox = None
    image: options.Image = None
    image_folder: options.ImageFolder = None

    def is_given(self) -> bool:
        """Return whether any option differs from its default."""
        defaults = asdict(OwnOptions())
        return any(value and value != defaults[name] for name, value in asdict(self).items())

    def backend(self) -> BackendSettings:
        kind = self.kind or ("http" if self.urls else "embedded")
        model = _absolute(self.model) if kind == "embedded" else self.model
        return self.settings(kind, model=model, urls=tuple(self.urls or ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningService(Target):
    """A running service, in place of an own one."""

    service: options.ServiceDir = None

    @property
    def is_named(self) -> bool:
        return any(each is not None for each in (self.connect, self.config, self.service))


@dataclass(frozen=True, slots=True, kw_only=True)
class CountingOptions(OptionGroup):
    """How results are counted: fields of `Counting`."""

    k: Annotated[
        str, typer.Option(metavar="K,K,…", help="Which pass@k to report. [default: 1, 2, 4, … up to --samples]")
    ] = ""
    threshold: Annotated[float, typer.Option(help="The least reward of a solved problem.")] = 1.0
    price_in: Annotated[float | None, typer.Option(min=0, help="Price of a million prompt tokens, for the cost.")] = (
        None
    )
    price_cached: Annotated[
        float | None,
        typer.Option(min=0, help="Price of a million tokens found in the prefix cache. [default: --price-in]"),
    ] = None
    price_out: Annotated[float | None, typer.Option(min=0, help="Price of a million generated tokens.")] = None

    def counting(self, samples: int) -> Counting:
        from ..evaluation.summary import Counting, default_ks

        ks = _ks(self.k, samples) if self.k else default_ks(samples)
        return Counting(ks, self.threshold, self.price_in, self.price_cached, self.price_out)


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

    planned = _planned(file, what, own, running, counted)
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


class _Planned(NamedTuple):
    """An evaluation whose options and data file are checked."""

    plan: Plan
    problems: Sequence[Problem]
    counting: Counting
    service: OwnService | Callable[[str], AsyncRolloutClient]


def _planned(
    file: Path, what: WhatOptions, own: OwnOptions, running: RunningService, counted: CountingOptions
) -> _Planned:
    from ..evaluation.plan import Plan, Settings
    from ..evaluation.problems import checksum

    values = what.values() | {"data_sha256": checksum(file)}
    counting = counted.counting(what.samples)
    service: OwnService | None = None
    if running.is_named:
        _check_running(what, own)
        values["connect"] = running.front_door
    else:
        service = _own_service(own, what.task_modules or [], values["template_arguments"])
        values |= _engine_values(service.backend) | {"sandbox": service.sandbox, "image": own.image or ""}
    if what.harness:
        _check_harness(what.harness, here=service is not None)
    problems = _problems(file, what, values["options"], is_own=service is not None)
    plan = Plan(
        settings=Settings(**values),
        file=str(file),
        problems=len(problems),
        version=version("prorl-zmq"),
        created=datetime.now(UTC).isoformat(" ", "seconds"),
    )
    return _Planned(plan, problems, counting, service or running.async_client)


def _check_running(what: WhatOptions, own: OwnOptions) -> None:
    """Reject options of an own service, since a running one is named."""
    if own.is_given():
        raise ConfigError(
            "--connect and --config name a service that has its engines, stages and sandboxes; --engine, --model, "
            "--url, --api, --python, --tokenizer, --tool-calls, --option, --slots, --sandbox, --image, --image-folder "
            "and flags behind -- are for a service of this run's own"
        )
    if what.task_modules:
        raise ConfigError(
            "--connect and --config name a service that has its tasks; --task-module is for a service of this run's "
            "own: give that service the file in [service] task_modules",
            key="task_module",
        )


def _problems(file: Path, what: WhatOptions, instance_fields: dict[str, Any], *, is_own: bool) -> list[Problem]:
    """Load the data file, and check it with the handlers that are installed here."""
    from ..evaluation.problems import check_instances, load_problems
    from ..stages.known_row_formats import known_row_formats
    from ..stages.own_tasks import all_handlers, own_handlers

    own_tasks = own_handlers(what.task_modules or ())
    handlers = all_handlers(what.task_modules or (), warn=partial(say, PROGRAM))
    hint = "" if what.task_modules else "; --task-module FILE.py names the file of a task of your own"
    try:
        problems = load_problems(
            file,
            known_row_formats(handlers, own_tasks),
            row_format=what.row_format,
            task=what.task,
            limit=what.limit,
            options=instance_fields,
        )
    except ConfigError as error:
        if not is_own or "row format" not in error.message:
            raise
        raise ConfigError(f"{error.message}{hint}", **error.fields) from error
    unknown = next((one for one in problems if one.job.task not in handlers), None) if is_own else None
    if unknown is not None:
        message = f"{file}, line {unknown.line}: no installed package has the task {unknown.job.task}{hint}"
        raise ConfigError(message, key="task_module")
    missing = check_instances(problems, handlers, file)
    for name, count in missing.items() if is_own else ():
        say(PROGRAM, f"{count} of {len(problems)} problems: {name}")
    return problems


def _check_harness(named: str, *, here: bool) -> None:
    """Check that a harness is known and, if this command makes its sandboxes, installed."""
    from ..stages.harness.installation import HarnessStore, default_root, parse_name

    parse_name(named)
    if here:
        HarnessStore(default_root()).find(named)


def _own_service(own: OwnOptions, task_modules: Sequence[Path], template_arguments: dict[str, Any]) -> OwnService:
    from ..evaluation.service import OwnService
    from ..tools.sandbox.sandboxes import Sandboxes

    backend, image = own.backend(), own.image or ""
    # Jobs carry the template's arguments; whether this engine takes any is known now.
    list(msgspec.structs.replace(backend, template_arguments=template_arguments).check(flag_of))
    for kind in backend.check(flag_of):
        kind.check()
    service = OwnService(
        backend=backend,
        slots=own.slots,
        sandbox=own.sandbox or SandboxSettings().kind,
        image=_absolute(image) if image and Path(image).exists() else image,
        image_folders=tuple(str(folder.absolute()) for folder in own.image_folder or ()),
        task_modules=tuple(str(each.absolute()) for each in task_modules),
    )
    service.topology()  # raises its errors before anything is made
    with tempfile.TemporaryDirectory(prefix="prorl-check-") as folder:
        image_folders = tuple(map(Path, service.image_folders))
        sandboxes = Sandboxes(service.sandbox, Path(folder), image=service.image, image_folders=image_folders)
        sandboxes.check()
    if not sandboxes.isolated:
        say(PROGRAM, "sandboxes are plain processes: what the model runs is not isolated")
    return service


def _engine_values(backend: BackendSettings) -> dict[str, Any]:
    """Return the fields of `Settings` that identify the model."""
    from ..evaluation.problems import checksum

    same = {name: getattr(backend, name) for name in ("model", "urls", "tokenizer", "tool_calls", "arguments")}
    is_file = backend.kind == "embedded" and backend.model
    return same | {
        "engine": backend.kind,
        "model_sha256": checksum(Path(backend.model)) if is_file else "",
        "api": backend.api if backend.urls else "",
        "engine_options": backend.options,
    }


def _ks(text: str, samples: int) -> tuple[int, ...]:
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(f"--k takes numbers with commas between them, such as 1,4; not {text!r}", key="k") from None
    if ks[0] < 1 or ks[-1] > samples:
        raise ConfigError(f"--k {text}: each must be 1 to --samples, which is {samples}", key="k")
    return tuple(ks)


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""


def _run(
    folder: RunFolder,
    planned: _Planned,
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


def _wait_for_servers(planned: _Planned, limit_s: float) -> None:
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
