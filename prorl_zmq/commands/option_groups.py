"""Groups of options: a class whose fields are options, as one parameter of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace

from ..config import ENGINE_OPTIONS, BackendSettings, SecuritySettings, Topology, load_topology
from ..errors import ConfigError
from ..wire.messages.base import POLICY, ModelName
from ..wire.messages.chat import History
from . import options

FLAGS = {
    "name": "--model-name",
    "kind": "--engine",
    "urls": "--url",
    "arguments": "flags behind --",
    "template_arguments": "--template-argument",
    "lora": "--option lora",
    **{name: f"--{name.replace('_', '-')}" for name in ENGINE_OPTIONS if not name.endswith(("arguments", "lora"))},
}
"""Flags of keys of `[[backends]]`; `--option` sets other options of an engine's kind."""

ModelNameOption = Annotated[str, typer.Option(metavar="NAME", help="The name by which jobs select its model.")]
Frozen = Annotated[bool, typer.Option("--frozen", help="It keeps its weights: it is skipped by weight updates.")]


class OptionGroup:
    """Base of the groups, which are dataclasses."""


def flat(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command with its groups replaced by their options, as typer requires."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, tuple[Callable[..., Any], list[inspect.Parameter]]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        kind, own = parameter.annotation, [parameter]
        if isinstance(kind, type) and issubclass(kind, OptionGroup):
            own = list(inspect.signature(kind, eval_str=True).parameters.values())
            groups[name] = kind, own
        parameters += (each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own)
    if not groups:
        return command

    @wraps(command)
    def run(**given: Any) -> Any:
        for name, (kind, own) in groups.items():
            given[name] = kind(**{each.name: given.pop(each.name) for each in own})
        return command(**given)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions(OptionGroup):
    """Where a process keeps its files, and how it logs."""

    run_dir: options.RunDir = None
    log_format: options.LogFormatOption = None
    log_level: options.LogLevelOption = None

    def applied(self, topology: Topology) -> Topology:
        """Return a topology with these settings in place of its own."""
        given: dict[str, Any] = {"log_format": self.log_format, "log_level": self.log_level}
        if self.run_dir is not None:
            given |= {"run_dir": str(self.run_dir), "name": ""}
        named = {name: value for name, value in given.items() if value is not None}
        return replace(topology, service=replace(topology.service, **named))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions(LogOptions):
    """Options of each process that a command starts."""

    insecure: options.Insecure = False
    keys: options.Keys = None

    def topology(self, config: Path | None = None) -> Topology:
        """Read a topology file (None: the defaults) and apply the flags that override it."""
        return self.applied(load_topology(config))

    def applied(self, topology: Topology) -> Topology:
        topology = LogOptions.applied(self, topology)
        service = replace(topology.service, insecure=self.insecure or topology.service.insecure)
        security = SecuritySettings(str(self.keys)) if self.keys is not None else topology.security
        return replace(topology, service=service, security=security)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxOptions(OptionGroup):
    """The kind and image of sandboxes, in place of the topology's."""

    sandbox: options.Sandbox = None
    image: options.Image = None

    def applied(self, topology: Topology) -> Topology:
        given = (("kind", self.sandbox), ("image", self.image))
        named = {name: value for name, value in given if value is not None}
        return replace(topology, sandbox=replace(topology.sandbox, **named))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(OptionGroup):
    """A model and how its engine reads it: keys of `[[backends]]`."""

    model: options.Model = ""
    arguments: options.VllmFlags = None
    api: options.Api = "auto"
    tokenizer: options.Tokenizer = ""
    tool_calls: options.ToolCalls = ""
    option: options.EngineOptions = None

    def settings(self, kind: str, **more: Any) -> BackendSettings:
        """Return the settings of an engine of a kind; `more` of its keys override those here."""
        same = {name: getattr(self, name) for name in BackendSettings.__struct_fields__ if hasattr(self, name)}
        given = {
            "arguments": tuple(self.arguments or ()),
            "options": options.named_values("--option", self.option),
        }
        return BackendSettings(**{**same, "kind": kind, **given, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(ModelOptions):
    """One engine."""

    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            metavar="KIND",
            help="What to host: `embedded`, the small policy of the package; `vllm` or `transformers`, in this "
            "process; `http`, a server that runs already; or a kind that another package offers.",
        ),
    ] = "embedded"
    url: Annotated[str, typer.Option(help="http: such as http://gpu-7:8000; its key is in $PRORL_API_KEY.")] = ""
    history: Annotated[
        History, typer.Option(help="Where the template changes earlier turns: follow it, in a new segment, or append.")
    ] = "template"
    parser_url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="A server of vllm launch render: its parsers read what the policy says to a harness. [default: ours]",
        ),
    ] = ""
    template_argument: options.TemplateArguments = None
    gpus: Annotated[str, typer.Option(metavar="IDS", help="vllm: GPU ids, such as 0,1. [default: all]")] = ""
    cores: Annotated[str, typer.Option(metavar="IDS", help="CPU cores, such as 0,1. [default: all]")] = ""
    weights_dir: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="On a local disk: new weights are copied there before the engine pauses. [default: deltas only, in "
            "the run folder]",
        ),
    ] = ""
    model_name: ModelNameOption = POLICY
    frozen: Frozen = False
    weight: Annotated[float, typer.Option(min=1e-6, help="Relative load: weight 2 gets twice the jobs.")] = 1.0
    max_in_flight: Annotated[
        int, typer.Option(min=0, help="Jobs at once beyond which it counts as full; 0: what the engine says.")
    ] = 0
    context_tokens: Annotated[
        int, typer.Option(min=0, help="http: most tokens of prompt and answer together, if the server does not say.")
    ] = 0

    def backend(self) -> BackendSettings:
        """Return the engine, checked.

        Raises:
            ConfigError: an option is wrong, missing, or unknown to the kind.
        """
        backend = self.settings(
            self.engine,
            name=_model_name(self.model_name),
            urls=(self.url,) if self.url else (),
            gpus=_ids("--gpus", self.gpus),
            cores=_ids("--cores", self.cores),
            template_arguments=options.named_values("--template-argument", self.template_argument),
        )
        backend.check(flag_of)
        return backend


def _model_name(name: str) -> str:
    try:
        return msgspec.convert(name, ModelName)
    except msgspec.ValidationError:
        message = f"--model-name takes letters, digits and `._-`, at most 64 of them, not {name!r}"
        raise ConfigError(message, key="--model-name") from None


def flag_of(key: str) -> str:
    """Return the flag of a key of `[[backends]]`, or of another option of an engine's kind."""
    return FLAGS.get(key, f"--option {key}")


def _ids(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError(
            f"{flag} takes numbers with commas between them, such as 0,1; not {text!r}", key=flag
        ) from None
