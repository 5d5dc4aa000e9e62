"""Process helpers that Python lacks: dying with the parent, signals that stop a loop, listeners."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from .open_files import lower_open_files
from .readable import readable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ISOLATED = ("-P",)
"""Interpreter flags for child processes: a file in the current folder must not hide a module of the same name."""

AUTOGROUP = Path("/proc/self/autogroup")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
_STATE, _INODE, _LISTENING = 3, 9, "0A"
"""Columns of /proc/net/tcp (proc(5)), and what the first of them says."""
_adopting = threading.Lock()
_adopting_blocks: list[bool] = []
"""For each open block: whether this process adopted orphans before."""


def die_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread that started it ends.

    Given the parent's pid, this process also ends if the parent is already gone.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)


def begin_session(parent: int, nice: int = 0) -> None:
    """Set up a forked child that leads a session: die with the parent, and lower the priority by `nice`.

    Also resets the limit of open files to the one that the parent began with.
    """
    die_with_parent(parent)
    lower_open_files(0)
    lower_priority(nice)


def lower_priority(nice: int) -> None:
    """Lower the priority of a process that leads a session, by `nice`.

    Where the kernel groups processes by session (sched_autogroup), it weighs the groups: the niceness of the process
    alone would have no effect.
    """
    niceness = os.nice(nice)
    if niceness != 0:
        with contextlib.suppress(OSError):  # no groups, not writable yet, or not permitted
            AUTOGROUP.write_text(str(niceness), encoding="ascii")


def become_subreaper() -> None:
    """Adopt all orphans below this process, so that no descendant can escape it."""
    with _adopting:
        _adopting_blocks[:1] = [True for _ in _adopting_blocks[:1]]
        _set_subreaper(adopts=True)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Adopt orphans below this process within the block; blocks of several threads may overlap."""
    with _adopting:
        _adopting_blocks.append(_is_subreaper())
        if len(_adopting_blocks) == 1:
            _set_subreaper(adopts=True)
    try:
        yield
    finally:
        with _adopting:
            was_before = _adopting_blocks[0]
            _adopting_blocks.pop()
            if not _adopting_blocks:
                _set_subreaper(adopts=was_before)


def wait_adopted(starter: int) -> None:
    """In a forked process: wait until its exiting parent has exited, and another process has adopted this one."""
    with contextlib.suppress(ProcessLookupError):
        end = os.pidfd_open(starter)
        try:
            if os.getppid() == starter:
                readable([end])
        finally:
            os.close(end)


def _is_subreaper() -> bool:
    adopts = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(adopts))
    return bool(adopts.value)


def _set_subreaper(*, adopts: bool) -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopts))


def _prctl(option: int, argument: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextlib.contextmanager
def stop_signals(stop: Callable[[], None], *more: signal.Signals) -> Iterator[None]:
    """Call `stop` on SIGTERM, SIGINT and `more` while the block runs on the current asyncio loop."""
    import asyncio  # later: commands without an event loop do not need it

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT, *more)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def listens_at_tcp(pid: int) -> bool:
    """Return whether a process of this user accepts TCP connections; False once it has exited."""
    place = Path(f"/proc/{pid}")
    try:
        tables = "".join((place / "net" / name).read_text(encoding="ascii") for name in ("tcp", "tcp6"))
        fields = (line.split() for line in tables.splitlines())
        listening = {f"socket:[{row[_INODE]}]" for row in fields if row[_STATE] == _LISTENING}
        for each in (place / "fd").iterdir():
            with contextlib.suppress(OSError):  # just closed
                if str(each.readlink()) in listening:
                    return True
    except OSError:
        pass
    return False
