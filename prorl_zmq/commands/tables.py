"""The output of commands: tables in one style, live tables, JSON, and the brokers that do not answer.

Names and errors come from other machines, so each cell is text of one line, without markup or escape codes.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import typer

from ..system.logs import one_line, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import Console, RenderableType
    from rich.table import Column, Table
    from rich.text import Text

Seen = TypeVar("Seen")
WATCH_S = 1.0
"""Seconds between redraws of a watched table."""
NOTHING = "–"
GIB = 2**30


def console(*, stderr: bool = False) -> Console:
    """Return the console that commands print to; in a pipe or a file it cuts, wraps and colours nothing."""
    from rich.console import Console

    seen = (sys.stderr if stderr else sys.stdout).isatty()
    forced = None if seen else False  # variables such as FORCE_COLOR would put escape codes into logs
    return Console(
        stderr=stderr,
        width=None if seen else 200,
        force_terminal=forced,
        highlight=seen,
        markup=False,
        emoji=False,
    )


def size_text(size_bytes: int) -> str:
    """Write a number of bytes in the largest unit of which it has at least one."""
    value = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def table(*headers: str, rows: Iterable[Iterable[object]] = (), **how: Any) -> Table:
    """Lay out rows.

    Args:
        headers: a column each; `>name` holds numbers, `=name` is never wrapped, others are folded to fit.
        rows: the cells; a `Text` keeps its style, and None is empty.
        how: further arguments of `rich.table.Table`, such as `title`.
    """
    from rich.table import Table

    made = Table(*map(_column, headers), title_justify="left", caption_justify="left", **how)
    for row in rows:
        made.add_row(*map(text, row))
    return made


def text(value: object) -> Text:
    """Return a cell or a line of a command's output."""
    from rich.text import Text

    if isinstance(value, Text):
        return value
    return Text("\n".join(map(one_line, str("" if value is None else value).split("\n"))))


def print_table(*headers: str, rows: Iterable[Iterable[object]] = (), **how: Any) -> None:
    console().print(table(*headers, rows=rows, **how))


def show(look: Callable[[], Seen], layout: Callable[[Seen], RenderableType], *, watch: bool) -> Seen:
    """Print the result once and return it, or redraw it until Ctrl-C."""
    if not watch:
        seen = look()
        console().print(layout(seen))
        return seen
    from rich.live import Live

    with Live(console=console(), auto_refresh=False) as live:
        while True:
            live.update(layout(look()), refresh=True)
            threading.Event().wait(WATCH_S)


def print_json(content: object) -> None:
    print(msgspec.json.encode(content).decode())


def end_with(problems: Iterable[str], program: str = "") -> None:
    """End the command with code 1 if there are problems; print them under the program's name, if one is given."""
    problems = list(problems)
    for problem in problems if program else ():
        say(program, problem, logging.ERROR)
    if problems:
        raise typer.Exit(1)


def _column(header: str) -> Column:
    from rich.table import Column

    if header.startswith(">"):
        return Column(header[1:], justify="right", no_wrap=True)
    if header.startswith("="):
        return Column(header[1:], no_wrap=True)
    return Column(header, overflow="fold")
