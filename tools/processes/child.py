"""A child process whose end is an event, and clean-up that no cancellation interrupts.

A `Child` learns of its end from a pidfd on the event loop: nothing polls, and no signal handler is shared. asyncio's
own child watchers are not used: they reap a child at once, and its number could be another process's before what it
left behind is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from ...system.pauses import wait_running

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


class Child:
    """A direct child of this process: owns its pidfd; `close` it after `reap`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended = False
        """It has ended; it may not be reaped yet."""
        self.reaped = False
        """Its number may be another process's by now."""
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._exit_code = -1
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._on_end)

    async def wait(self, timeout_s: float) -> bool:
        await wait_running(self._end, timeout_s)
        return self.ended

    def when_ended(self, callback: Callable[[], None]) -> None:
        self._end.add_done_callback(lambda _: callback())

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def reap(self) -> int:
        """Return the exit code of the ended child; 128 + the signal's number if one ended it. May be called again."""
        if not self.reaped:
            _, status = os.waitpid(self.pid, 0)
            self.reaped = True
            code = os.waitstatus_to_exitcode(status)
            self._exit_code = code if code >= 0 else 128 - code
        return self._exit_code

    def close(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _on_end(self) -> None:
        self.ended = True
        self._loop.remove_reader(self._pidfd)
        if not self._end.done():
            self._end.set_result(None)


async def to_the_end(work: Coroutine[object, object, T]) -> T:
    """Run clean-up that has its own time limit to its end; a cancellation takes effect only then."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    result = task.result()
    if cancelled:
        raise asyncio.CancelledError
    return result
