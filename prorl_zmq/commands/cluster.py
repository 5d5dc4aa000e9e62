"""`prorl up`, `scale`, `drain` and `down`: a service on the hosts of a Slurm cluster."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ..errors import RequestTimeout, SlurmFailed
from ..service.node_rows import NodeRow, node_rows
from ..system.logs import say, start_logging
from .tables import console
from .target import Target

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
    bool, typer.Option("--take-over", help="Start brokers although others are recorded, whose host is dead.")
]


def up(
    slurm: Annotated[Path, typer.Option("--slurm", metavar="CLUSTER.toml", help="What to ask Slurm for.")],
    service: Service,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the scripts for sbatch.")] = False,
    wait: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="How long to wait for the first node; the service continues."),
    ] = 86_400.0,
    take_over: TakeOver = False,
) -> None:
    """Start a service on the hosts of a Slurm cluster, and wait until its first node has joined.

    It makes the service's folder with its keys, submits nodes and engine hosts as job arrays of one host each, and
    starts the brokers, on this host or in a job. A process that stays here replaces nodes that end; if it is killed,
    run this command again on the same folder. Ctrl-C only ends the waiting.
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
    with console(stderr=True).status("submitted") as status:
        try:
            joined = started.wait_joined(lambda text: status.update(f"waiting for the first node: {text}"), wait)
        except SlurmFailed:
            started.down()  # later ones would fail as they did
            raise
    wanted = cluster.nodes.count
    more = "" if joined >= wanted else f"; {wanted - joined} of {wanted} are still to come: `prorl nodes --watch`"
    say("prorl up", f"{joined} node{'s' if joined != 1 else ''} joined{more}")
    print(f'RolloutClient(service="{started.folder.path}") submits jobs; `prorl down` ends the service.')


def scale(
    count: Annotated[int, typer.Argument(metavar="N", min=0, help="The new number of nodes.")],
    service: Service,
    engines: Annotated[int | None, typer.Option(min=0, help="The new number of engine hosts.")] = None,
) -> None:
    """Change the number of nodes: submit new ones, or drain those with the least time left."""
    from ..cluster.cluster_service import ClusterService

    ClusterService(service).scale(count, engines)
    print(f"{count} nodes are wanted; `prorl nodes` shows how far that is")


def drain(
    target: Target,
    node: Annotated[str | None, typer.Argument(metavar="NODE", help="A node's name, its host, or its job.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="All nodes and engine hosts.")] = False,
) -> None:
    """Drain a node for good: it accepts no new jobs, finishes what it can, returns the rest, and is not replaced.

    NODE is a node of `prorl node`, of `prorl serve`, whose brokers continue, or of `prorl up`, which also has engine
    hosts and jobs that still wait. Without --service, run this command on the machine of `prorl serve`.
    """
    if (node is None) != all_:
        raise typer.BadParameter("Name a node, or --all")
    place = target.folder
    if place is not None and (place / "slurm").is_dir():
        from ..cluster.cluster_service import ClusterService

        rows: list[NodeRow] = []
        with suppress(RequestTimeout), target.brokers() as brokers:  # jobs may remain although no broker runs
            rows = node_rows(brokers.ask(lambda client: client.nodes()).found)
        leaving = ClusterService(place).drain(node, rows)
        print("\n".join(f"{one.name} on {one.host or 'no host yet'} leaves" for one in leaving) or "there is no node")
        return
    from ..service.node_drain import DrainRequests, drain_nodes
    from ..service.service_folder import NODES, ServiceFolder

    requests = DrainRequests(ServiceFolder.open(place).path / NODES if place is not None else target.run_dir)
    with target.brokers() as brokers:
        answers = brokers.ask(lambda client: client.nodes())
    answers.check()
    with console(stderr=True).status("waiting for nodes to answer"):
        drained = drain_nodes(requests, node_rows(answers.found), node)
    print("\n".join(f"{one.node} on {one.host} drains" for one in drained) or "there is no node")


def down(service: Service) -> None:
    """End a service: its jobs in Slurm, then its brokers. What was not collected stays in the journal."""
    from ..cluster.cluster_service import ClusterService

    with console(stderr=True).status("waiting for jobs and brokers to end"):
        ClusterService(service).down()
    print(f"the service in {service} has ended; `prorl up` continues with its journal")


def keep(service: Service, take_over: TakeOver = False) -> None:
    """Run the brokers of a service, and keep as many nodes in Slurm's queue as are wanted; `prorl up` starts this."""
    from ..cluster.keeper import Keeper

    start_logging("keep", "text", "info")
    if not asyncio.run(Keeper(service, take_over=take_over).run()):
        raise typer.Exit(1)
