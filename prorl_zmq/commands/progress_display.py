"""Progress of commands that take minutes, on standard error: drawn on a terminal, else a line at intervals.

Lines hold no escape codes, whatever the environment asks for: they go to logs.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Self

from ..system.duration import duration
from ..system.logs import one_line, say
from .tables import console

if TYPE_CHECKING:
    from collections.abc import Callable

SHORTEST_S = 10.0
LONGEST_S = 60.0
SHOWN_TEXT = 200


def pause_after(spent_s: float) -> float:
    """Return how long to wait for the next line: a tenth of the time spent, 10 to 60 seconds."""
    return min(LONGEST_S, max(SHORTEST_S, spent_s / 10))


class ProgressLines:
    """Prints `text()` and the elapsed time at intervals, from a thread that ends with the `with` block."""

    def __init__(self, program: str, text: Callable[[], str], pause: Callable[[float], float] = pause_after) -> None:
        self._program = program
        self._text = text
        self._pause = pause
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def line(self) -> str:
        spent = round(self.spent_s)
        return f"{one_line(self._text(), SHOWN_TEXT)}, after {duration(spent) if spent >= 60 else f'{spent} s'}"

    def _run(self) -> None:
        while not self._ended.wait(self._pause(self.spent_s)):
            try:
                say(self._program, self.line())
            except (OSError, ValueError):  # standard error is closed, or has no reader
                return


class Progress:
    """Progress of work that takes minutes.

    On a terminal it is a spinner, or a bar once the length is known; else lines, and one at the end of counted work.

    Args:
        program: begins each line.
        text: the current work; `update` replaces it.
        counted: the counted things, such as `rollouts`; empty: none.
        total: their number; None: unknown.
        completed: the number at the start.
    """

    def __init__(
        self, program: str, text: str = "working", *, counted: str = "", total: int | None = None, completed: int = 0
    ) -> None:
        self._program = program
        self._text = text
        self._counted = counted
        self._total = total
        self._completed = completed
        self._lines = None if sys.stderr.isatty() else ProgressLines(program, self._words)
        if self._lines is None:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                SpinnerColumn,
                TextColumn,
                TimeElapsedColumn,
            )

            count = (TextColumn(counted), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            note = TextColumn("{task.description}", markup=False)
            columns = (*(count if counted else (SpinnerColumn(),)), note)
            self._bar = Progress(*columns, console=console(stderr=True), transient=not counted)
            self._task = self._bar.add_task(self._note(), total=total, completed=completed)

    def __enter__(self) -> Self:
        (self._lines or self._bar).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._lines is None:
            self._bar.stop()
            return
        self._lines.__exit__()
        if self._counted:
            say(self._program, self._lines.line())

    def update(self, text: str, advance: int = 0) -> None:
        """Set the text, and add to the completed number."""
        self._completed += advance
        self._text = text
        if self._lines is None:
            self._bar.update(self._task, advance=advance, description=self._note())

    def _note(self) -> str:
        return one_line(self._text, SHOWN_TEXT)

    def _words(self) -> str:
        of = f" of {self._total}" if self._total else ""
        count = (f"{self._completed}{of} {self._counted}",) if self._counted else ()
        return ", ".join(filter(None, (*count, self._text)))
