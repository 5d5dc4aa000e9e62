"""The open batches in `prorl top`: how far each is, and what it waits for now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..system.logs import one_line
from .options import columns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..wire.messages.batches import BatchStatus

SHORT_ID = 12
BAR = 10
"""Characters of a bar."""
SHOWN = 20
"""Batches that are asked what they wait for."""


def batches_layout(batches: Sequence[BatchStatus], waits_for: Mapping[str, str]) -> Group:
    """Lay the open batches out; `waits_for` is what those say of themselves that were asked, by id."""
    if not batches:
        return Group(Text("No batch is open."))
    first = columns("batch", "state", "groups kept", no_wrap=True)
    counts = columns("under way", "jobs", "dropped", "failed", justify="right")
    table = Table(*first, *counts, title="open batches", title_justify="left")
    for batch in batches:
        numbers = (batch.under_way, batch.in_flight, batch.dropped, batch.failed)
        table.add_row(batch.batch_id[:SHORT_ID], batch.state, _kept(batch), *map(str, numbers))
    asked = [batch.batch_id for batch in batches if batch.batch_id in waits_for]
    return Group(table, *(_waits(batch_id, waits_for[batch_id]) for batch_id in asked))


def _kept(batch: BatchStatus) -> Text:
    full = min(BAR, BAR * batch.kept // batch.target_groups)
    text = Text("━" * full, "green")
    text.append("━" * (BAR - full), "dim")
    return text.append(f" {batch.kept} of {batch.target_groups}", "default")


def _waits(batch_id: str, what: str) -> Text:
    return Text.assemble((one_line(batch_id[:SHORT_ID]), "bold"), f" waits for {one_line(what)}")
