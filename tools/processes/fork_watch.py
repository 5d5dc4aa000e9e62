"""Signals and orphans of a process with one thread that forks others and waits for orders."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from ...system.processes import become_subreaper

if TYPE_CHECKING:
    from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM)


class ForkWatch:
    """Wakes `select` when a child has ended, and adopts what a child leaves behind.

    Made once in a process, which from then on ends with the connection that its orders come from, and ignores polite
    signals.
    """

    def __init__(self) -> None:
        become_subreaper()
        self._wake, wake_end = os.pipe()
        for descriptor in (self._wake, wake_end):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)

    def fileno(self) -> int:
        return self._wake

    def clear(self) -> None:
        """Reset the wake-up; call it before the children are reaped."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)


def forked() -> None:
    """In a child: restore the default signal handlers, and lead a session of its own."""
    signal.set_wakeup_fd(-1)
    os.setsid()
    for number in (*ENDING, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler, since an ignored SIGCHLD would not wake `select`."""
    del number, frame
