"""`Planned`: what the options of `prorl eval` ask for, checked before anything is made.

The fields of the option groups are named as those of `Settings`, `BackendSettings`, `OwnService` and `Counting`.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer

from ..config import BackendSettings
from ..errors import ConfigError
from ..system.logs import say
from ..wire.messages.base import POLICY, ModelName
from ..wire.messages.jobs import ModelRole
from . import options
from .option_groups import ModelOptions, OptionGroup, flag_of
from .target import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..client.asynchronous.client import AsyncRolloutClient
    from ..evaluation.plan import Plan
    from ..evaluation.problems import Problem
    from ..evaluation.service import OwnService
    from ..evaluation.summary import Counting

PROGRAM = "prorl eval"
SLOTS = 8
"""Default of concurrent rollouts in each stage of this run's own service."""
CHECKSUM_DIGITS = 12


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
    model_name: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The model of a running service that takes the rollouts' turns. [default: the job's]",
        ),
    ] = ""
    models: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE=NAME", help="A model of the service that the rollouts talk to, such as judge=rm; repeatable."
        ),
    ] = None
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
        return values | {"task_modules": modules, "models": self.named_models()}

    def named_models(self) -> dict[str, str]:
        """Return the models that all jobs talk to.

        Raises:
            ConfigError: a name cannot be one of a model.
        """
        models = dict(one.rpartition("=")[::2] for one in self.models or ())
        try:
            msgspec.convert(self.model_name or POLICY, ModelName)
            return msgspec.convert(models, dict[ModelRole, ModelName])
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"--model-name takes a model's name, and --models ROLE=NAME, such as judge=rm: {error}", key="models"
            ) from error


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


class Planned(NamedTuple):
    """An evaluation whose options and data file are checked."""

    plan: Plan
    problems: Sequence[Problem]
    counting: Counting
    service: OwnService | Callable[[str], AsyncRolloutClient]


def plan_evaluation(
    file: Path, what: WhatOptions, own: OwnOptions, running: RunningService, counted: CountingOptions
) -> Planned:
    from ..evaluation.plan import Plan, Settings
    from ..evaluation.problems import checksum

    values = what.values() | {"data_sha256": checksum(file)}
    counting = counted.counting(what.samples)
    service: OwnService | None = None
    if running.is_named:
        _check_running(what, own)
        values["connect"] = running.front_door
    else:
        service = _own_service(file, own, what.task_modules or [], values["template_arguments"])
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
    return Planned(plan, problems, counting, service or running.async_client)


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
    from ..evaluation.problems import check_instances, load_problems, with_models
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
    if what.model_name or what.models:
        problems = with_models(problems, what.model_name, what.named_models())
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
    from ..stages.harness.harness_store import HarnessStore

    store = HarnessStore()
    store.parse(named)
    if here:
        store.find(named)


def _own_service(
    file: Path, own: OwnOptions, task_modules: Sequence[Path], template_arguments: dict[str, Any]
) -> OwnService:
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
        sandbox=options.sandbox_for(own.sandbox, file),
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
