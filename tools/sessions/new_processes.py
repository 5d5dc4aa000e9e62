"""Finds the processes started inside a container since a mark, except those that older processes started.

Such a process descends from the shell or, if orphaned, from the process that adopts the container's orphans: the first
one of its namespaces, else this one. So a mark is two lists of children, which the kernel keeps: they are read in
microseconds, while a scan of all processes would dominate a small command.
"""

from __future__ import annotations

import os
from contextlib import suppress

from ..processes.process_tree import PROC, children, descendants

READ_BYTES = 256 * 1024


class NewProcesses:
    """What is new below a shell or orphaned; `close` it."""

    def __init__(self, shell: int) -> None:
        self._lists = {pid: _opened(pid) for pid in (shell, _adopter(shell))}
        self._before: set[int] = set()

    def mark(self) -> None:
        """Count all that runs now as old."""
        self._before = self._children()

    def find(self) -> list[int]:
        """Return all processes since `mark`, without those that older ones started."""
        new = [pid for pid in self._children() - self._before if pid not in self._lists]
        return [*new, *(each for pid in new for each in descendants(pid))]

    def close(self) -> None:
        for descriptor in self._lists.values():
            if descriptor >= 0:
                os.close(descriptor)
        self._lists.clear()

    def _children(self) -> set[int]:
        found: set[int] = set()
        for pid, descriptor in self._lists.items():
            if descriptor < 0:
                found.update(children(pid))
                continue
            offset = 0
            with suppress(OSError):  # it has ended
                content = b""
                while data := os.pread(descriptor, READ_BYTES, offset):
                    content += data
                    offset += len(data)
                found.update(map(int, content.split()))
        return found


def _opened(pid: int) -> int:
    """Open the kernel's list of a process's children; -1 where there is none (without CONFIG_PROC_CHILDREN)."""
    try:
        return os.open(PROC / str(pid) / "task" / str(pid) / "children", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _adopter(shell: int) -> int:
    """Return the host pid of the process that adopts the orphans of a shell's namespaces."""
    me = os.getpid()
    with suppress(OSError):
        namespace = (PROC / str(shell) / "ns" / "pid").readlink()
        if namespace != (PROC / str(me) / "ns" / "pid").readlink():
            for pid in descendants(me):
                with suppress(OSError):
                    if _number_inside(pid) == 1 and (PROC / str(pid) / "ns" / "pid").readlink() == namespace:
                        return pid
    return me


def _number_inside(pid: int) -> int:
    status = (PROC / str(pid) / "status").read_bytes()
    return int(status.partition(b"\nNSpid:")[2].partition(b"\n")[0].split()[-1])
