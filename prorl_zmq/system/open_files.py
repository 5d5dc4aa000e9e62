"""Limits of open files: raised for this package's processes, unchanged for other programs; and waiting for descriptors.

Programs of agents, tasks and graders keep their limit, since `select` fails beyond 1,024 and some programs loop up to
the limit. A process without descriptors waits instead of failing fast, which would attract more work.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import select
import threading
import time
from functools import lru_cache

WANTED = 65_536
"""Enough for all processes; a larger limit slows programs that loop over all descriptors."""
LOOK_S = 0.25

log = logging.getLogger("prorl.service")


_limits: list[tuple[int, int]] = []
"""The limits that this process began with, once raised."""


def raise_open_files() -> None:
    """Raise the limit of open files of this process and its children as far as possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        _limits[:] = _limits or [(soft, hard)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def first_open_files() -> tuple[int, int]:
    """Return the soft and the hard limit that this process began with."""
    return _limits[0] if _limits else resource.getrlimit(resource.RLIMIT_NOFILE)


def lower_open_files(pid: int) -> None:
    """Reset a process (a child; 0: this one) to the limit that this process began with."""
    for limits in _limits:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


async def wait_for_descriptors(count: int, limit_s: float) -> None:
    """Return once this process can open `count` more files, or after `limit_s` seconds."""
    import asyncio  # later: commands without an event loop do not need it

    until = time.monotonic() + limit_s
    waits = False
    while not _can_open(count) and time.monotonic() < until:
        if not waits:
            log.warning("no %d descriptors are free: waiting for some; raise the limit (ulimit -n)", count)
        waits = True
        await asyncio.sleep(LOOK_S)


def _can_open(count: int) -> bool:
    """Return whether this process can open `count` more files."""
    if _highest_are_free(count):
        return True
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401 - opened files are closed on errors
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return False
        raise
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return True


def _highest_are_free(count: int) -> bool:
    """Return whether the last numbers below the limit are free, by one system call.

    The system assigns the lowest free number, so they are free unless this process was near its limit.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit <= count:
        return False
    numbers, free = _last_numbers(limit, count, threading.get_ident())
    return numbers.poll(0) == free


@lru_cache(maxsize=16)
def _last_numbers(limit: int, count: int, thread: int) -> tuple[select.poll, list[tuple[int, int]]]:
    """Return one thread's poll object for the last numbers below a limit, and its result if all are free."""
    del thread
    numbers = select.poll()
    for number in range(limit - count, limit):
        numbers.register(number, 0)
    return numbers, [(number, select.POLLNVAL) for number in range(limit - count, limit)]
