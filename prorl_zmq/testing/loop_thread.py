"""An asyncio loop in a thread of its own, which ends within a limit whatever its tasks do."""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import FrameType

T = TypeVar("T")

CANCEL_LIMIT_S = 0.5
THREAD_LIMIT_S = 0.5
_numbers = count()


class LoopThread:
    """Runs from when it is made until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._workers = f"{name}-{next(_numbers)}-worker"
        self._executor = ThreadPoolExecutor(thread_name_prefix=self._workers)
        self._loop.set_default_executor(self._executor)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Run a coroutine on the loop and return its result.

        Raises:
            TimeoutError: it has none after `limit_s`.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(limit_s)
        finally:
            future.cancel()

    def close(self) -> list[str]:
        """Cancel what runs, and end the loop and its threads; return what did not end, and where it is."""
        try:
            left = self.call(_cancel_tasks(), 2 * CANCEL_LIMIT_S)
        except TimeoutError:
            left = []  # the thread is blocked, and is named below
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._executor.shutdown(wait=False, cancel_futures=True)
        for thread in (self._thread, *threading.enumerate()):
            if thread is self._thread or thread.name.startswith(self._workers):
                thread.join(THREAD_LIMIT_S)
                if thread.is_alive():
                    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 - there is no other way
                    left.append(f"the thread {thread.name} at {_place(frame)}")
        return left

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


async def _cancel_tasks() -> list[str]:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        _, tasks = await asyncio.wait(tasks, timeout=CANCEL_LIMIT_S)
    return [f"{task.get_name()} at {_place(_innermost(task))}" for task in tasks]


def _innermost(task: asyncio.Task[Any]) -> FrameType | None:
    """Return the frame that a task waits in: that of the last coroutine of those that await each other."""
    waits: Any = task.get_coro()
    frame = None
    while (inner := getattr(waits, "cr_frame", None)) is not None:
        frame, waits = inner, waits.cr_await
    return frame


def _place(frame: FrameType | None) -> str:
    """Return the file and line of a frame."""
    if frame is None:
        return "an unknown place"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
