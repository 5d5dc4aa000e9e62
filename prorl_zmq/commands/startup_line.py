"""What `prorl serve` shows while it starts: a bar on a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..system.logs import say
from .options import console

if TYPE_CHECKING:
    from ..service.supervisor import Startup


class StartupLine:
    def __init__(self) -> None:
        self._started = time.monotonic()
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            columns = (SpinnerColumn(), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(
                *columns, TextColumn("{task.description}"), console=console(stderr=True), transient=True
            )
            self._task = self._progress.add_task("starting", total=None)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show(self, startup: Startup) -> None:
        text = f"waiting for {startup.missing}"
        if self._progress is not None:
            self._progress.update(self._task, completed=startup.there, total=startup.total, description=text)
        else:
            spent = time.monotonic() - self._started
            say("prorl serve", f"{startup.there} of {startup.total} processes ready after {spent:.0f} s, {text}")

    def close(self) -> None:
        """Take the bar away; a second call does nothing."""
        if self._progress is not None:
            self._progress.stop()
