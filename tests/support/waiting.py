"""Waits in tests: until something holds, or the test fails with what it waited for."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")
WAIT_S = 60.0
LOOK_S = 0.01


def until(condition: Callable[[], T], what: str, wait_s: float = WAIT_S) -> T:
    """Wait until a condition holds; return its value."""
    deadline = time.monotonic() + wait_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {wait_s:g} s for {what}"
        time.sleep(LOOK_S)
    return value


async def until_async(condition: Callable[[], Awaitable[T]], what: str, wait_s: float = WAIT_S) -> T:
    """Wait until an awaited condition holds; return its value."""
    deadline = time.monotonic() + wait_s
    while not (value := await condition()):
        assert time.monotonic() < deadline, f"waited {wait_s:g} s for {what}"
        await asyncio.sleep(LOOK_S)
    return value
