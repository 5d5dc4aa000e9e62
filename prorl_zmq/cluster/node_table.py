"""Rows of `prorl nodes` on Slurm: the brokers' nodes, joined to Slurm's jobs by the allocation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..service.node_rows import NodeRow

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from .slurm import Allocation


def with_slurm(rows: Iterable[NodeRow], allocations: Iterable[Allocation], leaving: Collection[str]) -> list[NodeRow]:
    """Return a row for each job, then one for each of the brokers' nodes that is in no job."""
    left = {row.node: row for row in rows}
    by_job = {raw_id(row): row.node for row in left.values() if row.allocation}
    joined = []
    for one in allocations:
        name = by_job.get(one.raw_id, "") if one.is_running else ""
        state = "leaving" if one.name in leaving else one.state.lower()
        if one.state == "PENDING":
            state += f" ({one.reason})"
        row = left.pop(name, NodeRow(node=name))
        joined.append(replace(row, host=one.host, slurm_job=one.name, slurm_state=state, left_s=one.left_s))
    return [*joined, *left.values()]


def raw_id(row: NodeRow) -> str:
    """Return the `$SLURM_JOB_ID` of a node; empty: it runs in no job."""
    return row.allocation.partition("_")[0]
