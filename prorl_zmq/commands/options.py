"""Options that several commands share, and the functions that parse them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ..config import SandboxSettings, ServerApi, Topology
from ..errors import ConfigError
from ..system.logs import LogFormat, LogLevel
from ..system.run_places import checked_name
from ..wire.messages.chat import ToolCallFormatName
from ..wire.sockets import is_own_address, own_address

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="TOPOLOGY.toml", help="Topology file; `prorl init` writes one."),
]
RunDir = Annotated[
    Path | None,
    typer.Option(
        help="Private folder of sockets, logs and sandboxes. [default: per user, of a node per allocation, in /tmp]"
    ),
]
TlsCert = Annotated[str, typer.Option(metavar="FILE", help="The server's certificate and its chain, PEM.")]
TlsKey = Annotated[str, typer.Option(metavar="FILE", help="The certificate's private key, PEM.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow plaintext TCP beyond loopback.")]
Keys = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="For TCP: a folder of `prorl keys`, or one secret. [default: $PRORL_KEYS; none]"
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The service's name, for a run folder of its own. [default: the topology's; $PRORL_NAME; none]",
    ),
]
Connect = Annotated[
    str | None,
    typer.Option(
        "--connect",
        "--name",
        metavar="ENDPOINT|NAME",
        help="The service's front door, ipc://PATH or tcp://HOST:PORT, or its name here. [default: that of --config, "
        "$PRORL_NAME, or of the default run folder]",
    ),
]
Service = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        envvar="PRORL_SERVICE",
        help="The folder of a service on several nodes, which `prorl serve --service` makes: it says where the brokers "
        "and keys are. [default: $PRORL_SERVICE; none]",
        show_envvar=False,
    ),
]
ServiceDir = Annotated[
    Path | None,
    typer.Option("--service", metavar="DIR", help="The folder of a service on several nodes, on a shared file system."),
]
"""As `Service`, but never from the environment: for commands that behave differently without it."""
NodeOfProcess = Annotated[
    str,
    typer.Option(
        "--node",
        help="This node's name: jobs of an engine's node, and phases that share a sandbox, stay on one. [default: of "
        "the host and its allocation or run folder]",
    ),
]
Address = Annotated[
    str,
    typer.Option(
        metavar="IP",
        help="This machine's address, at which other nodes reach it. [default: the one that routes to others]",
    ),
]
Runs = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder with runs of `prorl eval`, which the dashboard compares."),
]


def sandbox_for(chosen: str | None, data: Path | None) -> str:
    """Return the kind of sandboxes: the chosen one, or that of a folder of Harbor tasks, whose agents change images."""
    return chosen or ("apptainer" if data is not None and data.is_dir() else SandboxSettings().kind)


AsJson = Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Keep the tables up to date until Ctrl-C.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show what the building or installing programs print.")]
Wait = Annotated[
    float,
    typer.Option(min=0, metavar="SECONDS", help="How long to wait for another process that builds or installs it."),
]

URL_LIMIT_S, ENGINE_LIMIT_S = 30.0, 900.0
StartLimit = Annotated[
    float | None,
    typer.Option(
        min=1,
        metavar="SECONDS",
        help="How long the engines may take to start. [default: 900; with --url 30]",
        show_default=False,
    ),
]
DRAIN_S = 30.0
DrainTime = Annotated[
    float,
    typer.Option(
        "--drain-s",
        min=0,
        max=86_400,
        metavar="SECONDS",
        help="How long jobs may take to finish once a node drains; 0: no time.",
    ),
]
LogDir = Annotated[Path | None, typer.Option(help="Folder for one log file per process. [default: stderr]")]
Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="HOST:PORT",
        help="Where to serve this machine's metrics to Prometheus. [default: the topology's; none]",
    ),
]

LogFormatOption = Annotated[
    LogFormat | None, typer.Option("--log-format", help="Text for people, or JSON. [default: the topology's; text]")
]
LogLevelOption = Annotated[
    LogLevel | None,
    typer.Option("--log-level", help="Least severe level that is logged. [default: the topology's; info]"),
]


def sandbox_kind(kind: str) -> str:
    """Check the value of `--sandbox` against the registered kinds; imports only a light part of `tools`."""
    from ..tools.containers.kinds import known_kinds

    if kind not in (known := known_kinds()):
        raise typer.BadParameter(f"{kind!r} is not one of {', '.join(map(repr, known))}.")
    return kind


Sandbox = Annotated[
    str | None,
    typer.Option(
        parser=sandbox_kind,
        metavar="KIND",
        help="What tools act in, such as bubblewrap or apptainer (`prorl doctor` lists all); `process` is not isolated "
        "at all. [default: the topology's; bubblewrap]",
    ),
]
Image = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Root filesystem of sandboxes whose task names none: a directory, or a SIF file for apptainer, which "
        "needs one. `prorl image build` makes both. [default: the topology's; none]",
    ),
]
ImageFolder = Annotated[
    list[Path] | None,
    typer.Option(metavar="FOLDER", help="Jobs may name images in it, and see all that is there; may be repeated."),
]
RowFormatName = Annotated[
    str, typer.Option("--row-format", metavar="NAME", help="The format of all rows. [default: by their columns]")
]
TaskModule = Annotated[
    list[Path] | None,
    typer.Option("--task-module", metavar="FILE.py", help="Python file with a task of your own; may be repeated."),
]
TaskName = Annotated[str, typer.Option("--task", metavar="NAME", help="Take row formats of this task only.")]
Images = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Where images are kept. [default: ~/.cache/prorl/images]")
]

Model = Annotated[
    str,
    typer.Option(
        help="embedded: an .npz file [default: the package's]; vllm, transformers: a directory or a hub name."
    ),
]
VllmFlags = Annotated[
    list[str] | None, typer.Argument(metavar="[-- VLLM FLAGS]", help="Such as -- --max-model-len 32768.")
]
Api = Annotated[ServerApi, typer.Option(help="http: what the server speaks; auto asks it.")]
Tokenizer = Annotated[
    str,
    typer.Option(metavar="DIR", help="Tokenizer and chat template, as stages see them. [default: the model's]"),
]
ToolCalls = Annotated[
    ToolCallFormatName, typer.Option(help="How the model writes tool calls. [default: as its template does]")
]
TemplateArguments = Annotated[
    list[str] | None,
    typer.Option(
        "--template-argument",
        metavar="NAME=JSON",
        help="An argument of the chat template, such as enable_thinking=false; may be repeated.",
    ),
]
EngineOptions = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=JSON", help="An option of the engine's kind that has no flag here."),
]


def _check_trackers(names: list[str] | None) -> list[str]:
    if not names:
        return []
    from ..trackers.tracker import check_tracker

    for name in names:
        check_tracker(name)
    return names


Log = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        metavar="TRACKER",
        callback=_check_trackers,
        help="Log figures and sample conversations to wandb, tensorboard, trackio or mlflow; may be repeated.",
    ),
]


def start_limit_s(given: float | None, *, url: bool) -> float:
    """Return the value of `--start-limit`; `url`: the engine is a running server."""
    return given or (URL_LIMIT_S if url else ENGINE_LIMIT_S)


def checked_address(address: str) -> str:
    """Return the address to bind to.

    Raises:
        ConfigError: it does not belong to this machine.
    """
    if address and not is_own_address(address):
        raise ConfigError(f"--address {address} is no IPv4 address of this machine; name one that is", key="address")
    return address or own_address()


def named(topology: Topology, name: str | None, run_dir: Path | None = None) -> Topology:
    """Apply `--name`.

    Raises:
        ConfigError: it is not a valid service name, or a run folder is named as well.
    """
    if name is None:
        return topology
    if run_dir is not None:
        raise ConfigError("--name makes a run folder of its own: leave out --run-dir, or --name", key="name")
    service = msgspec.structs.replace(topology.service, name=checked_name(name, "--name"))
    return msgspec.structs.replace(topology, service=service)


def named_texts(flag: str, options: list[str] | None, written: str = "NAME=VALUE") -> dict[str, str]:
    """Parse options of the form NAME=VALUE."""
    values = {}
    for option in options or []:
        name, equals, value = option.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"{flag} {option}: write {written}", key=flag.lstrip("-"))
        values[name] = value
    return values


_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}


def named_values(flag: str, options: list[str] | None) -> dict[str, Any]:
    """Parse options of the form NAME=JSON; a value that is not JSON is text."""
    example = "enable_thinking=false" if flag == "--template-argument" else "tools='[\"ipython\"]'"
    texts = named_texts(flag, options, f"NAME=JSON, such as {example}")
    values: dict[str, Any] = dict(texts)
    for name, text in texts.items():
        if text in _OF_PYTHON:  # as text it would be true
            words = f"write {_OF_PYTHON[text]}, as JSON does, or for the text '\"{text}\"'"
            raise ConfigError(f"{flag} {name}={text}: {words}", key=flag.lstrip("-"))
        with suppress(msgspec.MsgspecError):
            values[name] = msgspec.json.decode(text)
    return values
