"""`prorl-engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..config import Topology, default_run_dir, own_run_dir
from ..messages import new_id
from ..sockets import endpoint_beside
from .options import Insecure, RunDir


def engine(
    engine: Annotated[Literal["embedded"], typer.Option("--engine", help="Which engine to host.")] = "embedded",
    model: Annotated[
        Path | None,
        typer.Option(help="Its weights: for `embedded` an .npz file. [default: the base policy of the package]"),
    ] = None,
    connect: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT",
            help="The backend broker, ipc://PATH or tcp://HOST:PORT. [default: in the run folder]",
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="The backend's id. [default: a new one]", show_default=False)] = "",
    bind: Annotated[
        str,
        typer.Option(
            metavar="ENDPOINT",
            help="Where stage processes reach this host, such as tcp://10.0.0.5:*. [default: ipc, or loopback TCP]",
        ),
    ] = "",
    run_dir: RunDir = None,
    insecure: Insecure = False,
) -> None:
    """An engine host: answers token ids with token ids until SIGTERM."""
    from ..inference.host import run_engine_host

    del engine  # there is one kind yet
    folder = own_run_dir(run_dir if run_dir is not None else default_run_dir())
    backend_id = name or f"engine-{new_id()[:12]}"
    broker = connect if connect is not None else f"ipc://{folder}/{_BACKEND_BROKER}"
    where = bind or endpoint_beside(broker, f"{folder}/{backend_id}")
    run_engine_host(endpoint=where, backend_broker=broker, backend_id=backend_id, model=model, insecure=insecure)


_BACKEND_BROKER = Topology().backend_broker.endpoint.rpartition("/")[2]
