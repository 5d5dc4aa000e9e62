"""`prorl serve` and `prorl broker`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ..config import own_run_dir
from ..messages import SandboxKind
from .options import Config, Insecure, RunDir, topology_of
from .startup_line import StartupLine

broker = typer.Typer(help="One broker alone, for a service that is spread over nodes.", rich_markup_mode=None)


def serve(
    config: Config = None,
    run_dir: RunDir = None,
    sandbox: Annotated[
        SandboxKind | None,
        typer.Option(help="What tools act in; `process` is no isolation at all. [default: the topology file's]"),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Root filesystem of sandboxes whose task names none; apptainer needs one, and `prorl image build` "
            "makes it. [default: the topology file's]",
        ),
    ] = None,
    insecure: Insecure = False,
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder for one log file per process. [default: standard error]")
    ] = None,
) -> None:
    """Start and supervise all processes of a service on this node, until SIGTERM or Ctrl-C."""
    from ..service.supervisor import Supervisor
    from ..tools.sandbox.sandboxes import Sandboxes

    topology = topology_of(config, run_dir, insecure=insecure)
    if sandbox is not None:
        topology = msgspec.structs.replace(topology, sandbox=msgspec.structs.replace(topology.sandbox, kind=sandbox))
    if image is not None:
        topology = msgspec.structs.replace(topology, sandbox=msgspec.structs.replace(topology.sandbox, image=image))
    Sandboxes(topology.sandbox.kind, topology.run_dir / "sandboxes", topology.service.node).check()
    if topology.sandbox.kind == "process":
        print("prorl serve: sandboxes are plain processes: what the model runs is not isolated", file=sys.stderr)
    door = topology.endpoint(topology.rollout_broker.front_door)

    with StartupLine() as line:

        def on_ready() -> None:
            line.close()
            print(f"prorl serve: ready at {door}", file=sys.stderr, flush=True)

        asyncio.run(Supervisor(topology, config, log_dir).run(line.show, on_ready))


@broker.command()
def rollout(config: Config = None, run_dir: RunDir = None, insecure: Insecure = False) -> None:
    """The front door, the job table and the stages' events."""
    from ..brokers.journal import MemoryJournal
    from ..brokers.rollout_broker import RolloutBroker

    topology = topology_of(config, run_dir, insecure=insecure)
    own_run_dir(topology.run_dir)
    RolloutBroker(topology, MemoryJournal()).run()


@broker.command()
def backend(config: Config = None, run_dir: RunDir = None, insecure: Insecure = False) -> None:
    """Which inference backend each job talks to."""
    from ..brokers.backend_broker import BackendBroker

    topology = topology_of(config, run_dir, insecure=insecure)
    own_run_dir(topology.run_dir)
    BackendBroker(topology).run()
