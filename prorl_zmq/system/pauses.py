"""Detects pauses of this process: it or its machine was stopped, or one task blocked it.

A process that expires silent peers must exclude its own pauses, during which their messages wait unread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from .frames import place_of, thread_frames

if TYPE_CHECKING:
    from collections.abc import Callable

PAUSE_S = 1.0
"""Shorter delays are not pauses; every limit on a peer's silence is longer."""
LOOK_S = 0.25
BLOCKED_LOOK_S, BLOCKED_LOOKS = 1.0, 5
"""Interval at which a thread checks that the loop runs, and consecutive failed checks after which the loop counts as
blocked. Checks are counted, since the thread stops together with the process."""

BLOCKED = "the event loop is blocked at %s: nothing else runs in this process until that ends"

log = logging.getLogger("prorl.service")
blocked_log = logging.getLogger("prorl.blocked")


class RunningClock:
    """`time.monotonic` without the pauses. Read it often, or announce longer waits with `waits`."""

    def __init__(self) -> None:
        self.lost_s = 0.0
        """Total length of all pauses, in seconds."""
        self._due = time.monotonic()
        """When it was last read, or must be read at the latest."""

    def now(self) -> float:
        ours = time.monotonic()
        late = ours - self._due
        if late >= PAUSE_S:
            self.lost_s += late
            log.warning(
                "this process was stopped, or busy with one thing, for %.1f s; deadlines are extended by that", late
            )
        self._due = ours
        return ours - self.lost_s

    def waits(self, seconds: float) -> None:
        """Announce that this process will wait for at most `seconds`."""
        self.now()
        self._due += seconds


async def wait_running(future: asyncio.Future[Any], limit_s: float) -> bool:
    """Wait for a future until this process has run for `limit_s`; return whether it is done. A negative limit is 0."""
    loop, limit_s = asyncio.get_running_loop(), max(0.0, limit_s)
    while not future.done():
        began, step_s = loop.time(), min(limit_s, PAUSE_S)
        await asyncio.wait((future,), timeout=step_s)
        took_s = loop.time() - began
        if took_s - step_s < PAUSE_S:
            limit_s -= took_s
            if limit_s <= 0:
                break
    return future.done()


class PauseWatch:
    """Calls `tell` with the seconds of each pause, before any timer of the running loop that became due in it.

    While something blocks the loop, a thread logs its file and line.
    """

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._look_later()
        self._closed = threading.Event()
        arguments = (threading.get_ident(),)
        self._thread = threading.Thread(target=self._find_blocked, args=arguments, name="blocked-loop", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._timer.cancel()
        self._closed.set()
        self._thread.join()

    def _find_blocked(self, loop_thread: int) -> None:
        due, looks = self._due, 0
        while not self._closed.wait(BLOCKED_LOOK_S):
            looks = looks + 1 if due == self._due else 0
            due = self._due
            if looks == BLOCKED_LOOKS:
                blocked_log.warning(BLOCKED, place_of(thread_frames(loop_thread)))

    def _look_later(self) -> None:
        self._due = self._loop.time() + LOOK_S
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        late = self._loop.time() - self._due
        self._look_later()
        if late >= PAUSE_S:
            self._tell(late)
