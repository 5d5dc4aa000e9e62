"""A job's history as one line of a table (`JobRow`), made when somebody asks. Pure.

A line needs few of the history's items, so only those are checked and decoded: a reply may have two thousand lines, and
the broker has other work.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ...wire.messages.watching import JobRow
from .history_items import AssignedItem, EndedItem, HeldItem, Item, QueuedItem, unpacked

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T", bound=Item)
U = TypeVar("U", bound=Item)


def job_row(job_id: str, packed: bytes, task: str, group_id: str) -> JobRow | None:
    """Return a job's line; None: nothing can be read of its history. An ended one's history has its names itself."""
    items = unpacked(packed)
    newest = items[::-1]
    began, state = _first(items, QueuedItem, HeldItem), _first(newest, QueuedItem, HeldItem)
    if began is None or state is None:
        return None
    held, queued = _first(newest, HeldItem), _first(newest, QueuedItem)
    assigned, ended = _first(newest, AssignedItem), _first(newest, EndedItem)
    row = JobRow(
        job_id=job_id,
        task=task,
        group_id=group_id,
        phase=state.phase,
        place="held" if isinstance(state, HeldItem) else "queued",
        attempt=state.attempt,
        accepted_at=began.at,
        entered_at=state.at,
        node=held.node if held is not None else "",
        stage_id=held.stage_id if held is not None else "",
        backend=assigned.backend if assigned is not None else "",
        code=queued.code if queued is not None else "",
    )
    if ended is None:
        return row
    return msgspec.structs.replace(
        row,
        task=ended.task,
        group_id=ended.group_id,
        place="ended",
        entered_at=ended.at,
        ended_at=ended.at,
        backend=ended.backend or row.backend,
        outcome=ended.outcome,
        code=ended.code,
        reward=ended.reward,
        tokens=ended.tokens,
        turns=ended.turns,
    )


def _first(items: Iterable[Any], kind: type[T], other: type[U] | None = None) -> T | U | None:
    """Return the first item of a kind, or of two, that can be read."""
    kind_of: dict[Any, type[T | U]] = {one.__struct_config__.tag: one for one in (kind, other) if one is not None}
    for item in items:
        found = kind_of.get(item[0]) if isinstance(item, list) and item and isinstance(item[0], int) else None
        if found is not None:
            with suppress(msgspec.ValidationError):
                return msgspec.convert(item, found)
    return None
