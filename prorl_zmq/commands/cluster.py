"""`prorl up`, `nodes`, `scale`, `drain` and `down`: a service on the hosts of a Slurm cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.table import Column, Table

from ..client.blocking.client import RolloutClient
from ..errors import ProrlError
from ..system.duration import duration
from ..system.logs import say, start_logging
from ..wire.messages.jobs import Phase
from . import options
from .backends import show

if TYPE_CHECKING:
    from ..cluster.cluster_service import ClusterService
    from ..cluster.node_table import NodeRow

Service = Annotated[
    Path,
    typer.Option(
        envvar="PRORL_SERVICE",
        metavar="DIR",
        help="The service's folder, on a file system that all hosts share. [default: $PRORL_SERVICE]",
        show_default=False,
    ),
]
TakeOver = Annotated[
    bool, typer.Option("--take-over", help="Start brokers though others are recorded: their host is dead.")
]


def up(
    slurm: Annotated[Path, typer.Option("--slurm", metavar="CLUSTER.toml", help="What to ask Slurm for.")],
    service: Service,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the scripts for sbatch, and do nothing.")] = False,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="How long to wait for the first node; the service goes on.")
    ] = 86_400.0,
    take_over: TakeOver = False,
) -> None:
    """Start a service on the hosts of a Slurm cluster, and wait until its first node has joined.

    It makes the service's folder with its keys, submits nodes and engine hosts as job arrays of one host each, and
    starts the brokers, on this host or in a job. What it leaves here replaces nodes that end. Run it again on the
    same folder where that process was killed. Ctrl-C ends the waiting only.
    """
    from ..cluster.cluster_file import load_cluster_file
    from ..cluster.cluster_service import ClusterService
    from ..cluster.job_script import GROUPS, JobScripts

    cluster = load_cluster_file(slurm)
    if dry_run:
        scripts = JobScripts(cluster, service.absolute())
        texts = [scripts.group(kind, cluster.group(kind).count) for kind in GROUPS if cluster.group(kind).count]
        print("\n".join([*texts, *([scripts.brokers()] if cluster.brokers == "job" else [])]))
        return
    started = ClusterService.start(service, cluster, take_over=take_over)
    with options.console(stderr=True).status("submitted") as status:
        joined = started.wait_joined(lambda text: status.update(f"waiting for the first node: {text}"), wait)
    wanted = cluster.nodes.count
    more = "" if joined >= wanted else f"; {wanted - joined} of {wanted} are still to come: `prorl nodes --watch`"
    say("prorl up", f"{joined} node{'s' if joined != 1 else ''} joined{more}")
    print(f'RolloutClient(service="{started.folder.path}") submits jobs; `prorl down` ends the service.')


def nodes(
    service: Service,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep the table up to date until Ctrl-C.")] = False,
) -> None:
    """Show the hosts of a service: what Slurm, the nodes and the brokers say about each."""
    from ..cluster.cluster_service import ClusterService

    started = ClusterService(service)
    show(lambda: Group(_table(started)), watch=watch)


def _table(started: ClusterService) -> Table:
    from ..cluster.node_table import node_rows

    fleet = started.fleet
    wanted = fleet.folder.wanted()
    found = [one for each in fleet.allocations().values() for one in each]
    with RolloutClient(service=started.folder.path, timeout_s=options.QUICK_S) as client:
        try:
            stages, problem = client.status().stages, ""
        except ProrlError as error:
            stages, problem = (), error.message
    rows = node_rows(found, started.records(), stages, wanted.leaving)
    roles = "/".join(Phase)
    numbers = [Column(name, justify="right") for name in (f"slots\n{roles}", "held", "up for", "time left")]
    images = ", ".join(Path(image).name for image in fleet.cluster.nodes.images) or "none"
    caption = problem or f"{wanted.nodes} nodes and {wanted.engines} engine hosts are wanted; images: {images}"
    table = Table("node", "host", "job", "state", *numbers, caption=caption, caption_justify="left")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: NodeRow) -> tuple[str, ...]:
    times = ("" if seconds is None else duration(round(seconds)) for seconds in (row.age_s, row.left_s))
    return (row.node, row.host, row.job, row.state, row.slots, "" if row.held is None else str(row.held), *times)


def scale(
    count: Annotated[int, typer.Argument(metavar="N", min=0, help="How many nodes there should be.")],
    service: Service,
    engines: Annotated[int | None, typer.Option(min=0, help="How many engine hosts there should be.")] = None,
) -> None:
    """Have another number of nodes: new ones are submitted; those with the least time left drain and leave."""
    from ..cluster.cluster_service import ClusterService

    ClusterService(service).scale(count, engines)
    print(f"{count} nodes are wanted; `prorl nodes` shows how far that is")


def drain(
    service: Service,
    node: Annotated[str | None, typer.Argument(metavar="NODE", help="A node's name, its host, or its job.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="All nodes and engine hosts.")] = False,
) -> None:
    """Send a node away for good: it takes nothing new, ends what it can, gives the rest back, and is not replaced."""
    from ..cluster.cluster_service import ClusterService

    if (node is None) != all_:
        raise typer.BadParameter("Name a node, or --all")
    leaving = ClusterService(service).drain(node)
    print("\n".join(f"{one.name} on {one.host or 'no host yet'} leaves" for one in leaving) or "there is no node")


def down(service: Service) -> None:
    """End a service: its jobs in Slurm, then its brokers. What was not collected stays in the journal."""
    from ..cluster.cluster_service import ClusterService

    with options.console(stderr=True).status("waiting for jobs and brokers to end"):
        ClusterService(service).down()
    print(f"the service in {service} has ended; `prorl up` goes on with its journal")


def keep(service: Service, take_over: TakeOver = False) -> None:
    """Run the brokers of a service, and keep as many nodes in Slurm's queue as are wanted; `prorl up` starts this."""
    from ..cluster.keeper import Keeper

    start_logging("keep", "text", "info")
    if not asyncio.run(Keeper(service, take_over=take_over).run()):
        raise typer.Exit(1)
