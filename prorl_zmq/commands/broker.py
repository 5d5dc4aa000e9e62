"""`prorl broker`."""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ..config import SERVICE_VARIABLE, Topology, own_run_dir
from ..errors import EndpointInUse
from ..service.broker_topologies import backend_topologies, rollout_topologies
from ..service.service_folder import BACKENDS, WAIT_S, ServiceFolder
from ..system.logs import say, start_logging
from ..system.node_name import place_of
from ..wire.messages.base import new_id
from . import options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..brokers.journal.journal import Journal

Broker = TypeVar("Broker")

commands = typer.Typer(help="One broker alone, for a service on several nodes.", rich_markup_mode=None)


@commands.command()
@options.taking(options.topology_of)
def rollout(
    topology: Topology,
    service: options.ServiceDir = None,
    name: Annotated[str, typer.Option(help="--service: which of the service's rollout brokers.")] = "rollout-0",
    address: options.Address = "",
) -> None:
    """The front door, the job table and the stages' events."""
    from ..brokers.journal.journal import Journal
    from ..brokers.rollout.rollout_broker import RolloutBroker

    start_logging("rollout-broker", topology.service.log_format, topology.service.log_level)
    own_run_dir(topology.run_dir)
    folder = ServiceFolder.open(service) if service is not None else None
    topologies = [topology] if folder is None else list(rollout_topologies(folder, topology, name, address))

    def serve(journal: Journal) -> None:
        gc.disable()  # it would go through a hundred thousand jobs many times while they are read
        broker = _first_free(lambda tried: RolloutBroker(tried, journal), topologies)
        gc.freeze()
        gc.enable()
        if folder is not None:
            endpoints = {"front_door": broker.front_door, "stage_events": broker.stage_events}
            folder.announce("rollout", name, endpoints)
        broker.run()

    settings = topologies[0].rollout_broker
    with Journal(topologies[0].journal, settings.journal_limit_bytes, sync=settings.journal_sync) as journal:
        serve(journal)


@commands.command()
@options.taking(options.topology_of)
def backend(topology: Topology, service: options.ServiceDir = None, address: options.Address = "") -> None:
    """Which inference backend each job talks to."""
    from ..brokers.backends.backend_broker import BackendBroker
    from ..brokers.backends.backend_journal import BackendJournal

    start_logging("backend-broker", topology.service.log_format, topology.service.log_level)
    own_run_dir(topology.run_dir)
    folder = ServiceFolder.open(service) if service is not None else None
    path = topology.run_dir / "backends.journal" if folder is None else folder.journal(BACKENDS)
    topologies = [topology] if folder is None else list(backend_topologies(folder, topology, address))
    with BackendJournal(path) as journal:
        broker = _first_free(lambda tried: BackendBroker(tried, journal), topologies)
        if folder is not None:
            folder.announce("backend", BACKENDS, {"endpoint": broker.endpoint})
        broker.run()


@commands.command()
@options.taking(options.topology_of)
def node(
    topology: Topology,
    service: Annotated[Path, typer.Option(metavar="DIR", help="The service's folder.")],
    name: Annotated[str, typer.Option("--node", help="The node's name.")],
    address: options.Address = "",
) -> None:
    """The broker of one node, between its stage processes and the service's rollout brokers."""
    from ..brokers.node.node_broker import NodeBroker
    from ..service.broker_places import node_id
    from ..service.child_plans import node_stage_events
    from ..tools.node_facts import NodeFactsReader

    start_logging("node-broker", topology.service.log_format, topology.service.log_level)
    folder = ServiceFolder.open(service)
    folder.wait_for(folder.rollout_brokers, WAIT_S)
    run_dir = own_run_dir(topology.run_dir)
    NodeBroker(
        node=name,
        place=place_of(run_dir),
        node_id=node_id(name, os.environ.get(SERVICE_VARIABLE, new_id())),
        stage_events=node_stage_events(topology),
        bind=f"tcp://{options.checked_address(address)}:*",
        run_dir=run_dir,
        places=folder.stage_events,
        facts=NodeFactsReader(run_dir, topology.sandbox.image, topology.sandbox.image_folders).read,
        keys=folder.keys("node"),
    ).run()


def _first_free(make: Callable[[Topology], Broker], topologies: Sequence[Topology]) -> Broker:
    """Make a broker at the first place that is free."""
    for topology in topologies[:-1]:
        try:
            return make(topology)
        except EndpointInUse as error:
            say("prorl broker", f"{error.message}; taking another port", logging.WARNING)
    return make(topologies[-1])
