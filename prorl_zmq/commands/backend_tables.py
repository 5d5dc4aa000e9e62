"""Tables of backends and their engine hosts, and tables that are kept up to date on the screen."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from ..system.logs import one_line
from .options import columns, console

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..wire.messages.backends import BackendStatus, EngineStart

Seen = TypeVar("Seen")
WATCH_S = 1.0
"""How often a watched table is redrawn."""
NOTHING = "–"
GIB = 2**30
NO_BACKENDS = (
    "there are none yet; an engine of `prorl serve` comes once it is ready (its lines say what it waits for), and "
    "`prorl-engine` starts a further one"
)


def show(look: Callable[[], Seen], layout: Callable[[Seen], Group], *, watch: bool) -> Seen:
    """Print what is seen once, and return it; or keep it up to date until Ctrl-C."""
    if not watch:
        seen = look()
        console().print(layout(seen))
        return seen
    from rich.live import Live

    with Live(console=console(), auto_refresh=False) as live:
        while True:
            live.update(layout(look()), refresh=True)
            threading.Event().wait(WATCH_S)


def backend_table(backends: tuple[BackendStatus, ...], starts: tuple[EngineStart, ...] = ()) -> Table:
    """Lay out what the backends are doing, and the engines that are not ready, in 80 columns."""
    name, state = Column("backend", overflow="fold", min_width=8), Column("state", no_wrap=True)
    numbers = columns("weights", "in\nflight", "tokens/s", "cache\nhits", justify="right", no_wrap=True)
    node = Column("node", overflow="fold")
    table = Table(name, state, *numbers, node, title="backends", title_justify="left", caption_justify="left")
    for status in backends:
        backend, load = status.backend, status.load
        table.add_row(
            backend.backend_id,
            status.state,
            str(backend.weight_version),
            str(status.in_flight),
            NOTHING if load is None else f"{load.tokens_per_s:,.0f}",
            NOTHING if load is None or not load.cached_tokens else f"{load.cached_tokens / load.prompt_tokens:.0%}",
            backend.node,
        )
    problems = [
        f"{status.backend.backend_id}: {status.problem}{_next_try(status)}" for status in backends if status.problem
    ]
    problems += [
        f"{status.backend.backend_id}: {status.backend.warning}" for status in backends if status.backend.warning
    ]
    for start in starts:
        table.add_row(start.backend_id, start.state, *[NOTHING] * 5)
        problems += [f"{start.backend_id}: {start.problem}"] if start.problem else []
    if problems or not table.row_count:
        lines = [one_line(problem) for problem in problems]  # text of another machine, on its way to a terminal
        table.caption = Text("\n".join(lines) or NO_BACKENDS)
    return table


def _next_try(status: BackendStatus) -> str:
    if status.next_try_s is None:
        return ""
    return f" (tried again in {status.next_try_s:.0f} s)" if status.next_try_s > 0 else " (the next job tries it)"


def detail_tables(backends: tuple[BackendStatus, ...]) -> Group:
    """Lay out what the backends are, and how their hosts do, in 80 columns."""
    return Group(_served(backends), _hosts(backends))


def _served(backends: tuple[BackendStatus, ...]) -> Table:
    numbers = columns("weight", "limit", "context", justify="right", no_wrap=True)
    texts = columns("model", "endpoint", overflow="fold")
    name = Column("backend", overflow="fold", min_width=8)
    table = Table(name, *numbers, *texts, title="details", title_justify="left")
    for status in backends:
        backend = status.backend
        context = str(backend.context_tokens) if backend.context_tokens else NOTHING
        cells = (f"{backend.weight:g}", str(backend.max_in_flight), context)
        served = (Text(one_line(backend.model or NOTHING)), Text(one_line(backend.endpoint)))
        table.add_row(backend.backend_id, *cells, *served)
    return table


def _hosts(backends: tuple[BackendStatus, ...]) -> Table:
    """Lay out what is known of engine hosts; others send no heartbeats."""
    numbers = columns("last\nheard", "lease\nleft", "memory", justify="right", no_wrap=True)
    name = Column("backend", overflow="fold", min_width=8)
    table = Table(name, *numbers, Column("version", overflow="fold"), title="engine hosts", title_justify="left")
    for status in backends:
        if status.silent_s is not None and status.load is not None:
            left_s, memory = max(0.0, status.lease_s - status.silent_s), status.load.memory_bytes
            used = f"{memory / GIB:.1f} GiB" if memory else NOTHING
            cells = (f"{status.silent_s:.1f} s", f"{left_s:.1f} s", used, one_line(status.backend.version) or NOTHING)
            table.add_row(status.backend.backend_id, *map(Text, cells))
    return table
