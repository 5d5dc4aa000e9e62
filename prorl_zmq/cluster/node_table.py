"""Rows of `prorl nodes` on Slurm: what the brokers know of nodes, joined to Slurm's jobs by the allocation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from ..service.node_rows import NodeRow

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from pathlib import Path

    from .slurm import Allocation


class NodeRecord(msgspec.Struct, frozen=True):
    """What a node wrote into the service's folder when it started; more may be in its file."""

    name: str
    host: str = ""
    allocation: str = ""


def read_records(folder: Path) -> list[NodeRecord]:
    """Read the files of all nodes; one that is gone or half there is left out."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=NodeRecord))
        except (OSError, msgspec.MsgspecError):
            continue
    return found


def with_slurm(
    rows: Iterable[NodeRow],
    allocations: Iterable[Allocation],
    records: Sequence[NodeRecord],
    leaving: Collection[str],
) -> list[NodeRow]:
    """Join them: one row for each job, then one for each node that the brokers know and Slurm does not."""
    by_job = {one.allocation.partition("_")[0]: one.name for one in records if one.allocation}
    known = {row.node: row for row in rows}
    joined = []
    for one in allocations:
        name = by_job.get(one.raw_id, "") if one.is_running else ""
        state = "leaving" if one.name in leaving else one.state.lower()
        if one.state == "PENDING":
            state += f" ({one.reason})"
        row = known.pop(name, NodeRow(node=name))
        joined.append(replace(row, host=one.host, slurm_job=one.name, slurm_state=state, left_s=one.left_s))
    return [*joined, *known.values()]
