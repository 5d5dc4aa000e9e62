"""`prorl-stage`."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from ..config import SandboxSettings, Topology, own_run_dir
from ..system.logs import say
from ..system.node_name import default_node
from ..system.run_places import default_run_dir
from ..system.traces import tracing
from ..wire.messages.jobs import Phase
from .options import (
    Image,
    ImageFolder,
    Insecure,
    Keys,
    LogFormatOption,
    LogLevelOption,
    RunDir,
    Sandbox,
    TaskModule,
    log_as,
)


def stage(
    role: Annotated[Phase, typer.Option(help="Which phase of a job the process works on.")],
    slots: Annotated[int, typer.Option(min=1, max=10_000, help="Jobs to work on at a time.")] = 8,
    connect: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT",
            help="The rollout broker's stage events, ipc://PATH or tcp://HOST:PORT. [default: in the run folder]",
        ),
    ] = None,
    node: Annotated[
        str,
        typer.Option(
            help="This node's name; phases that share a sandbox run on one node. [default: of the host and its "
            "allocation or run folder]"
        ),
    ] = "",
    bind: Annotated[
        str,
        typer.Option(metavar="ENDPOINT", help="Where the broker reaches this process. [default: ipc, or loopback TCP]"),
    ] = "",
    sandbox: Sandbox = None,
    image: Image = None,
    image_folder: ImageFolder = None,
    task: Annotated[
        list[str] | None, typer.Option(help="Serve only this task; may be repeated. [default: all installed]")
    ] = None,
    task_module: TaskModule = None,
    run_dir: RunDir = None,
    insecure: Insecure = False,
    keys: Keys = None,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """A stage process: takes phases of one role from the rollout broker until SIGTERM."""
    import uvloop

    from ..stages.own_tasks import all_handlers
    from ..stages.stage_process import StageOptions, StageProcess

    folder = own_run_dir(run_dir if run_dir is not None else default_run_dir())
    options = StageOptions(
        role=role,
        slots=slots,
        connect=connect if connect is not None else f"ipc://{folder}/{_STAGE_EVENTS}",
        node=node or default_node(folder),
        run_dir=folder,
        bind=bind,
        sandbox=sandbox or SandboxSettings().kind,
        image=image or "",
        image_folders=tuple(image_folder or ()),
        insecure=insecure,
        keys=keys,
    )
    left_out: list[str] = []
    process = StageProcess(options, all_handlers(task_module or (), task or (), left_out.append))
    log_as(process.stage_id, log_format, log_level)
    for warning in left_out:
        say(process.stage_id, warning, logging.WARNING)
    with tracing("stage", process.stage_id):
        uvloop.run(process.run())


_STAGE_EVENTS = Topology().rollout_broker.stage_events.rpartition("/")[2]
