"""`prorl nodes`: the nodes of a service, and what became of the jobs of lost nodes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Group

from ..errors import SlurmFailed
from ..service.node_rows import NodeRow, losses, node_rows
from ..system.duration import duration
from ..wire.messages.jobs import Phase
from . import options
from .tables import GIB, NOTHING, end_with, print_json, show, table, text
from .target import Target

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from ..service.rollout_brokers import RolloutBrokers
    from ..wire.messages.nodes import LostNode


class Seen(NamedTuple):
    rows: list[NodeRow]
    lost: list[LostNode]
    problems: list[str]
    caption: str = ""
    on_slurm: bool = False


def nodes(
    target: Target,
    details: Annotated[
        bool,
        typer.Option("--details", "-d", help="Show allocations, images, sandboxes, memory, disk and versions too."),
    ] = False,
    watch: options.Watch = False,
    as_json: options.AsJson = False,
) -> None:
    """Show the nodes of a service: slots, jobs, last report and state, and what became of the jobs of lost ones.

    Slots are busy/all, of INIT, RUN, EVAL and SCORE, summed over the rollout brokers. States: `ready`;
    `draining`: it finishes its jobs; `silent`: it has stopped reporting, and gets no new jobs; `lost`: its lease
    expired, and its jobs were restarted. On Slurm, its own state and the time left are shown too. The exit code is
    1 if a broker, or Slurm, did not answer; what the others report is shown.
    """
    with target.brokers() as brokers:
        if as_json:
            seen = _look(brokers, target.folder)
            print_json({"nodes": seen.rows, "lost": seen.lost, "problems": seen.problems})
        else:
            seen = show(lambda: _look(brokers, target.folder), lambda seen: layout(seen, details=details), watch=watch)
    end_with(seen.problems)


def _look(brokers: RolloutBrokers, service: Path | None) -> Seen:
    answers = brokers.ask(lambda client: client.nodes())
    rows, lost = node_rows(answers.found), losses(answers.found.values())
    if service is None or not (service / "slurm").is_dir():
        answers.check()
        return Seen(rows, lost, answers.silent())
    from ..cluster.cluster_service import ClusterService
    from ..cluster.node_table import with_slurm

    started = ClusterService(service)
    wanted = started.fleet.folder.wanted()
    caption = f"{wanted.nodes} nodes and {wanted.engines} engine hosts are wanted"
    try:
        allocations = [one for each in started.fleet.allocations().values() for one in each]
    except SlurmFailed as error:
        return Seen(rows, lost, [*answers.silent(), error.message], caption)
    rows = with_slurm(rows, allocations, wanted.leaving)
    return Seen(rows, lost, answers.silent(), caption, on_slurm=True)


def layout(seen: Seen, *, details: bool) -> Group:
    """Lay out the nodes, in 80 columns."""
    slurm = ("slurm", "left") if seen.on_slurm else ()
    rows = (
        (row.node, row.host, _state(row), _slots(row), row.held if row.state else None, _time(row.silent_s))
        + ((f"{row.slurm_job} {row.slurm_state}".strip(), _time(row.left_s)) if seen.on_slurm else ())
        for row in seen.rows
    )
    none = "there are none yet; `prorl node` joins one" if not seen.rows else None
    roles = "init run eval score" if any(Phase.SCORE in row.slots for row in seen.rows) else "init run eval"
    headers = ("node", "host", "state", f">slots\n{roles}", ">held", ">heard", *slurm)
    nodes = table(*headers, rows=rows, caption=seen.caption or none)
    lines = [_loss(lost) for lost in seen.lost] + _versions(seen.rows) + seen.problems
    return Group(nodes, *([_details(seen.rows)] if details else []), *map(text, lines))


def _details(rows: list[NodeRow]) -> Table:
    cells = (
        (
            *(row.node, row.allocation, "\n".join(row.facts.images) or NOTHING, row.facts.sandboxes),
            _share(row.facts.memory_free_bytes, row.facts.memory_total_bytes),
            _share(row.facts.disk_free_bytes, row.facts.disk_total_bytes),
            row.facts.version or NOTHING,
        )
        for row in rows
        if row.node
    )
    headers = ("node", "allocation", "images", ">sand-\nboxes", ">memory\nfree", ">disk\nfree", "version")
    return table(*headers, rows=cells, title="details")


def _state(row: NodeRow) -> str:
    return f"{row.state} ({', '.join(row.said_by)})" if row.said_by else row.state


def _slots(row: NodeRow) -> str:
    """Return the used slots and all slots of each stage; of SCORE only where there are some."""
    roles = [role for role in Phase if role != Phase.SCORE or role in row.slots]
    return " ".join(f"{row.used.get(role, 0)}/{row.slots.get(role, 0)}" for role in roles) if row.slots else ""


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def _share(free: int, total: int) -> str:
    return f"{free / GIB:.1f} of {total / GIB:.1f} GiB" if total else NOTHING


def _loss(lost: LostNode) -> str:
    """Describe a lost node's jobs, and their fate."""
    completed = sum(lost.completed.values())
    places = ", ".join(f"{count} on {node}" for node, count in sorted(lost.completed.items()))
    went = [f"{completed} have completed ({places})"] if completed else []
    went += [f"{count} ended as {outcome}" for outcome, count in sorted(lost.ended.items())]
    went += [f"{lost.lost_again} were lost again"] if lost.lost_again else []
    left = lost.jobs - completed - sum(lost.ended.values()) - lost.lost_again
    went += [f"{left} continue elsewhere"] if left else []
    how = "its connection ended" if lost.died else "it fell silent"
    back = "; it is back" if lost.is_back else ""
    jobs = f"with {lost.jobs} jobs: {', '.join(went)}" if lost.jobs else "without jobs"
    return f"{lost.node} was lost {_time(lost.ago_s)} ago ({how}) {jobs}{back}"


def _versions(rows: list[NodeRow]) -> list[str]:
    """Name nodes whose package version differs from the majority's."""
    versions = Counter(row.facts.version for row in rows if row.facts.version)
    if len(versions) < 2:
        return []
    usual = versions.most_common(1)[0][0]
    others = [f"{row.node} ({row.facts.version})" for row in rows if row.facts.version not in ("", usual)]
    return [f"most nodes have prorl-zmq {usual}, and not {', '.join(others)}: install one version everywhere"]
