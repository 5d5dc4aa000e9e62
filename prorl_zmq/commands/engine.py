"""`prorl-engine`."""

from __future__ import annotations

from typing import Annotated

import typer
from msgspec.structs import replace

from ..service.process_plans import EnginePlan, pinned
from ..wire.messages.base import new_id
from . import options
from .children import run
from .option_groups import EngineOptions, ProcessOptions


def engine(
    engine: EngineOptions,
    process: ProcessOptions,
    connect: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT",
            help="The backend broker, ipc://PATH or tcp://HOST:PORT. [default: in the run folder]",
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="The backend's id. [default: a new one]")] = "",
    node: options.NodeOfProcess = "",
    weight_version: Annotated[int, typer.Option(min=0, help="The version of the weights that it starts with.")] = 0,
    bind: Annotated[
        str,
        typer.Option(
            metavar="ENDPOINT",
            help="Where stage processes reach this host, such as tcp://10.0.0.5:*. [default: ipc, or loopback TCP]",
        ),
    ] = "",
    service: options.Service = None,
) -> None:
    """Run an engine host, which generates token ids for the stage processes, until SIGTERM.

    prorl-engine --engine vllm --model Qwen/Qwen3-8B --gpus 0,1 -- --tensor-parallel-size 2

    prorl-engine --engine http --url http://gpu-7:8000
    """
    backend = engine.backend()
    topology = process.topology()
    topology = pinned(replace(topology, service=replace(topology.service, node=node)))
    run(
        EnginePlan(
            name=name or f"engine-{new_id()[:12]}",
            topology=topology,
            service=str(service) if service is not None and connect is None else "",
            backend=backend,
            connect=connect if connect is not None else topology.endpoint(topology.backend_broker.endpoint),
            bind=bind,
            weight_version=weight_version,
        )
    )
