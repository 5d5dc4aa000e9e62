"""The screen of `prorl top`, by textual: an overview, jobs, backends, nodes, batches, drawn anew with every update.

Whatever others have named (jobs, tasks, nodes, errors) is shown as one line of text without markup.
"""

from __future__ import annotations

import asyncio
from heapq import nlargest
from itertools import cycle
from typing import TYPE_CHECKING, ClassVar

from rich.console import Group
from rich.table import Table
from rich.text import Text
from textual.app import App
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Input, Static, TabbedContent, TabPane

from ..errors import ProrlError
from ..system.duration import duration
from ..system.logs import one_line
from ..wire.messages.backends import BackendList
from ..wire.messages.jobs import Outcome
from ..wire.messages.watching import ENDED_INTERVAL_S
from .backend_tables import backend_table, detail_tables
from .nodes import Seen, layout
from .options import columns
from .status import status_tables
from .top_batches import SHOWN as SHOWN_BATCHES
from .top_batches import batches_layout

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from ..watching.overview import Overview
    from ..watching.watcher import Watcher
    from ..wire.messages.batches import BatchStatus
    from ..wire.messages.watching import JobRow

HEADERS = ("job", "state", "task", "for", "reward", "error", "node", "backend", "attempt", "tokens", "messages")
FIRST = 5
"""Columns of the jobs in the overview, which fit into 80 characters."""
TABS = ("overview", "jobs", "backends", "nodes", "batches")
SHOWN = 300
"""Jobs of the table, the last to change."""
LAST_ENDED = 8
SHORT_ID = 15
ALL = "all"
KINDS = (ALL, "under way", "ended", "not completed")
BARS = " ▁▂▃▄▅▆▇█"
INTERVALS = 60


class Top(App[None]):
    TITLE = "prorl top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar = [
        *(Binding(str(number), f"tab('{name}')", name) for number, name in enumerate(TABS, start=1)),
        Binding("f", "kind", "which"),
        Binding("slash", "search", "search", key_display="/"),
        Binding("escape", "end_search", "end search", show=False),
        Binding("q", "quit", "quit"),
    ]
    CSS = """
    Screen { overflow: hidden; }
    #head { padding: 0 1; background: $panel; color: $text; height: auto; max-height: 6; }
    #search { height: 1; border: none; display: none; }
    #jobs-title, VerticalScroll > Static { margin: 0 1; }
    TabbedContent, ContentSwitcher, TabPane, VerticalScroll, DataTable { height: 1fr; }
    TabPane { padding: 0; }
    """

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher
        self._kinds = cycle([*KINDS[1:], ALL])
        self.kind = ALL
        self.rows: dict[str, JobRow] = {}
        self.overview: Overview | None = None
        self.waits_for: dict[str, str] = {}
        """What open batches said last, by id; asked while they are shown."""

    def compose(self) -> ComposeResult:
        yield Static("waiting for the service to answer …", id="head")
        with TabbedContent(initial=TABS[0]):
            for name in TABS:
                with TabPane(name.capitalize(), id=name):
                    if name == "jobs":
                        yield Input(
                            placeholder="a part of an id, task, node, backend, outcome or error",
                            id="search",
                        )
                        yield Static(id="jobs-title")
                        yield DataTable(id="table", cursor_type="row", zebra_stripes=True)
                    else:
                        yield VerticalScroll(Static(id=f"{name}-text"))
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#table", DataTable).add_columns(*HEADERS)
        self.run_worker(self._follow())

    async def _follow(self) -> None:
        async with self._watcher.viewer() as updates:
            async for update in updates:
                if update.reset:
                    self.rows = {}
                self.rows.update((row.job_id, row) for row in update.changed)
                for job_id in update.forgotten:
                    self.rows.pop(job_id, None)
                self.overview = update.overview
                if self.query_one(TabbedContent).active == "batches":
                    await self._ask_batches()
                self._draw()

    async def _ask_batches(self) -> None:
        batches = self._batches()[:SHOWN_BATCHES]
        told = await asyncio.gather(*(self._waits_for(batch.batch_id) for batch in batches))
        self.waits_for = {batch.batch_id: what for batch, what in zip(batches, told, strict=True) if what}

    async def _waits_for(self, batch_id: str) -> str:
        try:
            return (await self._watcher.batch(batch_id)).waits_for
        except ProrlError:  # closed meanwhile, or its broker is away, which the head says
            return self.waits_for.get(batch_id, "")

    def _batches(self) -> tuple[BatchStatus, ...]:
        return self.overview.status.batches if self.overview is not None and self.overview.status is not None else ()

    # Drawing ----------------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        seen = self.overview
        if seen is None:
            return
        self.query_one("#head", Static).update(_head(seen))
        shown = self.query_one(TabbedContent).active
        if shown == "jobs":
            self._draw_jobs(seen)
            return
        listed = seen.backends if seen.backends is not None else BackendList("")
        match shown:
            case "overview":
                tables = [status_tables(seen.status, listed)] if seen.status is not None else []
                ended = nlargest(LAST_ENDED, (row for row in self.rows.values() if row.place == "ended"), key=_changed)
                content = Group(*tables, *([_job_table(ended, seen.at)] if ended else []))
            case "backends":
                content = Group(backend_table(listed.backends, listed.starts), detail_tables(listed.backends))
            case "batches":
                content = batches_layout(self._batches(), self.waits_for)
            case _:
                content = layout(Seen(list(seen.nodes), list(seen.lost_nodes), []), details=True)
        self.query_one(f"#{shown}-text", Static).update(content)

    def _draw_jobs(self, seen: Overview) -> None:
        wanted = self.query_one("#search", Input).value.strip().lower()
        found = [row for row in self.rows.values() if _is_of(row, self.kind) and wanted in _text(row)]
        newest = nlargest(SHOWN, found, key=_changed)
        table = self.query_one("#table", DataTable)
        place, cursor = table.scroll_offset, table.cursor_row
        table.clear()
        for row in newest:
            table.add_row(*_cells(row, seen.at))
        table.move_cursor(row=min(cursor, len(newest) - 1), scroll=False)
        table.scroll_to(place.x, place.y, animate=False)
        title = f"{len(newest)} of {len(found)} jobs, the last to change   which: {self.kind}"
        self.query_one("#jobs-title", Static).update(Text(one_line(title + (f"   with: {wanted}" if wanted else ""))))

    # Keys -------------------------------------------------------------------------------------------------------------

    def action_tab(self, name: str) -> None:
        self.query_one(TabbedContent).active = name

    def on_tabbed_content_tab_activated(self) -> None:
        self._draw()

    def action_kind(self) -> None:
        self.kind = next(self._kinds)
        self.action_tab("jobs")
        self._draw()

    def action_search(self) -> None:
        self.action_tab("jobs")
        search = self.query_one("#search", Input)
        search.display = True
        search.focus()

    def action_end_search(self) -> None:
        search = self.query_one("#search", Input)
        search.value = ""
        search.display = False
        self.query_one("#table", DataTable).focus()

    def on_input_changed(self) -> None:
        self._draw()

    def on_input_submitted(self) -> None:
        self.query_one("#table", DataTable).focus()


def _head(seen: Overview) -> Text:
    bars = _bars(seen)
    most = max(bars, default=0)
    line = "".join(BARS[-(-count * (len(BARS) - 1) // most)] if most else BARS[0] for count in bars)
    up = duration(seen.status.uptime_s) if seen.status is not None else "?"
    batches = len(seen.status.batches) if seen.status is not None else 0
    brokers = "1 rollout broker" if len(seen.brokers) == 1 else f"{len(seen.brokers)} rollout brokers"
    text = Text(f"up {up}   {brokers}   open batches: {batches}   {seen.ended_per_s:.1f} jobs/s")
    text.append(f"   ended, last 10 min: {line}" if most else "")
    for name, problem in seen.problems.items():
        text.append(f"\n{one_line(name)} does not answer: {one_line(problem)}", style="red")
    return text


def _bars(seen: Overview) -> list[int]:
    """Count the jobs that ended in each interval of the last ten minutes, the oldest first."""
    bars = [0] * INTERVALS
    newest = seen.at - seen.at % ENDED_INTERVAL_S
    for one in seen.ended:
        place = INTERVALS - 1 - round((newest - one.at) / ENDED_INTERVAL_S)
        if 0 <= place < INTERVALS and one.seconds == ENDED_INTERVAL_S:
            bars[place] += sum(one.outcomes.values())
    return bars


def _job_table(rows: list[JobRow], at: float) -> Table:
    table = Table(*columns(*HEADERS[:FIRST], no_wrap=True), title="ended last", title_justify="left")
    for row in rows:
        name, *cells = _cells(row, at)[:FIRST]
        if len(name) > SHORT_ID:  # the jobs of a batch differ at the end
            name = Text(f"{name.plain[:4]}…{name.plain[5 - SHORT_ID :]}", name.style)
        table.add_row(name, *cells)
    return table


def _cells(row: JobRow, at: float) -> list[Text]:
    state = str(row.outcome) if row.outcome is not None else f"{row.phase} {row.place}"
    passed_s = at - row.entered_at if row.ended_at is None else row.ended_at - row.accepted_at
    reward = f"{row.reward:.3g}" if row.reward is not None else ""
    first = (row.job_id, state, row.task, duration(max(0.0, passed_s)), reward)
    others = (row.code, row.node, row.backend, str(row.attempt), str(row.tokens or ""), str(row.turns or ""))
    style = "red" if row.outcome not in (None, Outcome.COMPLETED) else ""
    return [Text(one_line(cell), style) for cell in (*first, *others)]


def _text(row: JobRow) -> str:
    """Return what a search looks in."""
    names = (
        row.job_id,
        row.task,
        row.group_id,
        row.phase,
        row.place,
        row.node,
        row.backend,
        row.outcome or "",
        row.code,
    )
    return " ".join(names).lower()


def _is_of(row: JobRow, kind: str) -> bool:
    if kind == "under way":
        return row.place != "ended"
    if kind == "ended":
        return row.place == "ended"
    return kind == ALL or row.outcome not in (None, Outcome.COMPLETED)


def _changed(row: JobRow) -> float:
    return row.entered_at
