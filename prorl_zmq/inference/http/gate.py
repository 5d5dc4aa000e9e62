"""The gate before a server: generations pass one by one, and new weights close it behind the last.

Pure asyncio, no I/O. Used for servers that do not say which weights made which token: when nothing is on the far side,
all that follows comes from the new weights.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ...errors import EngineFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Gate:
    """Counts who is on the far side, and can be shut. Made open."""

    def __init__(self) -> None:
        self._inside = 0
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._removed = False

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Be on the far side; waits while the gate is shut.

        Raises:
            EngineFailed: the gate was removed.
        """
        while not (self._open.is_set() or self._removed):
            await self._open.wait()
        if self._removed:
            raise EngineFailed("the engine was closed", unreachable=True)
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    def shut(self) -> None:
        """Let nobody pass from here on; who is inside may leave."""
        self._open.clear()

    def open(self) -> None:
        """Let all pass again."""
        self._open.set()

    async def until_empty(self, timeout_s: float) -> bool:
        """Wait until nobody is inside; False if that took too long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def remove(self) -> None:
        """Send away all who wait, and who will come."""
        self._removed = True
        self._open.set()
