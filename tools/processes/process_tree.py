"""The process tree below a process, as the host sees it, and signals to processes in it.

It reads /proc itself: `psutil` needs a scan of all processes for one list of children. It does not import asyncio,
which would dominate the start of small programs.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

PROC = Path("/proc")
READ_BYTES = 4096
FIRST_LINE_LIMIT_S = 10.0


class ProcessEntry(NamedTuple):
    pid: int
    parent: int
    session: int
    """The session's leader."""


def children(pid: int, at_most: float = math.inf) -> list[int]:
    """Return the living children of a process, oldest first, at most so many; none if it is gone."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - called often, and twice as quick
            try:
                descriptor = os.open(f"/proc/{pid}/task/{thread}/children", os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                # A kernel without CONFIG_PROC_CHILDREN, or a thread that has just ended.
                if (PROC / str(pid) / "task" / thread).exists():
                    return [entry.pid for entry in process_table() if entry.parent == pid]
                continue
            with open(descriptor, "rb", buffering=0) as children_file:  # noqa: PTH123
                found += map(int, _read_words(children_file, at_most - len(found)))
            if len(found) >= at_most:
                break
    return found


def _read_words(file: BinaryIO, at_most: float) -> list[bytes]:
    """Read up to `at_most` words, and no more: the kernel takes n² steps for n children."""
    words: list[bytes] = []
    rest = b""
    while len(words) < at_most and (data := file.read(READ_BYTES)):
        *more, rest = (rest + data).split(b" ")
        words += more
    return words if at_most == math.inf else words[: int(at_most)]


def descendants(pid: int, at_most: float = math.inf, others: frozenset[int] = frozenset()) -> list[int]:
    """Return the processes below a process, parents before children, without the trees of the children in `others`."""
    found = [child for child in children(pid, at_most + len(others)) if child not in others]
    for each in found:
        if len(found) >= at_most:
            break
        found += children(each, at_most - len(found))
    return found


def process_table() -> list[ProcessEntry]:
    """Read the whole process table without zombies."""
    table = []
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            # The name, in parentheses, may hold anything; the fields behind it are plain.
            with suppress(OSError):
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                if fields[0] not in (b"Z", b"X"):
                    table.append(ProcessEntry(int(folder.name), int(fields[1]), int(fields[3])))
    return table


def kill(*pids: int, number: int = signal.SIGKILL) -> None:
    """Signal processes below this one; those that are gone, or may not be signalled, are skipped.

    A pid may have been reused since it was read. So each is held by a pidfd, and signalled only if it is then below
    this process.
    """
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            pidfd = os.pidfd_open(pid)
            try:
                if _is_below(pid):
                    signal.pidfd_send_signal(pidfd, number)
            finally:
                os.close(pidfd)


def _is_below(pid: int) -> bool:
    me = os.getpid()
    with suppress(OSError):
        while pid > 1:
            pid = int((PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[1])
            if pid == me:
                return True
    return False


def first_line(command: list[str]) -> str:
    """Return the first line that a command prints; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FIRST_LINE_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""
