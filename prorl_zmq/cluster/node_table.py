"""What `prorl nodes` shows: Slurm's jobs, what the nodes wrote, and what the brokers know, joined to rows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..wire.messages.jobs import Phase

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from pathlib import Path

    from ..wire.messages.front_door import StageStatus
    from .slurm import Allocation


class NodeRecord(msgspec.Struct, frozen=True):
    """What a node wrote into the service's folder when it started; more may be in its file."""

    name: str
    host: str = ""
    allocation: str = ""
    started_at: float = 0.0


class NodeRow(NamedTuple):
    node: str
    host: str
    job: str
    state: str
    """Slurm's, or why it waits; `leaving` if it was told to go."""
    slots: str
    """By stage, such as `8/64/8`."""
    held: int | None
    left_s: float | None
    age_s: float | None


def read_records(folder: Path) -> list[NodeRecord]:
    """Read the files of all nodes; one that is gone or half there is left out."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=NodeRecord))
        except (OSError, msgspec.MsgspecError):
            continue
    return found


def node_rows(
    allocations: Iterable[Allocation],
    records: Sequence[NodeRecord],
    stages: Sequence[StageStatus],
    leaving: Collection[str],
) -> list[NodeRow]:
    """Join them: one row for each job, and one for each node that the brokers know and Slurm does not."""
    by_job = {one.allocation.partition("_")[0]: one for one in records if one.allocation}
    rows, told = [], set()
    for one in allocations:
        record = by_job.get(one.raw_id)
        name = record.name if record is not None and one.is_running else ""
        told.add(name)
        state = "leaving" if one.name in leaving else one.state.lower()
        if one.state == "PENDING":
            state += f" ({one.reason})"
        age_s = time.time() - record.started_at if name and record is not None else None
        rows.append(NodeRow(name, one.host, one.name, state, *_load(name, stages), one.left_s, age_s))
    others = dict.fromkeys(stage.node for stage in stages if stage.node not in told)
    hosts = {record.name: record.host for record in records}
    rows += [NodeRow(name, hosts.get(name, ""), "", "no job", *_load(name, stages), None, None) for name in others]
    return rows


def _load(node: str, stages: Sequence[StageStatus]) -> tuple[str, int | None]:
    own = [stage for stage in stages if stage.node == node] if node else []
    slots = {role: sum(stage.slots for stage in own if stage.role == role) for role in Phase}
    return "/".join(map(str, slots.values())) if own else "", sum(stage.busy for stage in own) if own else None
