"""An asyncio loop in a thread of its own, which ends within a limit whatever its tasks do."""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import FrameType

T = TypeVar("T")

BLOCKED_LIMIT_S = 5.0
"""A loop that does not begin to close within this time is blocked by one of its tasks."""
CANCEL_LIMIT_S = 2.0
"""How long tasks may take to end that are cancelled."""
THREAD_LIMIT_S = 5.0
"""How long a thread may take to end. All limits hold on machines that are busy."""
LIBRARY = sysconfig.get_path("stdlib")
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

    def close(self, last: Coroutine[Any, Any, None], limit_s: float) -> list[str]:
        """Run a last coroutine for at most `limit_s`, cancel all tasks, and end the loop and its threads.

        Returns what did not end, and where it is; the loop ends once that does.
        """
        begun = threading.Event()
        report: Future[list[str]] = Future()
        ending = asyncio.run_coroutine_threadsafe(_end(last, limit_s, begun, report), self._loop)
        ending.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        left: list[str] = []
        if begun.wait(BLOCKED_LIMIT_S):
            with suppress(TimeoutError):
                left = report.result(limit_s + 2 * CANCEL_LIMIT_S)
        self._executor.shutdown(wait=False, cancel_futures=True)
        ours = [] if left else [self._thread]
        ours += [thread for thread in threading.enumerate() if thread.name.startswith(self._workers)]
        for thread in ours:
            thread.join(THREAD_LIMIT_S)
            if thread.is_alive():
                left.append(f"the thread {thread.name} at {_place(_thread_frames(thread))}")
        return left

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


async def _end(
    last: Coroutine[Any, Any, None], limit_s: float, begun: threading.Event, report: Future[list[str]]
) -> None:
    """Cancel all tasks; report those that do not end, and wait for them."""
    begun.set()
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await last
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        _, tasks = await asyncio.wait(tasks, timeout=CANCEL_LIMIT_S)
    report.set_result([f"{task.get_name()} at {_place(_task_frames(task))}" for task in tasks])
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)


def _task_frames(task: asyncio.Task[Any]) -> list[FrameType]:
    """Return the frames of the coroutines that await each other, the innermost last."""
    frames: list[FrameType] = []
    waits: Any = task.get_coro()
    while (frame := getattr(waits, "cr_frame", None)) is not None:
        frames.append(frame)
        waits = waits.cr_await
    return frames


def _thread_frames(thread: threading.Thread) -> list[FrameType]:
    """Return the frames of a thread, the innermost last."""
    frames: list[FrameType] = []
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 - there is no other way
    while frame is not None:
        frames.insert(0, frame)
        frame = frame.f_back
    return frames


def _place(frames: list[FrameType]) -> str:
    """Return the file and line of the innermost frame that is not in Python's own library, if there is one."""
    places = [(frame.f_code.co_filename, frame.f_lineno) for frame in frames]
    others = [place for place in places if not place[0].startswith(LIBRARY) or "site-packages" in place[0]]
    return "{}:{}".format(*(others or places or [("an unknown place", 0)])[-1])
