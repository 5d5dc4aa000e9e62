"""Options that several commands share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from ..client.asynchronous.client import AsyncRolloutClient
from ..client.blocking.client import RolloutClient
from ..config import SecuritySettings, ServiceSettings, Topology, default_front_door, load_topology
from ..errors import ConfigError
from ..system.logs import LogFormat, LogLevel, start_logging

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="TOPOLOGY.toml", help="Topology file; `prorl init` writes one."),
]
RunDir = Annotated[
    Path | None,
    typer.Option(help="Private folder of the service's sockets, logs and sandboxes. [default: per user, in /tmp]"),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow plaintext TCP beyond loopback.")]
Keys = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Keys for connections over TCP: a folder of `prorl keys`, or one secret file in it. "
        "[default: $PRORL_KEYS, or none]",
    ),
]
Connect = Annotated[
    str | None,
    typer.Option(
        metavar="ENDPOINT",
        help="The service's front door, ipc://PATH or tcp://HOST:PORT. [default: that of --config, or of the default "
        "run folder]",
    ),
]

LogFormatOption = Annotated[
    LogFormat | None,
    typer.Option("--log-format", help="Log lines for people, or one JSON object each. [default: the topology's; text]"),
]
LogLevelOption = Annotated[
    LogLevel | None,
    typer.Option("--log-level", help="The least that is logged. [default: the topology's; info]"),
]


def sandbox_kind(kind: str) -> str:
    """Check the value of `--sandbox` against the registered kinds; the part of `tools` that it needs is light."""
    from ..tools.sandbox.kinds import known_kinds

    if kind not in (known := known_kinds()):
        raise typer.BadParameter(f"{kind!r} is not one of {', '.join(map(repr, known))}.")
    return kind


def console(*, stderr: bool = False) -> Console:
    """Return the console that commands print to; into a pipe or a file it cuts and breaks nothing."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 200)


def topology_of(
    config: Path | None, run_dir: Path | None, *, insecure: bool = False, keys: Path | None = None
) -> Topology:
    """Read a topology file (None: the defaults) and apply the flags that override it."""
    topology = load_topology(config)
    service = topology.service
    if run_dir is not None:
        service = msgspec.structs.replace(service, run_dir=str(run_dir))
    if insecure:
        service = msgspec.structs.replace(service, insecure=True)
    if keys is not None:
        topology = msgspec.structs.replace(topology, security=SecuritySettings(str(keys)))
    return msgspec.structs.replace(topology, service=service)


def log_as(
    process: str,
    log_format: LogFormat | None,
    log_level: LogLevel | None,
    settings: ServiceSettings = ServiceSettings(),  # noqa: B008 - frozen
) -> ServiceSettings:
    """Have this process log as its flags or else its settings say; return the settings with these flags in them."""
    settings = msgspec.structs.replace(
        settings, log_format=log_format or settings.log_format, log_level=log_level or settings.log_level
    )
    start_logging(process, settings.log_format, settings.log_level)
    return settings


def client_of(
    connect: str | None, config: Path | None, keys: Path | None = None, *, timeout_s: float = 30.0
) -> RolloutClient:
    """Return the client that a command talks through; the keys are the topology file's if none are named."""
    return RolloutClient(front_door_of(connect, config), keys=_keys_of(config, keys), timeout_s=timeout_s)


def async_client_of(
    connect: str | None, config: Path | None, keys: Path | None = None, *, session: str | None = None
) -> AsyncRolloutClient:
    """Return the client of a command that does several things at a time; see `client_of`."""
    return AsyncRolloutClient(front_door_of(connect, config), session=session, keys=_keys_of(config, keys))


def _keys_of(config: Path | None, keys: Path | None) -> Path | None:
    if keys is None and config is not None:
        named = load_topology(config).security.keys
        return Path(named) if named else None
    return keys


def front_door_of(connect: str | None, config: Path | None) -> str:
    """Return the front door that a command talks to."""
    if connect is not None:
        return connect
    if config is None:
        return default_front_door()
    topology = load_topology(config)
    return topology.endpoint(topology.rollout_broker.front_door)


def named_values(flag: str, options: list[str]) -> dict[str, Any]:
    """Read `NAME=JSON` options; what is no JSON is text."""
    values = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"{flag} {option}: it is NAME=JSON, such as tools='[\"ipython\"]'", key=flag.lstrip("-"))
        try:
            values[name] = msgspec.json.decode(value)
        except msgspec.MsgspecError:
            values[name] = value
    return values
