"""Memory of a process and its descendants, read from /proc: an engine's weights may be in a child."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PROCESSES_LIMIT = 256


def used_memory() -> int:
    """Return the resident bytes of this process and its descendants; shared memory counts for each.

    Where the system lists no children, only those of this process; 0 where unknown.
    """
    used, left = 0, [os.getpid()]
    for _ in range(PROCESSES_LIMIT):
        if not left:
            break
        process = PROC / str(left.pop())
        with suppress(OSError, ValueError, IndexError):  # it has exited
            used += int((process / "statm").read_bytes().split()[1]) * PAGE_BYTES
            children = process / "task" / process.name / "children"  # of the main thread, which starts an engine's
            left += map(int, children.read_bytes().split())
    return used
