"""`prorl-stage`."""

from __future__ import annotations

from typing import Annotated

import typer
from msgspec.structs import replace

from ..service.process_plans import StagePlan, pinned
from ..wire.messages.jobs import Phase
from . import options
from .children import run
from .option_groups import ProcessOptions, SandboxOptions


def stage(
    role: Annotated[Phase, typer.Option(help="Which phase of a job the process works on.")],
    sandboxes: SandboxOptions,
    process: ProcessOptions,
    slots: Annotated[int, typer.Option(min=1, max=10_000, help="Jobs to work on at a time.")] = 8,
    connect: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT",
            help="The rollout broker's stage events, ipc://PATH or tcp://HOST:PORT. [default: in the run folder]",
        ),
    ] = None,
    node: options.NodeOfProcess = "",
    bind: Annotated[
        str,
        typer.Option(metavar="ENDPOINT", help="Where the broker reaches this process. [default: ipc, or loopback TCP]"),
    ] = "",
    image_folder: options.ImageFolder = None,
    task: Annotated[
        list[str] | None, typer.Option(help="Serve only this task; may be repeated. [default: all installed]")
    ] = None,
    task_module: options.TaskModule = None,
) -> None:
    """Run a stage process, which runs phases of one role for the rollout broker, until SIGTERM."""
    topology = sandboxes.applied(process.topology())
    modules, folders = tuple(map(str, task_module or ())), tuple(map(str, image_folder or ()))
    topology = pinned(
        replace(
            topology,
            service=replace(topology.service, node=node, task_modules=modules),
            sandbox=replace(topology.sandbox, image_folders=folders),
        )
    )
    run(
        StagePlan(
            name=role,
            topology=topology,
            role=role,
            slots=slots,
            connect=connect if connect is not None else topology.endpoint(topology.rollout_broker.stage_events),
            bind=bind,
            tasks=tuple(task or ()),
        )
    )
