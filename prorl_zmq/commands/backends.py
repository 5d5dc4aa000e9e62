"""`prorl backends`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ..client import RolloutClient
from ..messages import Backend
from .options import Config, Connect, console, front_door_of

if TYPE_CHECKING:
    from ..messages import BackendStatus

commands = typer.Typer(help="List and change the inference backends.", rich_markup_mode=None)

QUICK_S = 10.0
"""How long commands that only ask something wait for the service."""

BackendId = Annotated[str, typer.Argument(metavar="BACKEND", help="The backend's id, as `prorl backends list` shows.")]


@commands.command("list")
def list_(connect: Connect = None, config: Config = None) -> None:
    """List the backends: state, weight version, assignments in flight."""
    with RolloutClient(front_door_of(connect, config), timeout_s=QUICK_S) as client:
        console().print(backend_table(client.backends.list()))


@commands.command()
def add(
    backend_id: BackendId,
    endpoint: Annotated[str, typer.Argument(help="Where its engine host is bound, ipc://PATH or tcp://HOST:PORT.")],
    chat_format: Annotated[str, typer.Option(help="How conversations become tokens for it.")] = "embedded",
    weight_version: Annotated[int, typer.Option(min=0, help="The version of the weights that it serves.")] = 0,
    connect: Connect = None,
    config: Config = None,
) -> None:
    """Register an engine host that does not register itself, or make a draining one ready again."""
    from ..sockets import check_endpoint

    backend = Backend(
        backend_id=backend_id,
        endpoint=check_endpoint(endpoint),
        chat_format=chat_format,
        weight_version=weight_version,
    )
    with RolloutClient(front_door_of(connect, config), timeout_s=QUICK_S) as client:
        client.backends.add(backend)


@commands.command()
def drain(backend_id: BackendId, connect: Connect = None, config: Config = None) -> None:
    """Assign no more jobs to a backend; those that hold it keep it."""
    with RolloutClient(front_door_of(connect, config), timeout_s=QUICK_S) as client:
        client.backends.drain(backend_id)


@commands.command()
def remove(backend_id: BackendId, connect: Connect = None, config: Config = None) -> None:
    """Forget a backend and the assignments on it."""
    with RolloutClient(front_door_of(connect, config), timeout_s=QUICK_S) as client:
        client.backends.remove(backend_id)


@commands.command()
def clear(connect: Connect = None, config: Config = None) -> None:
    """Forget all backends."""
    with RolloutClient(front_door_of(connect, config), timeout_s=QUICK_S) as client:
        client.backends.clear()


@commands.command("set-version")
def set_version(
    weight_version: Annotated[int, typer.Argument(min=0, help="The version of the weights.")],
    connect: Connect = None,
    config: Config = None,
) -> None:
    """Note that all backends serve these weights from now on."""
    with RolloutClient(front_door_of(connect, config), timeout_s=QUICK_S) as client:
        client.set_weight_version(weight_version)


def backend_table(backends: tuple[BackendStatus, ...]) -> Table:
    """Lay out the backends for the terminal."""
    table = Table(title="backends", title_justify="left")
    table.add_column("backend", overflow="fold", no_wrap=False, min_width=12)
    table.add_column("state")
    for column in ("in flight", "assigned", "weights"):
        table.add_column(column, justify="right")
    table.add_column("endpoint", overflow="fold")
    for status in backends:
        backend = status.backend
        numbers = (str(status.in_flight), str(status.assigned), str(backend.weight_version))
        table.add_row(backend.backend_id, status.state, *numbers, backend.endpoint)
    if not backends:
        table.add_row("none", "", "", "", "", "start one with `prorl-engine`")
    return table
