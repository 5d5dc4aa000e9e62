"""`prorl eval`: a model's pass@k on a data file."""

from __future__ import annotations

import math
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..config import BackendSettings, SandboxSettings
from ..errors import ConfigError
from ..system.logs import one_line, say
from ..trackers.adapter import TRACKERS
from . import options
from .demo import say_where
from .progress_display import RolloutProgress

if TYPE_CHECKING:
    from ..client.asynchronous.client import AsyncRolloutClient
    from ..evaluation.passes import Estimate
    from ..evaluation.plan import Settings
    from ..evaluation.run_folder import RunFolder, Sample
    from ..evaluation.service import OwnService
    from ..evaluation.summary import Counting, Summary
    from ..evaluation.tracking import EvaluationLog

LOG_CLOSE_S = 15.0
"""How long trackers may take to end their run when the evaluation has ended."""
SLOTS = 8
"""Rollouts at a time in each stage of this run's own service, unless an option says otherwise."""
SHOWN_MESSAGE = 120
SHOWN_DIGITS = 12
"""Of a checksum."""
SHOWN_FAILURES = 8
"""Reasons in the table at the end; the reports have all."""


def evaluate(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Problems: .jsonl, .parquet, .csv or a JSON list, in any row format that `prorl tasks list` shows.",
        ),
    ],
    arguments: options.VllmFlags = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run folder; a stopped run continues there. [default: eval/FILE]")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start from nothing; what the folder has is moved to DIR/earlier.")
    ] = False,
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, max=10_000, help="Rollouts of each problem.")] = 1,
    k: Annotated[
        str, typer.Option(metavar="K,K,…", help="Which pass@k to report. [default: 1, 2, 4, … up to --samples]")
    ] = "",
    limit: Annotated[int, typer.Option(min=0, help="Take so many problems only; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling; each rollout derives its own from it.")] = 0,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="[default: the job's, or 1]")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.001, max=1, help="[default: the job's, or 1]")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of one turn. [default: the job's, or 1024]")] = None,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Of the model. [default: the job's, or 16]")] = None,
    context: Annotated[
        int | None, typer.Option(metavar="TOKENS", min=1, help="Of a conversation. [default: the job's, or 32768]")
    ] = None,
    template_argument: options.TemplateArguments = None,
    harness: Annotated[
        str,
        typer.Option(
            metavar="NAME[==VERSION]",
            help="Let an agent program lead the rollouts, such as claude-code, codex or opencode (see prorl harness).",
        ),
    ] = "",
    row_format: options.RowFormatName = "",
    task: options.TaskName = "",
    task_module: options.TaskModule = None,
    fields: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=JSON", help='Set a field of all instances, such as tools=["ipython"].'),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="The model's engine, in a service for this run: the small policy of the package, vLLM, or a server "
            "that runs already. [default: embedded]",
            show_default=False,
        ),
    ] = None,
    model: options.Model = "",
    url: Annotated[
        list[str] | None,
        typer.Option(help="http: such as http://gpu-7:8000; may be repeated. Their key is in $PRORL_API_KEY."),
    ] = None,
    api: options.Api = "auto",
    tokenizer: options.Tokenizer = "",
    tool_calls: options.ToolCalls = "",
    option: options.EngineOptions = None,
    python: Annotated[
        str, typer.Option(metavar="PATH", help="vllm: the interpreter of its environment. [default: ours]")
    ] = "",
    slots: Annotated[int, typer.Option(min=1, max=10_000, help="Rollouts at a time, per stage.")] = SLOTS,
    sandbox: options.Sandbox = None,
    image: options.Image = None,
    image_folder: options.ImageFolder = None,
    start_limit: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="How long the engines may take to start.")
    ] = 900.0,
    connect: options.Connect = None,
    config: options.Config = None,
    keys: options.Keys = None,
    service: options.ServiceDir = None,
    threshold: Annotated[float, typer.Option(help="The least reward of a solved problem.")] = 1.0,
    price_in: Annotated[float | None, typer.Option(min=0, help="Of a million prompt tokens, for the cost.")] = None,
    price_cached: Annotated[
        float | None, typer.Option(min=0, help="Of a million found in the prefix cache. [default: --price-in]")
    ] = None,
    price_out: Annotated[float | None, typer.Option(min=0, help="Of a million generated tokens.")] = None,
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
    what is missing, and retries what ended with an error of the infrastructure or the task, which is no wrong answer.
    The folder gets report.md and report.html, and `prorl view DIR` shows each rollout. With nothing missing, the
    command makes new reports, also for another --k, --threshold or prices. Exit codes: 0 each rollout has a result that
    counts; 1 some ended with errors; 2 a wrong flag, file or setting; 130 after Ctrl-C.
    """
    from ..evaluation.plan import Plan
    from ..evaluation.problems import check_instances, checksum, load_problems
    from ..evaluation.report import write_reports
    from ..evaluation.run_folder import RunFolder
    from ..evaluation.summary import Counting, summarise
    from ..evaluation.tracking import EvaluationLog, run_config
    from ..stages.known_row_formats import known_row_formats
    from ..stages.own_tasks import all_handlers, own_handlers
    from ..trackers import open_tracker

    data_sha256 = checksum(file)
    counting = Counting(_ks(k, samples), threshold, price_in, price_cached, price_out)
    running = any(each is not None for each in (connect, config, service))
    of_an_engine = (engine, model, url, python, tokenizer, tool_calls, option, arguments, api != "auto")
    if running and any((*of_an_engine, slots != SLOTS, sandbox, image, image_folder)):
        raise ConfigError(
            "--connect and --config name a service that has its engines, stages and sandboxes; --engine, --model, "
            "--url, --api, --python, --tokenizer, --tool-calls, --option, --slots, --sandbox, --image, --image-folder "
            "and flags behind -- are for a service of this run's own"
        )
    if running and task_module:
        raise ConfigError(
            "--connect and --config name a service that has its tasks; --task-module is for a service of this run's "
            "own: give that service the file in [service] task_modules",
            key="task_module",
        )
    own_tasks = own_handlers(task_module or ())
    engine = engine or ("http" if url else "embedded")
    backend = BackendSettings(
        kind=engine,
        model=_absolute(model) if engine == "embedded" else model,
        urls=tuple(url or ()),
        api=api,
        arguments=tuple(arguments or ()),
        python=python,
        tokenizer=tokenizer,
        tool_calls=tool_calls,
        options=options.named_values("--option", option),
    )
    template_arguments = options.named_values("--template-argument", template_argument)
    if not running:  # jobs carry them; whether this engine takes any is known now
        list(msgspec.structs.replace(backend, template_arguments=template_arguments).check(flags=True))
    sandbox = sandbox or SandboxSettings().kind
    own = None if running else _own_service(backend, slots, sandbox, image or "", image_folder or [], task_module or [])
    named_fields = options.named_values("--set", fields)
    if harness:
        _check_harness(harness, here=own is not None)
    handlers = all_handlers(task_module or (), warn=partial(say, "prorl eval"))
    problems = load_problems(
        file,
        known_row_formats(handlers, own_tasks),
        row_format=row_format,
        task=task,
        limit=limit,
        options=named_fields,
    )
    lacking = check_instances(problems, handlers, file)
    for what, count in lacking.items() if own is not None else ():
        say("prorl eval", f"{count} of {len(problems)} problems: {what}")
    settings = _settings(
        backend,
        options.front_door_of(connect, config, service) if running else "",
        data_sha256=data_sha256,
        row_format=row_format,
        task=task,
        task_modules=tuple(f"{each.name} {checksum(each)[:SHOWN_DIGITS]}" for each in task_module or ()),
        options=named_fields,
        limit=limit,
        samples=samples,
        seed=seed,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        max_turns=max_turns,
        context=context,
        template_arguments=template_arguments,
        sandbox="" if running else sandbox,
        image=image or "",
        harness=harness,
    )
    plan = Plan(
        settings=settings,
        file=str(file),
        problems=len(problems),
        version=version("prorl-zmq"),
        created=datetime.now(UTC).isoformat(" ", "seconds"),
    )

    def there(session: str) -> AsyncRolloutClient:
        return options.async_client_of(connect, config, keys, service, session=session)

    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder(out if out is not None else Path("eval") / file.stem, plan, fresh=fresh))
        if folder.earlier is not None:
            say("prorl eval", f"what {folder.path} had is in {folder.earlier}")
        _say_where_it_stands(folder)
        tracker = stack.enter_context(
            open_tracker(
                *log or (),
                project=log_project,
                run=folder.plan.session,
                folder=folder.path / TRACKERS,
                config=run_config(folder.plan),
                close_s=LOG_CLOSE_S,
            )
        )
        tracking = EvaluationLog(tracker, folder)
        done = not folder.missing()
        try:
            if not done:
                from ..evaluation.evaluator import Evaluator

                display = _Display(folder, counting, tracking)
                with display.progress:
                    done = Evaluator(folder, problems, own or there, display, start_limit).run()
        finally:
            summary = summarise(folder.plan, folder.samples, counting)
            if folder.samples:
                write_reports(folder, summary)
                tracking.summed_up(summary)
                options.console().print(summary_tables(summary))
                _say_whats_next(folder, done=done)
        missing = len(folder.missing())
    say_where("prorl eval", tracker)
    if not done:
        if not folder.samples:
            say("prorl eval", "stopped before a rollout had ended; the same command starts it")
        raise typer.Abort
    if missing:
        raise typer.Exit(1)


class _Display:
    """Shows how an evaluation goes: how many rollouts ended, and pass@1 so far."""

    def __init__(self, folder: RunFolder, counting: Counting, tracking: EvaluationLog) -> None:
        self._folder = folder
        self._tracking = tracking
        self._threshold = counting.threshold
        self._errors = self._counted = self._solved = 0
        rollouts = folder.plan.rollouts
        self.progress = RolloutProgress("prorl eval", rollouts, rollouts - len(folder.missing()))
        for sample in folder.samples:
            self._count(sample)
        self._errors = 0  # those that are there are run again

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
        say("prorl eval", message)

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


def summary_tables(summary: Summary) -> Group:
    """Lay the figures out for the terminal, in 80 columns."""
    numbers = options.columns("value", "95 % interval", "problems", justify="right")
    figures = Table("", *numbers, title="evaluation", title_justify="left")
    for row in summary.passes:
        figures.add_row(f"pass@{row.k}", *_share(row.estimate))
    if summary.infrastructure_errors:
        figures.add_row("pass@1, errors as failures", *_share(summary.pass_1_with_errors))
    if summary.reward is not None:
        reward = summary.reward
        between = f"{reward.low:.3f} – {reward.high:.3f}" if math.isfinite(reward.low) else "–"
        figures.add_row("mean reward", f"{reward.value:.3f}", between, str(reward.problems))
    parts: list[Table | str] = [figures]
    if summary.failures:
        failures = Table(title="failures", title_justify="left")
        failures.add_column("reason", overflow="fold", min_width=24)
        failures.add_column("rollouts", justify="right", min_width=8)
        failures.add_column("what one said", overflow="fold")
        for failure in summary.failures[:SHOWN_FAILURES]:
            said = Text(one_line(failure.message, SHOWN_MESSAGE))  # of another machine, on its way to a terminal
            failures.add_row(Text(one_line(failure.reason)), str(failure.count), said)
        parts.append(failures)
    tokens = {row.name: row for row in summary.tokens}
    if tokens:
        named = ("prompt_tokens", "cached_tokens", "generated_tokens")
        counts = ", ".join(f"{tokens[name].total:,.0f} {name.partition('_')[0]}" for name in named)
        parts.append(f"tokens: {counts}" + (f"; cost: {summary.cost.total:,.4g}" if summary.cost else ""))
    stays = [row for row in summary.times if not row.within and row.share is not None and row.share >= 0.005]
    if stays:
        parts.append("time: " + ", ".join(f"{row.name.replace('_', ' ')} {row.share:.0%}" for row in stays))
    return Group(*parts)


def _share(estimate: Estimate | None) -> tuple[str, str, str]:
    if estimate is None:
        return "–", "–", "0"
    from ..evaluation.passes import percentage  # with numpy

    low, high = percentage(estimate.low), percentage(estimate.high)
    return percentage(estimate.value), f"{low} – {high}", str(estimate.problems)


def _say_where_it_stands(folder: RunFolder) -> None:
    there = folder.plan.rollouts - len(folder.missing())
    if folder.samples:
        again = len(folder.samples) - there
        errors = f"; {again} that ended with errors of the infrastructure or the task are run again" if again else ""
        say("prorl eval", f"{folder.path} has {there} of {folder.plan.rollouts} rollouts{errors}")


def _say_whats_next(folder: RunFolder, *, done: bool) -> None:
    missing = len(folder.missing())
    where = f"report: {folder.path / 'report.html'}; rollouts: `prorl view {folder.path}`"
    if done and missing:
        where += f". {missing} rollouts ended with errors that are not the model's: the same command runs them again"
    elif missing:
        where += f". {missing} of {folder.plan.rollouts} rollouts are missing: the same command continues with them"
    say("prorl eval", where)


def _ks(text: str, samples: int) -> tuple[int, ...]:
    from ..evaluation.summary import default_ks

    if not text:
        return default_ks(samples)
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(f"--k takes numbers with commas between them, such as 1,4; not {text!r}", key="k") from None
    if ks[0] < 1 or ks[-1] > samples:
        raise ConfigError(f"--k {text}: each must be 1 to --samples, which is {samples}", key="k")
    return tuple(ks)


def _check_harness(named: str, *, here: bool) -> None:
    """Check that a harness is known and, where its sandboxes are made by this very command, installed."""
    from ..stages.harness.installation import HarnessStore, default_root, parse_name

    parse_name(named)
    if here:
        HarnessStore(default_root()).find(named)


def _own_service(
    backend: BackendSettings,
    slots: int,
    sandbox: str,
    image: str,
    image_folders: list[Path],
    task_modules: list[Path],
) -> OwnService:
    import tempfile

    from ..evaluation.service import OwnService
    from ..tools.sandbox.sandboxes import Sandboxes

    folders = tuple(str(folder.absolute()) for folder in image_folders)
    for kind in backend.check(flags=True):
        kind.check()
    service = OwnService(
        backend=backend,
        slots=slots,
        sandbox=sandbox,
        image=_absolute(image) if image and Path(image).exists() else image,
        image_folders=folders,
        task_modules=tuple(str(each.absolute()) for each in task_modules),
    )
    service.topology()  # says what is wrong with it, before anything is made
    with tempfile.TemporaryDirectory(prefix="prorl-check-") as folder:
        sandboxes = Sandboxes(sandbox, Path(folder), image=service.image, image_folders=tuple(map(Path, folders)))
        sandboxes.check()
    if not sandboxes.isolated:
        say("prorl eval", "sandboxes are plain processes: what the model runs is not isolated")
    return service


def _settings(backend: BackendSettings, front_door: str, **given: Any) -> Settings:
    from ..evaluation.plan import Settings
    from ..evaluation.problems import checksum

    if front_door:
        return Settings(connect=front_door, **given)
    embedded = backend.kind == "embedded" and backend.model
    return Settings(
        engine=backend.kind,
        model=backend.model,
        model_sha256=checksum(Path(backend.model)) if embedded else "",
        urls=backend.urls,
        api=backend.api if backend.urls else "",
        tokenizer=backend.tokenizer,
        tool_calls=backend.tool_calls,
        arguments=backend.arguments,
        engine_options=backend.options,
        **given,
    )


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""
