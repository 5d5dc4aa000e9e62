"""`prorl node`."""

from __future__ import annotations

import logging
import socket
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec.structs import replace

from ..config import StageSettings, Topology
from ..errors import ConfigError
from ..service.preloading import begun_fork_server
from ..service.service_folder import NODES, ServiceFolder
from ..system.logs import say, start_logging
from ..system.node_name import allocation, short_id
from ..wire.messages.base import Identifier
from ..wire.messages.jobs import Phase
from . import options
from .option_groups import LogOptions
from .service import check_sandboxes, drain_of, node_topology, supervise, with_metrics

NodeName = Annotated[Identifier, msgspec.Meta(max_length=100)]
"""The prefix of its stage processes' names."""


def node(
    process: LogOptions,
    service: Annotated[
        Path, typer.Option(metavar="DIR", envvar="PRORL_SERVICE", help="The folder that `prorl serve --service` made.")
    ],
    name: Annotated[
        str, typer.Option(help="The node's name. [default: of the host and its allocation or run folder]")
    ] = "",
    slots: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE=N", help="Stage processes of a role here: one with N slots, or none; may be repeated."
        ),
    ] = None,
    engines: Annotated[bool, typer.Option(help="Start the engines of the topology file here.")] = True,
    drain_s: options.DrainTime = options.DRAIN_S,
    address: options.Address = "",
    metrics: options.Metrics = None,
    log_dir: options.LogDir = None,
) -> None:
    """Start and supervise the stage processes and engines of one node of a service.

    The service's topology.toml says what it starts. SIGTERM, SIGUSR1, Ctrl-C and `prorl drain` drain it: it accepts no
    new jobs, finishes what it can within --drain-s, returns the rest without spending an attempt, and exits with code
    0; a second signal ends it at once. It finds brokers that were restarted elsewhere. Exit codes: as of `prorl serve`.
    """
    from ..service.broker_places import announced_places
    from ..service.child_plans import plan_node
    from ..service.supervisor import Supervisor

    folder = ServiceFolder.open(service)
    if other := folder.check_version():
        words = f"the brokers have prorl-zmq {other}, and this node has {version('prorl-zmq')}"
        say("prorl node", f"{words}: install the same version on all machines", logging.WARNING)
    own = name or (f"{socket.gethostname()}-{allocation()}" if allocation() else short_id(str(folder.path)))
    topology = with_metrics(node_topology(folder, process, own), metrics)
    topology = replace(
        topology,
        service=replace(topology.service, node=_checked_name(name)),
        stage=_stages(topology, options.named_texts("--slots", slots, "ROLE=N")),
        backends=topology.backends if engines else (),
    )
    start_logging("node", topology.service.log_format, topology.service.log_level)
    if not topology.stage and not topology.backends:
        raise ConfigError("there is nothing to do here: no stage processes and no engines", key="slots")
    if topology.stage:
        check_sandboxes(topology, "prorl node")
    plans = plan_node(topology, folder, options.checked_address(address))
    places = announced_places(folder, topology.node, of_ours=False)
    with begun_fork_server() as server:
        drain = drain_of(topology, folder.path / NODES, drain_s, ends=True)
        supervisor = Supervisor(topology, plans, places, server, log_dir, drain=drain)
        supervise(supervisor, "prorl node", f"ready: {topology.node}")


def _stages(topology: Topology, slots: dict[str, str]) -> tuple[StageSettings, ...]:
    """Return the stage processes of a topology; `slots` replaces those of the roles that it names."""
    changed = []
    for role, text in slots.items():
        if role not in set(Phase) or not text.isdecimal() or int(text) > 10_000:
            raise ConfigError(
                f"--slots {role}={text}: write ROLE=N, with init, run, eval or score, and up to 10000", key="slots"
            )
        if int(text):
            changed.append(StageSettings(Phase(role), slots=int(text)))
    return (*(stage for stage in topology.stage if stage.role not in slots), *changed)


def _checked_name(name: str) -> str:
    try:
        return msgspec.convert(name or "node", NodeName) and name
    except msgspec.ValidationError:
        raise ConfigError(
            f"--name {name!r} cannot be a node's: letters, digits and . _ : - only, 100 at most", key="name"
        ) from None
