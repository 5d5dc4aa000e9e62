"""Memory files: memory that belongs to no process, because it is only open, and that no limit of the kernel's covers.

`memfd_create` makes them. They are found through the descriptors of a sandbox's processes; the threads of one share
their table of descriptors unless they take pains not to, so the kernel is asked which ones do. A process may close its
folder in /proc to all but root (`PR_SET_DUMPABLE`); then copies of its descriptors are taken, as the owner of its
user namespace may.

Left out, since nothing says how large they are: a file on its way through a socket, one that was closed while it is
mapped and not touched, one that only io_uring holds, or only one thread of such a closed process; and a segment of
System V that nobody has attached. Each is at most `file_bytes`, or a process's address space, and their number has
limits, but all together may be more than a sandbox's memory.
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
"""What the links in `/proc/PID/fd` begin with for such files, and hardly any other."""
DESCRIPTORS = 50_000
"""Most descriptors that are looked at, about 0.1 s; more than any honest sandbox's processes have."""
BLOCK_BYTES = 512
"""Of `st_blocks`; see `stat(2)`."""
KCMP_NUMBERS = {"x86_64": 312, "aarch64": 272}
"""Of the system call `kcmp`, by the kernel's name for the machine."""
_KCMP_FILES = 2
_PIDFD_GETFD = 438
"""The same number on every machine."""
_KCMP = KCMP_NUMBERS.get(os.uname().machine)
_libc = ctypes.CDLL(None, use_errno=True)


class TooManyDescriptors(Exception): ...


def memory_files_bytes(processes: Iterable[tuple[int, int]]) -> int:
    """Return the memory of all memory files that processes have open, each counted once.

    What cannot be looked at is passed over: a process that has ended, or that no command can have made.

    Raises:
        TooManyDescriptors: they have more descriptors than are looked at.
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
    """Note the size of what a link in /proc stands for, if that is a memory file."""
    with suppress(OSError):
        # The link first: to look at a file itself may block, if a file system of the agent's has it.
        if os.readlink(descriptor).startswith(LINK_PREFIX):  # noqa: PTH115 - called often
            status = os.stat(descriptor)  # noqa: PTH116
            sizes[status.st_dev, status.st_ino] = status.st_blocks * BLOCK_BYTES


def _take_closed(pid: int, sizes: dict[tuple[int, int], int], left: int) -> int:
    """Look at copies of a process's descriptors; return how many more may be looked at."""
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
    """Return the folders of a process's tables of descriptors: one, unless its threads have some of their own."""
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
