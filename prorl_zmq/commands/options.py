"""Options that several commands share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from ..client import default_front_door
from ..config import Topology, load_topology

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="TOPOLOGY.toml", help="Topology file; `prorl init` writes one."),
]
RunDir = Annotated[
    Path | None,
    typer.Option(help="Private folder of the service's sockets, logs and sandboxes. [default: per user, in /tmp]"),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow plaintext TCP beyond loopback.")]
Connect = Annotated[
    str | None,
    typer.Option(
        metavar="ENDPOINT",
        help="The service's front door, ipc://PATH or tcp://HOST:PORT. [default: that of --config, or of the default "
        "run folder]",
    ),
]


def console(*, stderr: bool = False) -> Console:
    """Give the console that commands print to; into a pipe or a file it cuts and breaks nothing."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 200)


def topology_of(config: Path | None, run_dir: Path | None, *, insecure: bool = False) -> Topology:
    """Read a topology file (None: the defaults) and apply the flags that override it.

    Raises:
        ConfigError: the file is wrong.
    """
    topology = load_topology(config)
    service = topology.service
    if run_dir is not None:
        service = msgspec.structs.replace(service, run_dir=str(run_dir))
    if insecure:
        service = msgspec.structs.replace(service, insecure=True)
    return msgspec.structs.replace(topology, service=service)


def front_door_of(connect: str | None, config: Path | None) -> str:
    """Give the front door that a command talks to.

    Raises:
        ConfigError: the topology file is wrong.
    """
    if connect is not None:
        return connect
    if config is None:
        return default_front_door()
    topology = load_topology(config)
    return topology.endpoint(topology.rollout_broker.front_door)
