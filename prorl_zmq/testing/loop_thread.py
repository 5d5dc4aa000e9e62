"""`LoopThread`: an asyncio loop in a thread, which ends within a limit whatever its tasks do."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop

from ..system.frames import place_of, task_frames, thread_frames

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

BLOCKED_LIMIT_S = 5.0
"""A loop that does not begin to close within this time is blocked by one of its tasks."""
CANCEL_LIMIT_S = 2.0
"""How long tasks may take to end that are cancelled."""
THREAD_LIMIT_S = 5.0
"""How long a thread may take to end. All limits hold on machines that are busy."""
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
                left.append(f"the thread {thread.name} at {place_of(thread_frames(thread.ident or 0))}")
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
    report.set_result([f"{task.get_name()} at {place_of(task_frames(task))}" for task in tasks])
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)
