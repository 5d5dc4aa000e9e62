"""`prorl top`: the state of a service in the terminal, live. Keys choose the view."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from contextlib import contextmanager
from heapq import nlargest
from typing import TYPE_CHECKING

from rich.console import Group
from rich.segment import SegmentLines
from rich.text import Text

from ..errors import ConfigError, ProrlError
from ..system.duration import duration
from ..system.logs import one_line
from ..wire.messages.backends import BackendList
from ..wire.messages.jobs import Outcome
from ..wire.messages.watching import ENDED_INTERVAL_S
from .backend_tables import backend_table, detail_tables
from .nodes import Seen, layout
from .status import batch_table, status_tables
from .tables import console, table
from .target import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.console import Console, RenderableType
    from rich.table import Table

    from ..client.asynchronous.client import AsyncRolloutClient
    from ..watching.overview import Overview, Update
    from ..watching.watcher import Watcher
    from ..wire.messages.batches import BatchStatus
    from ..wire.messages.watching import JobRow

VIEWS = ("overview", "jobs", "backends", "nodes", "batches")
HEADERS = ("job", "state", "task", "for", "reward", "error", "node", "backend", "attempt", "tokens", "messages")
FIRST = 5
"""Columns of jobs that fit into 80 characters."""
ALL_COLUMNS_WIDTH = 120
SHOWN = 300
"""Jobs in the table, the last to change."""
SHOWN_BATCHES = 20
"""Batches whose wait is queried."""
LAST_ENDED = 8
SHORT_ID = 15
KINDS = ("all", "under way", "ended", "not completed")
BARS = " ▁▂▃▄▅▆▇█"
INTERVALS = 60
KEY_BYTES = 1024
ESCAPE, ENTER, ERASE = "\x1b", "\n", "\x7f"
MOVES = {"\x1b[A": -1, "\x1b[B": 1, "\x1b[5~": -20, "\x1b[6~": 20}
"""Lines by which the arrows and Page Up and Page Down move."""
_KEYS = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|.", re.DOTALL)


def top(target: Target) -> None:
    """Watch a service: stages, backends, batches, nodes, and jobs as they start and end.

    1 to 5 choose what is shown: the overview, jobs, backends, nodes, batches. The arrows and Page Up and Page Down move
    in what is longer than the screen. Among jobs, f chooses which (all, under way, ended, not completed), / searches in
    all of their columns, and Escape ends that; 120 columns have room for all. q quits. A broker that does not answer is
    named, and asked again. With keys, it needs one of role operator.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("prorl top needs a terminal; `prorl status` prints the same once, also into a pipe")
    asyncio.run(_run(target.clients()))


async def _run(clients: Mapping[str, AsyncRolloutClient]) -> None:
    from rich.live import Live

    from ..watching.watcher import Watcher

    screen = console()
    shown = Top(Watcher(clients))
    with Live(shown.frame(screen), console=screen, screen=True, auto_refresh=False) as live:

        def draw() -> None:
            live.update(shown.frame(screen), refresh=True)

        def press(text: str) -> None:
            for key in _KEYS.findall(text):
                shown.press(key)
            draw()

        with _pressed_keys(press):
            following = asyncio.create_task(shown.follow(draw))
            quitting = asyncio.create_task(shown.quitting.wait())
            try:
                await asyncio.wait({following, quitting}, return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    following.result()
            finally:
                following.cancel()
                quitting.cancel()
                await asyncio.gather(following, quitting, return_exceptions=True)
                await asyncio.gather(*(client.close() for client in clients.values()))


@contextmanager
def _pressed_keys(press: Callable[[str], None]) -> Iterator[None]:
    """Call `press` with each typed key; restores the terminal at the end."""
    import termios
    import tty

    terminal, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    loop.add_reader(terminal, lambda: press(os.read(terminal, KEY_BYTES).decode("utf-8", "ignore")))
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


class Top:
    """The content of `prorl top`."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self.quitting = asyncio.Event()
        self._view = VIEWS[0]
        self._kind = KINDS[0]
        self._wanted = ""
        """The search text for jobs."""
        self._typing = False
        self._line = 0
        """The first visible line of the view."""
        self._rows: dict[str, JobRow] = {}
        self._overview: Overview | None = None
        self._waits_for: dict[str, str] = {}
        """The last reported waits of open batches, by id; queried while they are shown."""

    async def follow(self, draw: Callable[[], None]) -> None:
        """Apply the watcher's updates, and call `draw` after each."""
        async with self._watcher.viewer() as updates:
            async for update in updates:
                self._take(update)
                if self._view == "batches":
                    await self._ask_batches()
                draw()

    def press(self, key: str) -> None:
        """Handle a key; `q` sets `quitting`."""
        if self._typing:
            self._type(key)
        elif key == "q":
            self.quitting.set()
        elif key in MOVES:
            self._line += MOVES[key]
        elif key.isdigit() and 1 <= int(key) <= len(VIEWS):
            self._view, self._line = VIEWS[int(key) - 1], 0
        elif key == "f":
            self._view, self._kind = "jobs", KINDS[(KINDS.index(self._kind) + 1) % len(KINDS)]
        elif key == "/":
            self._view, self._typing = "jobs", True
        elif key == ESCAPE:
            self._wanted = ""

    def frame(self, screen: Console) -> SegmentLines:
        options = screen.options.update(height=None)
        head, foot = screen.render_lines(self._head(), options), screen.render_lines(self._foot(), options)
        body = screen.render_lines(self._body(screen.width), options)
        room = max(1, screen.height - len(head) - len(foot))
        self._line = max(0, min(self._line, len(body) - room))
        return SegmentLines([*head, *body[self._line : self._line + room], *foot], new_lines=True)

    def _take(self, update: Update) -> None:
        if update.reset:
            self._rows = {}
        self._rows.update((row.job_id, row) for row in update.changed)
        for job_id in update.forgotten:
            self._rows.pop(job_id, None)
        self._overview = update.overview

    def _type(self, key: str) -> None:
        if key in (ESCAPE, ENTER, "\r"):
            self._typing = False
            self._wanted = "" if key == ESCAPE else self._wanted
        elif key == ERASE:
            self._wanted = self._wanted[:-1]
        elif key.isprintable():
            self._wanted += key.lower()

    async def _ask_batches(self) -> None:
        batches = self._batches()[:SHOWN_BATCHES]
        told = await asyncio.gather(*(self._ask_batch(batch.batch_id) for batch in batches))
        self._waits_for = {batch.batch_id: what for batch, what in zip(batches, told, strict=True) if what}

    async def _ask_batch(self, batch_id: str) -> str:
        try:
            return (await self._watcher.batch(batch_id)).waits_for
        except ProrlError:  # it was closed, or its broker does not answer, which the head reports
            return self._waits_for.get(batch_id, "")

    def _batches(self) -> tuple[BatchStatus, ...]:
        return self._overview.status.batches if self._overview is not None and self._overview.status is not None else ()

    def _head(self) -> Text:
        return _head(self._overview) if self._overview is not None else Text("waiting for the service to answer …")

    def _foot(self) -> Text:
        if self._typing:
            return Text(f"/{one_line(self._wanted)}█   Enter keeps the search, Escape ends it")
        names = (Text(f"{key} {name}", "reverse" if name == self._view else "") for key, name in enumerate(VIEWS, 1))
        return Text("  ").join((*names, Text("f which"), Text("/ search"), Text("q quit")))

    def _body(self, width: int) -> RenderableType:
        seen = self._overview
        if seen is None:
            return ""
        listed = seen.backends if seen.backends is not None else BackendList("")
        match self._view:
            case "overview":
                tables = [status_tables(seen.status, listed)] if seen.status is not None else []
                ended = nlargest(LAST_ENDED, (row for row in self._rows.values() if row.place == "ended"), key=_changed)
                return Group(*tables, *([_last_ended(ended, seen.at)] if ended else []))
            case "jobs":
                return self._jobs(seen.at, width)
            case "backends":
                return Group(backend_table(listed.backends, listed.starts), detail_tables(listed.backends))
            case "batches":
                return self._batch_tables()
            case _:
                return layout(Seen(list(seen.nodes), list(seen.lost_nodes), []), details=True)

    def _jobs(self, at: float, width: int) -> Group:
        found = [row for row in self._rows.values() if _is_of(row, self._kind) and self._wanted in _text(row)]
        newest = nlargest(SHOWN, found, key=_changed)
        title = f"{len(newest)} of {len(found)} jobs, the last to change   which: {self._kind}"
        title += f"   with: {self._wanted}" if self._wanted else ""
        shown = len(HEADERS) if width >= ALL_COLUMNS_WIDTH else FIRST
        rows = (cells(row, at)[:shown] for row in newest)
        return Group(Text(one_line(title)), table(*HEADERS[:shown], rows=rows, box=None, pad_edge=False))

    def _batch_tables(self) -> RenderableType:
        batches = self._batches()
        if not batches:
            return Text("No batch is open.")
        asked = [batch.batch_id for batch in batches if batch.batch_id in self._waits_for]
        return Group(batch_table(batches), *(_waits(batch_id, self._waits_for[batch_id]) for batch_id in asked))


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


def _last_ended(rows: list[JobRow], at: float) -> Table:
    shown = [cells(row, at)[:FIRST] for row in rows]
    for name, *_ in shown:
        if len(name) > SHORT_ID:  # the jobs of a batch differ at the end
            name.plain = f"{name.plain[:4]}…{name.plain[5 - SHORT_ID :]}"
    return table(*(f"={name}" for name in HEADERS[:FIRST]), rows=shown, title="ended last")


def cells(row: JobRow, at: float) -> list[Text]:
    """Return a job's line of the table, by `HEADERS`."""
    state = str(row.outcome) if row.outcome is not None else f"{row.phase} {row.place}"
    passed_s = at - row.entered_at if row.ended_at is None else row.ended_at - row.accepted_at
    reward = f"{row.reward:.3g}" if row.reward is not None else ""
    task = f"{row.task} of {row.model}" if row.model else row.task
    first = (row.job_id, state, task, duration(max(0.0, passed_s)), reward)
    others = (row.code, row.node, row.backend, str(row.attempt), str(row.tokens or ""), str(row.turns or ""))
    style = "red" if row.outcome not in (None, Outcome.COMPLETED) else ""
    return [Text(one_line(cell), style) for cell in (*first, *others)]


def _text(row: JobRow) -> str:
    """Return the searchable text."""
    names = (
        row.job_id,
        row.task,
        row.group_id,
        row.phase,
        row.place,
        row.node,
        row.backend,
        row.outcome,
        row.code,
        row.model,
    )
    return " ".join(name or "" for name in names).lower()


def _is_of(row: JobRow, kind: str) -> bool:
    if kind == "under way":
        return row.place != "ended"
    if kind == "ended":
        return row.place == "ended"
    return kind == "all" or row.outcome not in (None, Outcome.COMPLETED)


def _changed(row: JobRow) -> float:
    return row.entered_at


def _waits(batch_id: str, what: str) -> Text:
    return Text.assemble((one_line(batch_id[:12]), "bold"), f" waits for {one_line(what)}")
