"""`prorl broker`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from ..service.process_plans import BrokerPlan, pinned
from . import options
from .children import run
from .option_groups import ProcessOptions

commands = typer.Typer(help="Run one broker alone, for a service on several nodes.", rich_markup_mode=None)


@commands.command()
def rollout(
    process: ProcessOptions,
    config: options.Config = None,
    service: options.ServiceDir = None,
    name: Annotated[str, typer.Option(help="--service: which of the service's rollout brokers.")] = "rollout-0",
    address: options.Address = "",
) -> None:
    """Run a rollout broker: the front door, the job table and the stages' events."""
    topology, folder = process.topology(config), str(service or "")
    run(BrokerPlan(kind="rollout", name=name, topology=topology, service=folder, address=address))


@commands.command()
def backend(
    process: ProcessOptions,
    config: options.Config = None,
    service: options.ServiceDir = None,
    address: options.Address = "",
) -> None:
    """Run the backend broker, which assigns a backend to each job."""
    topology, folder = process.topology(config), str(service or "")
    run(BrokerPlan(kind="backend", name="backend-broker", topology=topology, service=folder, address=address))


@commands.command()
def node(
    process: ProcessOptions,
    service: Annotated[Path, typer.Option(metavar="DIR", help="The service's folder.")],
    name: Annotated[str, typer.Option("--node", help="The node's name.")],
    config: options.Config = None,
    address: options.Address = "",
) -> None:
    """Run a node's broker, between its stage processes and the service's rollout brokers."""
    topology = process.topology(config)
    topology = replace(topology, service=replace(topology.service, node=name))
    place = options.checked_address(address)
    run(BrokerPlan(kind="node", name="node-broker", topology=pinned(topology), service=str(service), address=place))
