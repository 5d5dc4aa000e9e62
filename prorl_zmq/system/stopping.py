"""`Stopping`: the first stop signal ends the work, the second one its cleanup."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine

TWICE_S = 0.5
"""A second signal within this time counts as the first: it may arrive from the terminal and from a parent program."""


class Stopping:
    """Each call of `stop` cancels the `until_stopped` in progress."""

    def __init__(self) -> None:
        self.stopped = False
        """A signal has arrived."""
        self._last = -TWICE_S
        self._work: asyncio.Task[None] | None = None

    def stop(self) -> None:
        now = time.monotonic()
        if now - self._last <= TWICE_S:
            return
        self._last = now
        self.stopped = True
        if self._work is not None:
            self._work.cancel()

    async def until_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run work until it ends or the next signal cancels it; return whether it ended."""
        self._work = asyncio.ensure_future(work)
        await asyncio.wait({self._work})
        done, self._work = self._work, None
        if done.cancelled():
            return False
        done.result()
        return True
