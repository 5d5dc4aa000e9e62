"""Limits of open files: raised for our processes, unchanged for other programs; and waiting for free descriptors.

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
"""Open files that are enough for all; more makes programs slow that go through all numbers."""
LOOK_S = 0.25

log = logging.getLogger("prorl.service")


_limits: list[tuple[int, int]] = []
"""Those that this process began with, once it has raised them."""


def raise_open_files() -> None:
    """Raise this process's limit of open files, and that of its children, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        _limits[:] = _limits or [(soft, hard)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def first_open_files() -> tuple[int, int]:
    """Return the soft and the hard limit that this process began with."""
    return _limits[0] if _limits else resource.getrlimit(resource.RLIMIT_NOFILE)


def lower_open_files(pid: int) -> None:
    """Give a process (a child; 0: this one) the limit of open files that this one began with."""
    for limits in _limits:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


async def wait_for_descriptors(count: int, limit_s: float) -> None:
    """Return once this process can open so many more files, or after `limit_s`."""
    import asyncio  # later: commands without an event loop do without

    until = time.monotonic() + limit_s
    waits = False
    while not _can_open(count) and time.monotonic() < until:
        if not waits:
            log.warning("no %d descriptors are free: waiting for some; raise the limit (ulimit -n)", count)
        waits = True
        await asyncio.sleep(LOOK_S)


def _can_open(count: int) -> bool:
    """Return whether this process can open so many more files."""
    if _highest_are_free(count):
        return True
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401 - what was opened is closed
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

    The system gives out the lowest free number, so they are, unless this process was near its limit before.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit <= count:
        return False
    numbers, free = _last_numbers(limit, count, threading.get_ident())
    return numbers.poll(0) == free


@lru_cache(maxsize=16)
def _last_numbers(limit: int, count: int, thread: int) -> tuple[select.poll, list[tuple[int, int]]]:
    """Return what asks for the last numbers below a limit, for one thread, and what it answers if all are free."""
    del thread
    numbers = select.poll()
    for number in range(limit - count, limit):
        numbers.register(number, 0)
    return numbers, [(number, select.POLLNVAL) for number in range(limit - count, limit)]
