"""Write one answer to a harness: headers with the first byte, keep-alive events, and a recorded end.

When a harness disconnects, aiohttp cancels the handler of its request; later writes are dropped.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


READ_S = 300.0
"""Time limit for one write to a slow client, in seconds."""


class EventWriter:
    """Writes the events of a stream."""

    def __init__(self, request: web.BaseRequest, keep_alive_s: float) -> None:
        self._request = request
        self._keep_alive_s = keep_alive_s
        self._pending = b""
        self.response = web.StreamResponse(headers=_HEADERS)

    @property
    def begun(self) -> bool:
        """Whether the status has been sent to the harness."""
        return self.response.prepared

    def write_later(self, events: bytes) -> None:
        """Write events with the next ones: until then the answer has no status, and may still be an error."""
        self._pending += events

    async def write(self, events: bytes) -> None:
        """Write events."""
        events, self._pending = self._pending + events, b""
        try:
            async with asyncio.timeout(READ_S):
                if not self.begun:
                    await self.response.prepare(self._request)
                await self.response.write(events)
        except TimeoutError:
            _abort(self._request)
        except ConnectionError:
            pass  # the handler is being cancelled

    async def finish(self, events: bytes) -> bool:
        """Write the last events, and return whether the connection took all."""
        await self.write(events)
        return await finished(self._request, self.response)

    @asynccontextmanager
    async def kept_alive(self, waiting: Callable[[], bytes]) -> AsyncIterator[None]:
        """Write an event now and then, as long as the block lasts."""
        keeping = asyncio.create_task(self._keep_alive(waiting))
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])

    async def _keep_alive(self, waiting: Callable[[], bytes]) -> None:
        while True:
            await asyncio.sleep(self._keep_alive_s)
            await self.write(b"" if self._pending else waiting())


async def finished(request: web.BaseRequest, response: web.StreamResponse) -> bool:
    """Send what is left of a response; return whether the connection took all of it."""
    transport = request.transport
    if transport is None:
        return False
    transport.set_write_buffer_limits(high=0)  # to drain is to empty it
    try:
        async with asyncio.timeout(READ_S):
            if not response.prepared:
                await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        _abort(request)
        return False
    except ConnectionError:
        return False
    return not transport.is_closing()


def _abort(request: web.BaseRequest) -> None:
    """Close the connection of a client that does not read, which cancels the handler."""
    if request.transport is not None:
        request.transport.abort()
