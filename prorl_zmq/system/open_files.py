"""Waiting for free descriptors: who fails fast for want of them draws ever more work to itself, and fails that too."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from contextlib import ExitStack

LOOK_S = 0.25

log = logging.getLogger("prorl.service")


async def wait_for_descriptors(count: int, limit_s: float) -> None:
    """Return once this process can open so many more files, or after `limit_s`."""
    until = time.monotonic() + limit_s
    waits = False
    while not _can_open(count) and time.monotonic() < until:
        if not waits:
            log.warning("no %d descriptors are free: waiting for some; raise the limit (ulimit -n)", count)
        waits = True
        await asyncio.sleep(LOOK_S)


def _can_open(count: int) -> bool:
    with ExitStack() as opened:
        for _ in range(count):
            try:
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    return False
                raise
    return True
