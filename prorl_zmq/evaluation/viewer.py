"""The terminal viewer behind `prorl view`, by textual: a list of rollouts, and each of them from near.

Everything shown is made in `display`, cleaned and without markup. Files are read when a rollout is opened.
"""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static, TabbedContent, TabPane

from ..errors import ConfigError
from ..system.logs import one_line
from .display import (
    HEADERS,
    TOKEN_HEADERS,
    head,
    legend,
    notes_text,
    pages,
    row,
    token_rows,
    token_text,
    turn_body,
    turn_title,
)
from .transcript import Transcript

if TYPE_CHECKING:
    from collections.abc import Callable

    from .collection import Collection, Rollout

SORTS: dict[str, Callable[[Rollout], Any]] = {
    "order": lambda _: 0,
    "reward": lambda one: -1.0 if one.result.reward is None else one.result.reward,
    "outcome": lambda one: str(one.result.outcome),
    "tokens": lambda one: one.result.tokens,
    "turns": lambda one: one.result.metrics.get("turns", 0.0),
    "problem": lambda one: one.problem,
}
"""What the list can be sorted by; `order` is that of the folder."""
ALL, SOLVED, NOT_SOLVED = "all", "solved", "not solved"
TABS = ("turns", "tokens", "table", "result")


class RolloutList(Screen[None]):
    BINDINGS: ClassVar = [
        Binding("enter", "open", "open"),
        Binding("s", "sort", "sort by"),
        Binding("r", "reverse", "reverse"),
        Binding("f", "filter", "filter"),
        Binding("q", "app.quit", "quit"),
    ]

    def __init__(self, collection: Collection) -> None:
        super().__init__()
        self._collection = collection
        outcomes = sorted({str(one.result.outcome) for one in collection.rollouts})
        self._filters = cycle([SOLVED, NOT_SOLVED, *outcomes, ALL])
        self._sorts = cycle([*list(SORTS)[1:], "order"])
        self.filter, self.sort, self.reverse = ALL, "order", False
        self.shown: list[Rollout] = []

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        yield DataTable(id="rollouts", cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        self._table.add_columns(*HEADERS)
        self._fill()

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one("#rollouts", DataTable)

    def _fill(self) -> None:
        self.shown = sorted(
            (one for one in self._collection.rollouts if _passes(one, self.filter)),
            key=SORTS[self.sort],
            reverse=self.reverse,
        )
        self._table.clear()
        for rollout in self.shown:
            self._table.add_row(*row(rollout))
        order = f"{self.sort}, reversed" if self.reverse else self.sort
        count = f"{len(self.shown)} of {len(self._collection.rollouts)} rollouts"
        title = f"{self._collection.path}   {count}   filter: {self.filter}   sorted by: {order}"
        self.query_one("#title", Static).update(Text(one_line(title)))

    def action_sort(self) -> None:
        self.sort = next(self._sorts)
        self._fill()

    def action_reverse(self) -> None:
        self.reverse = not self.reverse
        self._fill()

    def action_filter(self) -> None:
        self.filter = next(self._filters)
        self._fill()

    def action_open(self) -> None:
        if self.shown:
            self.app.push_screen(RolloutView(self._collection, self.shown, self._table.cursor_row))

    def on_data_table_row_selected(self) -> None:
        self.action_open()

    def point_at(self, index: int) -> None:
        self._table.move_cursor(row=index)


class RolloutView(Screen[None]):
    BINDINGS: ClassVar = [
        Binding("escape", "back", "list"),
        Binding("n", "move(1)", "next"),
        Binding("p", "move(-1)", "previous"),
        *(Binding(str(number), f"tab('{name}')", name) for number, name in enumerate(TABS, start=1)),
        Binding("right_square_bracket", "page(1)", "tokens on", key_display="]"),
        Binding("left_square_bracket", "page(-1)", "tokens back", key_display="["),
        Binding("q", "app.quit", "quit"),
    ]

    def __init__(self, collection: Collection, rollouts: list[Rollout], index: int) -> None:
        super().__init__()
        self._collection = collection
        self._rollouts = rollouts
        self.index = index
        self.page = 0
        self.transcript = Transcript(job_id="")

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        with TabbedContent(initial=TABS[0]):
            with TabPane("Turns", id="turns"):
                yield VerticalScroll(id="turn-list")
            with TabPane("Tokens", id="tokens"), VerticalScroll(id="token-scroll"):
                yield Static(id="token-place")
                yield Static(legend(), id="legend")
                yield Static(id="token-text")
            with TabPane("Token table", id="table"), Vertical():
                yield DataTable(id="token-table", cursor_type="row")
            with TabPane("Result", id="result"), VerticalScroll():
                yield Static(id="notes")
        yield Footer()

    async def on_mount(self) -> None:
        self.query_one("#token-table", DataTable).add_columns(*TOKEN_HEADERS)
        await self._show()

    async def _show(self) -> None:
        rollout = self._rollouts[self.index]
        title = head(rollout)
        try:
            self.transcript = self._collection.transcript(rollout)
        except ConfigError as error:
            self.transcript = Transcript(job_id=rollout.job_id)
            title.append(f"\n{one_line(error.message)}", style="red")
        title.append(f"\n{self.index + 1} of {len(self._rollouts)}", style="dim")
        self.query_one("#head", Static).update(title)
        turns = self.query_one("#turn-list", VerticalScroll)
        await turns.remove_children()
        parts: list[Static] = []
        for number, turn in enumerate(self.transcript.turns):
            parts.append(Static(turn_title(number, turn, self.transcript), classes="turn-title"))
            parts.append(Static(turn_body(turn, self.transcript), classes="turn"))
        await turns.mount(*(parts or [Static(Text("It ended before its first token.", style="dim"))]))
        turns.scroll_home(animate=False)
        self.query_one("#notes", Static).update(notes_text(rollout))
        self.page = 0
        self._show_page()

    def _show_page(self) -> None:
        count, total = pages(self.transcript), len(self.transcript.token_ids)
        place = f"{total} tokens, page {self.page + 1} of {count}"
        self.query_one("#token-place", Static).update(Text(place, style="dim"))
        self.query_one("#token-text", Static).update(token_text(self.transcript, self.page))
        self.query_one("#token-scroll", VerticalScroll).scroll_home(animate=False)
        table = self.query_one("#token-table", DataTable)
        table.clear()
        for cells in token_rows(self.transcript, self.page):
            table.add_row(*cells)

    async def action_move(self, step: int) -> None:
        index = self.index + step
        if 0 <= index < len(self._rollouts):
            self.index = index
            await self._show()

    def action_page(self, step: int) -> None:
        page = self.page + step
        if 0 <= page < pages(self.transcript):
            self.page = page
            self._show_page()

    def action_tab(self, name: str) -> None:
        self.query_one(TabbedContent).active = name

    def action_back(self) -> None:
        """Go back to the list, with the cursor on this rollout."""
        below = self.app.screen_stack[-2]
        if isinstance(below, RolloutList):
            below.point_at(self.index)
        self.app.pop_screen()


class Viewer(App[None]):
    TITLE = "prorl view"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #title, #head { padding: 0 1; background: $panel; color: $text; height: auto; }
    Screen { overflow: hidden; }
    #rollouts, TabbedContent, ContentSwitcher, TabPane, TabPane > * { height: 1fr; }
    #head { max-height: 8; overflow-y: auto; }
    .turn-title { margin: 1 1 0 1; }
    .turn { margin: 0 1 0 3; }
    #token-text, #token-place, #legend, #notes { margin: 0 1 1 1; }
    TabPane { padding: 0; }
    """

    def __init__(self, collection: Collection, first: Rollout | None = None) -> None:
        super().__init__()
        self._collection = collection
        self._first = first

    def on_mount(self) -> None:
        self.push_screen(RolloutList(self._collection))
        if self._first is not None:
            rollouts = self._collection.rollouts
            self.push_screen(RolloutView(self._collection, rollouts, rollouts.index(self._first)))


def _passes(rollout: Rollout, kind: str) -> bool:
    if kind in (SOLVED, NOT_SOLVED):
        return rollout.solved == (kind == SOLVED)
    return kind in (ALL, rollout.result.outcome)
