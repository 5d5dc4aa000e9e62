"""Progress of commands that take minutes, on standard error: drawn on a terminal, else one line now and then.

Lines go to logs of CI and of schedulers, so they hold no escape codes, whatever the environment asks for.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Self

from ..system.duration import duration
from ..system.logs import one_line, say
from .options import console

if TYPE_CHECKING:
    from collections.abc import Callable

SHORTEST_S = 10.0
LONGEST_S = 60.0
SHOWN_TEXT = 200


def pause_after(spent_s: float) -> float:
    """Return how long to wait for the next line: a tenth of the time spent, 10 to 60 seconds."""
    return min(LONGEST_S, max(SHORTEST_S, spent_s / 10))


class ProgressLines:
    """Prints `text()` and the time spent now and then, from a thread that ends with the `with` block."""

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
        """Whether lines are still to come."""
        return self._thread.is_alive()

    def line(self) -> str:
        spent = round(self.spent_s)
        return f"{one_line(self._text(), SHOWN_TEXT)}, after {duration(spent) if spent >= 60 else f'{spent} s'}"

    def _run(self) -> None:
        while not self._ended.wait(self._pause(self.spent_s)):
            try:
                say(self._program, self.line())
            except (OSError, ValueError):  # nobody reads standard error, or it is closed
                return


class RolloutProgress:
    """Progress of many rollouts: a bar on a terminal; else lines, and one at the end."""

    def __init__(self, program: str, total: int | None, completed: int = 0) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._program = program
        self._total = total
        self._completed = completed
        self._note = ""
        self._lines = None if sys.stderr.isatty() else ProgressLines(program, self._text)
        if self._lines is None:
            columns = (TextColumn("rollouts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=console(stderr=True))
            self._task = self._bar.add_task("rollouts", total=total, completed=completed, note="")

    def __enter__(self) -> Self:
        (self._lines or self._bar).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._lines is not None:
            self._lines.__exit__()
            say(self._program, self._lines.line())
        else:
            self._bar.stop()

    def update(self, note: str, advance: int = 0) -> None:
        self._completed += advance
        self._note = note
        if self._lines is None:
            self._bar.update(self._task, advance=advance, note=note)

    def _text(self) -> str:
        of = f" of {self._total}" if self._total else ""
        return f"{self._completed}{of} rollouts" + (f", {self._note}" if self._note else "")


class WorkProgress:
    """Progress of work whose length is unknown: a spinner with its last words on a terminal, else lines."""

    def __init__(self, program: str, text: str = "working") -> None:
        self._words = text
        self._lines = None if sys.stderr.isatty() else ProgressLines(program, lambda: self._words)
        if self._lines is None:
            self._screen = console(stderr=True)
            self._status = self._screen.status("")
            self.update(text)

    def __enter__(self) -> Self:
        (self._lines or self._status).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._lines is not None:
            self._lines.__exit__()
        else:
            self._status.stop()

    def update(self, text: str) -> None:
        self._words = text
        if self._lines is None:
            from rich.text import Text

            self._status.update(Text(one_line(text, max(20, self._screen.width - 4))))
