"""The command lines of processes that may be ending: reading a zombie's raises, in some containers for ever."""

from __future__ import annotations

import time

import psutil

PATIENCE_S = 1.0


def words_of(process: psutil.Process) -> list[str]:
    """Empty, if it has ended."""
    until = time.monotonic() + PATIENCE_S
    try:
        # One that begins has none until its program is loaded, which may be after its start has returned.
        while not (words := process.cmdline()) and time.monotonic() < until:
            time.sleep(0.001)
    except psutil.NoSuchProcess:  # of which a zombie is a kind
        return []
    return words


def line_of(process: psutil.Process) -> str:
    """Empty, if it has ended."""
    return " ".join(words_of(process))
