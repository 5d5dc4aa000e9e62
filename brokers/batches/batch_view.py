"""The view of one batch: its groups, their rollouts, and what the batch waits for. Pure.

Acknowledged, dropped and given-up groups appear only as counts in the report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...wire.messages.watching import CELLS_LIMIT, BatchView, GroupRow, RolloutCell

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...wire.messages.batches import BatchStatus
    from .batch_records import BatchRecord, RememberedBatch
    from .rollout_group import RolloutGroup

    Wall = Callable[[float | None], float | None]
    """Converts an event's time to seconds since 1970."""

OLDEST = 3
"""Most running jobs that `waits_for` names."""


def batch_view(
    request_id: str,
    batch: BatchRecord,
    status: BatchStatus,
    version: Callable[[str], int],
    worked_s: Callable[[str], float],
    wall: Wall,
) -> BatchView:
    """Return the view of an open batch; `version` returns a model's current weight version."""
    groups = [*sorted(batch.groups.values(), key=lambda group: group.number), *batch.ready.values()]
    shown = groups[: CELLS_LIMIT // batch.options.group_size]
    rows = tuple(_row(group, batch, version(group.model), worked_s) for group in shown)
    return BatchView(
        request_id,
        status=status,
        report=batch.stats.report(),
        current_version=version(batch.model),
        waits_for=_waits_for(batch, status, rows),
        groups=rows,
        left_out=len(groups) - len(shown),
        begins=f"{batch.key}.",
        taken_over=tuple(batch.taken_over),
        rollouts=batch.rollouts,
        opened_at=wall(batch.opened_at),
        ended_at=wall(batch.ended_at) if batch.state != "open" else None,
    )


def closed_view(request_id: str, batch: RememberedBatch, version: Callable[[str], int], wall: Wall) -> BatchView:
    """Return the view of a closed batch."""
    return BatchView(
        request_id,
        status=batch.status,
        report=batch.report,
        current_version=version(batch.model),
        waits_for="",
        is_closed=True,
        begins=f"{batch.key}.",
        taken_over=batch.taken_over,
        rollouts=batch.rollouts,
        opened_at=wall(batch.opened_at),
        ended_at=wall(batch.ended_at),
    )


def _row(group: RolloutGroup, batch: BatchRecord, version: int, worked_s: Callable[[str], float]) -> GroupRow:
    jobs = {place: job_id for job_id, place in group.running.items()}
    is_kept = group.group_id in batch.ready

    def cell(place: int) -> RolloutCell:
        if (rollout := group.rollouts.get(place)) is not None:
            return RolloutCell("in", rollout.job_id, rollout.reward, version - rollout.version, rollout.seconds)
        if (job_id := jobs.get(place)) is not None:
            started_with = group.started_with.get(job_id)
            behind = version - started_with.get(group.model, 0) if started_with is not None else None
            return RolloutCell("running", job_id, staleness=behind, seconds=worked_s(job_id))
        return RolloutCell("missing")

    return GroupRow(
        group.group_id,
        group.prompt.job.job_id,
        ("given" if group.given_to else "kept") if is_kept else "under_way",
        carried_over=not group.group_id.startswith(f"{batch.key}."),
        failed=group.failures.total(),
        cells=tuple(cell(place) for place in range(group.size)),
    )


def _waits_for(batch: BatchRecord, status: BatchStatus, rows: tuple[GroupRow, ...]) -> str:
    if status.problem:
        return status.problem
    if batch.state != "open":
        waiting = len(batch.ready)
        said = f"its client, which has not acknowledged {_number(waiting, 'group')}"
        return said if waiting else "its client, to close it"
    cells = [cell for row in rows if row.state == "under_way" for cell in row.cells]
    running = sorted((cell for cell in cells if cell.state == "running"), key=lambda cell: -cell.seconds)
    missing = sum(cell.state == "missing" for cell in cells)
    parts = []
    if running:
        named = ", ".join(f"{cell.job_id} ({cell.seconds:.0f} s)" for cell in running[:OLDEST])
        parts.append(f"{_number(len(running), 'rollout')} under way, the longest {named}")
    if missing:
        parts.append(f"slots for {_number(missing, 'more rollout')} of its groups")
    if batch.prompts:
        parts.append(f"slots for {_number(len(batch.prompts), 'prompt')}")
    if not missing and not batch.prompts and not batch.stream_ended:
        parts.append("prompts from its client")
    wanted = batch.options.target_groups - status.kept
    return f"{_number(wanted, 'more group')} to be kept: {'; '.join(parts)}"


def _number(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
