"""The command lines of processes that may be ending: reading a zombie's raises, in some containers for ever."""

from __future__ import annotations

import psutil


def words_of(process: psutil.Process) -> list[str]:
    """Empty, if it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # of which a zombie is a kind
        return []


def line_of(process: psutil.Process) -> str:
    """Empty, if it has ended."""
    return " ".join(words_of(process))
