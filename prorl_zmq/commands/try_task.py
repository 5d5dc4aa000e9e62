"""`prorl tasks show` and `prorl tasks try`: describe a task, and run one rollout of it."""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.text import Text

from ..config import BackendSettings
from ..errors import ConfigError, InvalidJob, InvalidRecord, NoBackend
from ..system.logs import one_line, say
from ..system.pauses import blocked_log
from ..wire.messages.jobs import Job, Outcome
from . import options
from .option_groups import OptionGroup, SandboxOptions, flag_of
from .tables import console, print_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..data.trajectory import Trajectory
    from ..stages.handler import AgentHandler
    from ..testing.task_trial import PhaseSeen
    from ..wire.messages.backends import Backend

    Kinds = dict[str, type[AgentHandler[Any]]]

LIMIT_S = 60.0
SHOWN_DATA = 2_000
SHOWN_ROW = 300
JOB_ID = "try"
SCRIPT_ENDED = "the script has"
_CALL = re.compile(r"""\s*([A-Za-z_][A-Za-z0-9_.-]*)\s*(\{.*\}|\{\s*["'].*)\s*""", re.DOTALL)
"""A call, or one whose last brace is missing."""

TaskOrFile = Annotated[
    str, typer.Argument(metavar="FILE.py|TASK", help="A file with a task of your own, or an installed task.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceOptions(OptionGroup):
    """The instance to try: a row's, or one made by --set."""

    file: Annotated[
        Path | None, typer.Argument(metavar="[DATA]", help="Rows: .jsonl, .parquet, .csv, or .json with a list.")
    ] = None
    row: Annotated[int, typer.Option(min=1, help="Which row of DATA, from 1.")] = 1
    task: options.TaskName = ""
    row_format: options.RowFormatName = ""
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=JSON", help="Set a field of the instance; without DATA, make one of these."
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkOptions(OptionGroup):
    """The policy: an engine, or a script."""

    said: Annotated[
        list[str] | None,
        typer.Option(
            "--say",
            metavar="TURN",
            help="What the model says: its turns in order, in place of an engine. NAME {JSON} calls a tool, such as "
            """'bash {"command": "ls"}'.""",
        ),
    ] = None
    said_as: Annotated[
        list[str] | None,
        typer.Option(
            "--say-as",
            metavar="NAME=TURN",
            help="What another model says, such as the user that a task simulates: its turns in order.",
        ),
    ] = None
    engine: Annotated[
        str, typer.Option(metavar="KIND", help="A real model's engine. [default: embedded]", show_default=False)
    ] = ""
    model: options.Model = ""
    url: Annotated[
        str, typer.Option(help="http: a server, such as http://gpu-7:8000. Its key is in $PRORL_API_KEY.")
    ] = ""
    api: options.Api = "auto"
    tokenizer: options.Tokenizer = ""
    start_limit: options.StartLimit = None

    @property
    def name(self) -> str:
        """The name of the awaited thing."""
        return self.url or f"the engine of kind {self.engine or 'embedded'}"

    @property
    def limit_s(self) -> float:
        return options.start_limit_s(self.start_limit, url=bool(self.url))

    def others(self) -> dict[str, Any]:
        """Return the scripts of the other models, by name."""
        turns: dict[str, list[str]] = {}
        for each in self.said_as or ():
            name, separator, turn = each.partition("=")
            if not separator:
                raise ConfigError(f"--say-as {each}: write NAME=TURN, such as user='I need help.'", key="say_as")
            turns.setdefault(name, []).append(turn)
        return {name: _script(said) for name, said in turns.items()}

    def starter(self) -> Any:
        """Return a function that starts the engine or the script."""
        if self.said and (self.engine or self.model or self.url):
            words = "--say and an engine (--engine, --model, --url) are two ways to talk; name one"
            raise ConfigError(words, key="say")
        if self.said:
            return _script(self.said)
        backend = BackendSettings(
            kind=self.engine or ("http" if self.url else "embedded"),
            model=self.model,
            urls=(self.url,) if self.url else (),
            api=self.api,
            tokenizer=self.tokenizer,
        )
        (kind,) = backend.check(flag_of)
        kind.check()
        return partial(kind.start, 0)


def try_task(
    task_or_file: TaskOrFile,
    instance: InstanceOptions,
    model: TalkOptions,
    sandboxes: SandboxOptions,
    harness: Annotated[
        str, typer.Option(metavar="NAME[==VERSION]", help="Let an agent program lead the rollout.")
    ] = "",
    limit: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Longest time of each phase.")] = LIMIT_S,
) -> None:
    r"""Run one rollout of a task, and show what each phase returned, the turns and the reward.

    prorl tasks try my_task.py data.jsonl --row 3 --say 'bash {"command": "ls"}' --say 'finish {"message": "2"}'

    prorl tasks try math --set problem='1 + 1' --set ground_truth=2 --say '\boxed{2}'

    prorl tasks try my_task.py data.jsonl --url http://gpu-7:8000

    The service runs inside this command, so nothing has to be installed or restarted. Exit codes: 0 the rollout has a
    reward, whatever it is; 1 it ended without one; 2 a wrong flag, file or row.
    """
    from ..testing.local_service import BACKEND_ID, NotReady
    from ..testing.task_trial import TaskTrial

    kinds, handlers, own = _handlers(task_or_file)
    job = _job(handlers, own, task_or_file if not own else instance.task, instance)
    if harness:
        job = msgspec.structs.replace(job, harness=harness)
    trial = TaskTrial(
        job=job,
        handlers=kinds,
        engine=model.starter(),
        models=model.others(),
        sandbox=options.sandbox_for(sandboxes.sandbox, instance.file),
        image=sandboxes.image or "",
        limit_s=limit,
        start_limit_s=model.limit_s,
    )
    logging.getLogger("prorl").setLevel(logging.CRITICAL)  # errors are shown below
    blocked_log.setLevel(logging.WARNING)  # but not while it lasts
    if not model.said:
        say("prorl tasks", f"waiting for {model.name}, at most {model.limit_s:g} s")
    try:
        trajectory, backends = trial.run(_show_phase)
    except NotReady as error:
        remedy = "is the server up?" if model.url else "--start-limit gives it longer"
        raise ConfigError(f"{model.name} did not answer within {model.limit_s:g} s; {remedy}", key="url") from error
    _show_result(trajectory, backends)
    if (failure := trajectory.error) is not None and SCRIPT_ENDED in failure.message:
        other = str(failure.fields.get("backend", "")).removeprefix(BACKEND_ID).removeprefix("-")
        option, said = (f"--say-as {other}=TURN", "its script") if other else ("--say", str(len(model.said or ())))
        say("prorl tasks", f"{other or 'the model'} needs another turn after {said}: add a {option}")
    if failure is not None and failure.code == NoBackend.code:
        say(
            "prorl tasks",
            '--say-as NAME=TURN scripts another model; with "models": {NAME: "policy"} in a row of DATA that is a '
            "whole job, the policy plays it",
        )
    if trajectory.outcome != Outcome.COMPLETED:
        raise typer.Exit(1)


def show_task(task_or_file: TaskOrFile) -> None:
    """Show a task: the fields of its instances, and the data sets whose rows it reads.

    prorl tasks show shell
    """
    from ..stages.known_row_formats import known_row_formats
    from ..tasks.instance_fields import instance_fields

    _, handlers, own = _handlers(task_or_file)
    shown = own or [task_or_file]
    screen = console()
    for name in shown:
        handler = handlers[name]
        kind = handler.instance_type
        about = one_line((kind.__doc__ or "").strip().partition("\n")[0])
        screen.print(Text(f"task {name}: {about}" if about else f"task {name}"))
        rows = (
            (one.name, one.type, "required" if one.default is None else one.default, " ".join(one.about.split()))
            for one in instance_fields(kind)
        )
        print_table("field", "type", "default", "about", rows=rows)
        formats = [each for each in known_row_formats(handlers, own) if each.task == name and each.name != name]
        for each in formats:
            screen.print(Text(f"rows of {each.about}: {', '.join(sorted(each.required))} ({each.name})"))


def _handlers(task_or_file: str) -> tuple[Kinds, Mapping[str, AgentHandler[Any]], list[str]]:
    """Return the classes and the handlers that a trial may need, and the tasks that come from a file."""
    from ..stages.handler import load_handlers
    from ..stages.own_tasks import own_handlers

    if task_or_file.endswith(".py") or "/" in task_or_file:
        kinds: Kinds = own_handlers([Path(task_or_file)])
        return kinds, {task: kind() for task, kind in kinds.items()}, list(kinds)
    handlers = load_handlers([task_or_file])
    return {task: type(handler) for task, handler in handlers.items()}, handlers, []


def _job(
    handlers: Mapping[str, AgentHandler[Any]],
    own: list[str],
    task: str,
    chosen: InstanceOptions,
) -> Job:
    """Make the job of a row, or of fields alone.

    Raises:
        ConfigError, InvalidJob, InvalidRecord: the row is missing, or does not fit.
    """
    from ..stages.known_row_formats import known_row_formats
    from ..tasks.loading import load_rows

    given = options.named_values("--set", chosen.fields)
    if (file := chosen.file) is None:
        if not task and len(own) > 1:
            raise ConfigError(f"the file has the tasks {', '.join(own)}; name one with --task", key="task")
        job = Job(task=task or own[0], instance=given)
        where = "without a data file, --set makes the instance"
    else:
        formats = known_row_formats(handlers, own or list(handlers))
        formats = tuple(each for each in formats if each.task in handlers)
        count, found = 0, None
        for count, found in enumerate(  # noqa: B007 - it is read below
            load_rows(file, task=task, row_format=chosen.row_format, row_formats=formats, options=given), 1
        ):
            if count == chosen.row:
                break
        if count < chosen.row or found is None:
            raise ConfigError(f"--row {chosen.row}: {file} has {count} rows", key="row")
        if isinstance(found, InvalidRecord):
            raise InvalidRecord(f"{found.message}; {_fields_there(handlers)}", **found.fields)
        job = found.job
        where = f"{file.name}, line {found.number}"
    if job.task not in handlers:
        raise ConfigError(f"{where}: it is a job of task {job.task}, not of {', '.join(handlers)}", key="task")
    try:
        handlers[job.task].parse_instance(job)
    except InvalidJob as error:
        raise InvalidJob(f"{where}: {error.message}; {_fields_there(handlers)}", **error.fields) from error
    say("prorl tasks", f"task {job.task}, {where}: {_short(job.instance, SHOWN_ROW)}")
    return msgspec.structs.replace(job, job_id=JOB_ID)


def _fields_there(handlers: Mapping[str, AgentHandler[Any]]) -> str:
    parts = []
    for task, handler in handlers.items():
        described = handler.describe()
        names = [f"{name} (optional)" if name in described.optional else name for name in described.fields]
        parts.append(f"a {task} instance has the fields {', '.join(names) or 'none'}")
    return "; ".join(parts)


def _script(turns: list[str]) -> Any:
    from ..testing import say as script
    from ..testing import tool_call

    said = []
    for turn in turns:
        match = _CALL.fullmatch(turn)
        try:
            arguments = msgspec.json.decode(match[2], type=dict[str, Any]) if match else None
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--say {turn}: the arguments of the call are not a JSON object: {error}") from error
        said.append(turn if match is None or arguments is None else tool_call(match[1], **arguments))
    return script(*said)


def _show_phase(seen: PhaseSeen) -> None:
    screen = console()
    head = Text(f"{seen.phase.upper()} {seen.took_s:.2f} s", style="bold")
    if seen.raised is None:
        screen.print(head.append(f"  {_said(seen.returned)}", style="not bold"))
        return
    screen.print(head.append(f"  raised {type(seen.raised).__name__}", style="red"))
    own = [each for each in traceback.extract_tb(seen.raised.__traceback__) if _is_the_tasks(each.filename)]
    lines = traceback.format_list(own)
    if not isinstance(seen.raised, asyncio.CancelledError):  # which names only where the phase was stopped
        lines += traceback.format_exception_only(seen.raised)
    screen.print(Text(_clean("".join(lines).rstrip())))


def _is_the_tasks(file: str) -> bool:
    return not file.startswith((str(Path(__file__).parents[1]), str(Path(asyncio.__file__).parent)))


def _said(returned: Any) -> str:
    from ..stages.handler import Evaluation

    if isinstance(returned, Evaluation):
        by_name = f", of conversations {_short(dict(returned.rewards), SHOWN_DATA)}" if returned.rewards else ""
        return f"reward {returned.reward!r}{by_name}"
    return f"returned {_short(returned, SHOWN_DATA)}" if returned else "returned nothing"


def _show_result(trajectory: Trajectory, backends: tuple[Backend, ...]) -> None:
    from ..evaluation.display import head, notes_text, turns_text
    from ..evaluation.run_folder import Sample
    from ..evaluation.transcript import TextReader, make_transcript
    from ..inference.chat.loading import load_chat_format

    screen, reader = console(), None
    for backend in backends:
        reader = TextReader(load_chat_format(backend.chat), backend.chat, backend.model)
    transcript = make_transcript(trajectory.job_id, trajectory, reader)
    rollout = Sample.of_job(trajectory.result)
    for part in (turns_text(transcript), "", head(rollout), "", notes_text(rollout)):
        screen.print(part)


def _short(data: Any, limit: int) -> str:
    text = repr(data)
    return one_line(text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} more characters)")


def _clean(text: str) -> str:
    return "\n".join(map(one_line, text.split("\n")))
