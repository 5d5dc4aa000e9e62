"""Options that several commands share, and what they make of them."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ..client.blocking.client import RolloutClient
from ..config import SecuritySettings, ServerApi, ServiceSettings, Topology, load_topology
from ..errors import ConfigError, RequestTimeout
from ..security.keyring import CLIENT, Keyring
from ..service.rollout_brokers import EachBroker, RolloutBrokers, clients_of, sessions_of
from ..system.held_file import holder
from ..system.logs import LogFormat, LogLevel, start_logging
from ..system.run_places import checked_name, is_name
from ..wire.messages.backends import ToolCallFormatName
from ..wire.sockets import check_endpoint, is_listening, is_own_address, own_address

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column

    from ..client.asynchronous.client import AsyncRolloutClient

QUICK_S = 10.0
"""How long commands that only ask something wait for the service."""
AWAY_S = 3.0
"""How long they wait for a process to listen over TCP: a broker elsewhere may be restarted."""
LOOK_S = 0.1

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="TOPOLOGY.toml", help="Topology file; `prorl init` writes one."),
]
RunDir = Annotated[
    Path | None, typer.Option(help="Private folder of sockets, logs and sandboxes. [default: per user, in /tmp]")
]
TlsCert = Annotated[str, typer.Option(metavar="FILE", help="Certificate and its chain, PEM.")]
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
        help="The service's name, so that it has a run folder of its own. [default: the topology's; $PRORL_NAME; none]",
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
"""As `Service`, but never from the environment: for commands that do something else without it."""
Address = Annotated[
    str,
    typer.Option(
        metavar="IP",
        help="This machine's address, at which other nodes reach it. [default: the one that routes to others]",
    ),
]
Runs = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="The folder with those of `prorl eval` that the dashboard compares."),
]

DRAIN_S = 30.0
DrainTime = Annotated[
    float,
    typer.Option(
        "--drain-s",
        min=0,
        max=86_400,
        metavar="SECONDS",
        help="How long jobs have to end, once a node is to drain; 0: not at all.",
    ),
]
Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="HOST:PORT",
        help="Where Prometheus finds this machine's metrics. [default: the topology's; none]",
    ),
]

LogFormatOption = Annotated[
    LogFormat | None, typer.Option("--log-format", help="Text for people, or JSON. [default: the topology's; text]")
]
LogLevelOption = Annotated[
    LogLevel | None, typer.Option("--log-level", help="The least that is logged. [default: the topology's; info]")
]


def sandbox_kind(kind: str) -> str:
    """Check the value of `--sandbox` against the registered kinds; the part of `tools` that it needs is light."""
    from ..tools.containers.kinds import known_kinds

    if kind not in (known := known_kinds()):
        raise typer.BadParameter(f"{kind!r} is not one of {', '.join(map(repr, known))}.")
    return kind


Sandbox = Annotated[
    str | None,
    typer.Option(
        parser=sandbox_kind,
        metavar="KIND",
        help="What tools act in, such as bubblewrap or apptainer (`prorl doctor` lists all); `process` is no isolation "
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
        help="For the chat template, such as enable_thinking=false; may be repeated.",
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


def console(*, stderr: bool = False) -> Console:
    """Return the console that commands print to; into a pipe or a file it cuts, breaks and colours nothing."""
    from rich.console import Console

    seen = (sys.stderr if stderr else sys.stdout).isatty()
    forced = None if seen else False  # variables such as FORCE_COLOR would put escape codes into logs
    return Console(
        stderr=stderr,
        width=None if seen else 200,
        force_terminal=forced,
        highlight=seen,
        markup=False,
        emoji=False,
    )


def columns(*names: str, **how: Any) -> Iterator[Column]:
    """Return columns of a table that look the same, such as `justify="right"` for numbers."""
    from rich.table import Column

    return (Column(name, **how) for name in names)


def checked_address(address: str) -> str:
    """Return the address to bind to.

    Raises:
        ConfigError: it is not this machine's.
    """
    if address and not is_own_address(address):
        raise ConfigError(f"--address {address} is no IPv4 address of this machine; name one that is", key="address")
    return address or own_address()


def topology_of(
    config: Config = None,
    run_dir: RunDir = None,
    insecure: Insecure = False,
    keys: Keys = None,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
) -> Topology:
    """Read a topology file (None: the defaults) and apply the flags that override it."""
    topology = load_topology(config)
    given = {
        "run_dir": str(run_dir) if run_dir is not None else None,
        "name": "" if run_dir is not None else None,
        "insecure": insecure or None,
        "log_format": log_format,
        "log_level": log_level,
    }
    named = {name: value for name, value in given.items() if value is not None}
    security = SecuritySettings(str(keys)) if keys is not None else topology.security
    service = msgspec.structs.replace(topology.service, **named)
    return msgspec.structs.replace(topology, service=service, security=security)


def named(topology: Topology, name: str | None, run_dir: Path | None = None) -> Topology:
    """Apply `--name`.

    Raises:
        ConfigError: it cannot be a service's name, or a run folder is named as well.
    """
    if name is None:
        return topology
    if run_dir is not None:
        raise ConfigError("--name makes a run folder of its own: leave out --run-dir, or --name", key="name")
    service = msgspec.structs.replace(topology.service, name=checked_name(name, "--name"))
    return msgspec.structs.replace(topology, service=service)


def log_as(process: str, log_format: LogFormat | None, log_level: LogLevel | None) -> None:
    """Have a process without a topology file log as its flags say."""
    defaults = ServiceSettings()
    start_logging(process, log_format or defaults.log_format, log_level or defaults.log_level)


def client_of(
    connect: str | None,
    config: Path | None,
    keys: Path | None = None,
    service: Path | None = None,
    *,
    timeout_s: float = 30.0,
) -> RolloutClient:
    """Return the client that a command talks through; the keys are the topology file's if none are named."""
    if service is not None and connect is None:
        return RolloutClient(service=service, keys=keys, timeout_s=timeout_s)
    return RolloutClient(front_door_of(connect, config), keys=_keys_of(config, keys), timeout_s=timeout_s)


def check_running(connect: str | None, config: Path | None, keys: Path | None, service: Path | None) -> None:
    """Raise `RequestTimeout` if no service runs, before a command waits `QUICK_S` for its reply.

    A service runs if one of its rollout brokers listens, or a `prorl serve` that would start or restart them lives.
    Keys that cannot be used are reported first.
    """
    if service is not None and connect is None:
        from ..service.service_folder import LOCK, ServiceFolder

        folder = ServiceFolder.open(service)
        lock, places, start = folder.path / LOCK, folder.broker_endpoints(), f"prorl serve --service {service}"
        doors = [ends["front_door"] for ends in places.values() if "front_door" in ends]
        where, patience_s = f"at the places named in {service}", AWAY_S if doors else 0.0
    else:
        from ..service.run_dir import LOCK

        door = check_endpoint(front_door_of(connect, config))
        transport, _, address = door.partition("://")
        lock, doors, where, start = Path(address).parent / LOCK, [door], f"at {door}", "prorl serve"
        if connect is not None and is_name(connect):
            where, start = f"as {connect} ({door})", f"prorl serve --name {connect}"
        patience_s = AWAY_S if transport == "tcp" else 0.0
    until = time.monotonic() + patience_s
    while not any(map(is_listening, doors)) and not holder(lock):
        if time.monotonic() >= until:
            Keyring.load(_keys_of(config, keys), CLIENT)
            message = f"no process listens {where}; is the service running? (`{start}`)"
            raise RequestTimeout(message, timeout_s=patience_s)
        time.sleep(LOOK_S)


def quick_client(
    connect: Connect = None, config: Config = None, keys: Keys = None, service: Service = None
) -> RolloutClient:
    """Return the client of a command that only asks something."""
    check_running(connect, config, keys, service)
    return client_of(connect, config, keys, service, timeout_s=QUICK_S)


def all_brokers(
    connect: Connect = None, config: Config = None, keys: Keys = None, service: Service = None
) -> RolloutBrokers:
    """Return the rollout brokers of a command that asks all of them something."""
    return RolloutBrokers(broker_clients(connect, config, keys, service))


def each_broker(
    connect: Connect = None, config: Config = None, keys: Keys = None, service: Service = None
) -> EachBroker:
    """Return the rollout brokers of a command that asks them without an event loop."""
    check_running(connect, config, keys, service)
    if service is not None and connect is None:
        named = sessions_of(service).items()
        return EachBroker(
            {
                name: RolloutClient(service=service, session=session, keys=keys, timeout_s=QUICK_S)
                for name, session in named
            }
        )
    return EachBroker({front_door_of(connect, config): client_of(connect, config, keys, timeout_s=QUICK_S)})


def broker_clients(
    connect: str | None, config: Path | None, keys: Path | None = None, service: Path | None = None
) -> dict[str, AsyncRolloutClient]:
    """Return a client of each rollout broker that a command asks, by the broker's name."""
    check_running(connect, config, keys, service)
    if service is not None and connect is None:
        return clients_of(service, QUICK_S, keys)
    from ..client.asynchronous.client import AsyncRolloutClient

    door = front_door_of(connect, config)
    return {door: AsyncRolloutClient(door, keys=_keys_of(config, keys), timeout_s=QUICK_S)}


def taking(make: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for commands whose first argument is what `make` makes of its own options, and is closed."""
    taken = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(make, eval_str=True).parameters.values()
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = list(signature.parameters.values())[1:]

        @wraps(command)
        def run(**given: Any) -> None:
            made = make(**{parameter.name: given.pop(parameter.name) for parameter in taken})
            with made if isinstance(made, AbstractContextManager) else nullcontext(made):
                command(made, **given)

        run.__signature__ = signature.replace(parameters=[*own, *taken])  # type: ignore[attr-defined]
        return run

    return decorate


def async_client_of(
    connect: str | None,
    config: Path | None,
    keys: Path | None = None,
    service: Path | None = None,
    *,
    session: str | None = None,
) -> AsyncRolloutClient:
    """Return the client of a command that does several things at a time; see `client_of`."""
    from ..client.asynchronous.client import AsyncRolloutClient

    if service is not None and connect is None:
        return AsyncRolloutClient(service=service, session=session, keys=keys)
    return AsyncRolloutClient(front_door_of(connect, config), session=session, keys=_keys_of(config, keys))


def _keys_of(config: Path | None, keys: Path | None) -> Path | None:
    if keys is None and config is not None:
        named = load_topology(config).security.keys
        return Path(named) if named else None
    return keys


def front_door_of(connect: str | None, config: Path | None, service: Path | None = None) -> str:
    """Return the front door that a command talks to, or the service's folder, where that is."""
    if connect is not None and not is_name(connect):
        return connect
    if service is not None and connect is None:
        return str(service.absolute())
    topology = topology_at(connect, config)
    return topology.endpoint(topology.rollout_broker.front_door)


def run_dir_of(connect: str | None, config: Path | None) -> Path:
    """Return the run folder of the service at a place, if it is on this machine."""
    if connect is not None and connect.startswith("ipc://"):
        return Path(connect.removeprefix("ipc://")).parent
    return topology_at(connect, config).run_dir


def topology_at(connect: str | None, config: Path | None) -> Topology:
    """Return the topology of the service at a place, which may be named."""
    return named(load_topology(config), connect if connect is not None and is_name(connect) else None)


def named_texts(flag: str, options: list[str] | None, written: str = "NAME=VALUE") -> dict[str, str]:
    """Read options of the form NAME=VALUE."""
    values = {}
    for option in options or []:
        name, equals, value = option.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"{flag} {option}: write {written}", key=flag.lstrip("-"))
        values[name] = value
    return values


_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}


def named_values(flag: str, options: list[str] | None) -> dict[str, Any]:
    """Read options of the form NAME=JSON; what is no JSON is text."""
    example = "enable_thinking=false" if flag == "--template-argument" else "tools='[\"ipython\"]'"
    texts = named_texts(flag, options, f"NAME=JSON, such as {example}")
    values: dict[str, Any] = dict(texts)
    for name, text in texts.items():
        if text in _OF_PYTHON:  # as a text it would count as true
            words = f"write {_OF_PYTHON[text]}, as JSON does, or for the text '\"{text}\"'"
            raise ConfigError(f"{flag} {name}={text}: {words}", key=flag.lstrip("-"))
        with suppress(msgspec.MsgspecError):
            values[name] = msgspec.json.decode(text)
    return values
