"""`Stopping`: the first stop signal ends the work, the second one its cleanup."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine

TWICE_S = 0.5
"""A second signal within this time is the first one, which came twice: from a terminal and from a program above us."""


class Stopping:
    """Each signal, which `stop` takes, ends what `until_stopped` does at the time."""

    def __init__(self) -> None:
        self.stopped = False
        """A signal has come."""
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
        """Do work to its end, or until the next signal, which cancels it; return whether it got to its end."""
        self._work = asyncio.ensure_future(work)
        await asyncio.wait({self._work})
        done, self._work = self._work, None
        if done.cancelled():
            return False
        done.result()
        return True
