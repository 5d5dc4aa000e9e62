"""Adds up memory files (`memfd_create`), which belong to no process and count for no limit of the kernel's.

They are found through the descriptors of a sandbox's processes. Threads usually share one descriptor table; the kernel
is asked which do not. Where a process has closed its folder in /proc to all but root (`PR_SET_DUMPABLE`), its
descriptors are copied, as the owner of its user namespace may.

Not counted, since nothing reports their size: a file in transit through a socket, one that is closed but mapped and not
yet touched, one that only io_uring or one thread of a closed process holds, and an unattached System V segment. Each is
at most `file_bytes` or an address space.
"""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

LINK_PREFIX = "/memfd:"
"""What the links in `/proc/PID/fd` of such files begin with."""
DESCRIPTORS = 50_000
"""Most descriptors that are read, in about 0.1 s; more than any honest sandbox has."""
BLOCK_BYTES = 512
"""Of `st_blocks`; see `stat(2)`."""
KCMP_NUMBERS = {"x86_64": 312, "aarch64": 272}
"""The number of the system call `kcmp`, by machine."""
_KCMP_FILES = 2
_PIDFD_GETFD = 438
"""The same number on every machine."""
_KCMP = KCMP_NUMBERS.get(os.uname().machine)
_libc = ctypes.CDLL(None, use_errno=True)


class TooManyDescriptors(Exception): ...


def memory_files_bytes(processes: Iterable[tuple[int, int]]) -> int:
    """Return the memory of all memory files that processes, given as (pid, threads), have open, each counted once.

    Processes that ended are skipped.

    Raises:
        TooManyDescriptors: they have more descriptors than are read.
    """
    sizes: dict[tuple[int, int], int] = {}
    left = DESCRIPTORS
    for pid, threads in processes:
        for folder in _tables(pid, threads):
            try:
                with os.scandir(folder) as descriptors:
                    for entry in descriptors:
                        left = _less(left)
                        _take_size(entry.path, sizes)
            except PermissionError:
                with suppress(OSError):
                    left = _take_closed(pid, sizes, left)
            except OSError:
                pass  # it has ended
    return sum(sizes.values())


def _take_size(descriptor: str, sizes: dict[tuple[int, int], int]) -> None:
    with suppress(OSError):
        # The link first: to look at a file itself may block, if a file system of the agent's has it.
        if os.readlink(descriptor).startswith(LINK_PREFIX):  # noqa: PTH115 - called often
            status = os.stat(descriptor)  # noqa: PTH116
            sizes[status.st_dev, status.st_ino] = status.st_blocks * BLOCK_BYTES


def _take_closed(pid: int, sizes: dict[tuple[int, int], int], left: int) -> int:
    """Read copies of a process's descriptors; return how many more may be read."""
    pidfd = os.pidfd_open(pid)
    try:
        with open(f"/proc/{pid}/status", "rb") as status:  # noqa: PTH123
            table = next(int(line.split()[1]) for line in status if line.startswith(b"FDSize:"))
        for number in range(table):
            left = _less(left)
            copy = _libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
            if copy >= 0:
                _take_size(f"/proc/self/fd/{copy}", sizes)
                os.close(copy)
            elif ctypes.get_errno() != errno.EBADF:
                break  # a child of ours that has not executed its program yet, and has none; or it has ended
    finally:
        os.close(pidfd)
    return left


def _less(left: int) -> int:
    if left == 0:
        raise TooManyDescriptors
    return left - 1


def _tables(pid: int, threads: int) -> list[str]:
    """Return the folders of a process's descriptor tables: one, unless some threads have their own."""
    folders = [f"/proc/{pid}/fd"]
    if threads > 1:
        with suppress(OSError):
            before = pid
            for thread in map(int, os.listdir(f"/proc/{pid}/task")):  # noqa: PTH208
                if thread != pid and not _share_descriptors(before, thread):
                    folders.append(f"/proc/{pid}/task/{thread}/fd")
                    before = thread
    return folders


def _share_descriptors(one: int, other: int) -> bool:
    return _KCMP is not None and _libc.syscall(_KCMP, one, other, _KCMP_FILES, 0, 0) == 0
