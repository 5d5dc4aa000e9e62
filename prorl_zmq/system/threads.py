"""Runs blocking work outside of an asyncio loop, such as reading a file on a network that may hang."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")


async def run_aside(function: Callable[..., Result], *arguments: object) -> Result:
    """Call a function in a daemon thread: unlike an executor's, it does not delay the process's exit.

    Cancelling leaves the thread running.
    """
    done: Future[Result] = Future()
    done.set_running_or_notify_cancel()

    def call() -> None:
        try:
            done.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            done.set_exception(error)

    Thread(target=call, name=function.__name__, daemon=True).start()
    return await asyncio.wrap_future(done)
