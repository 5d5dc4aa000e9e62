"""`/v1/watch`: a stream of server-sent events per viewer, with the changes of a service.

The first events have all rows, the newest jobs first; later ones have changes, merged for slow viewers (see `Watcher`).
A stream ends with the gateway or its connection, when its key is revoked, or when the viewer reads nothing for
`READ_S`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from ...errors import NotAllowed
from ...wire.messages.base import new_id
from ...wire.messages.watching import JobRow, Watch
from ..http_errors import with_defaults

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...security.rights import Sender
    from ...watching.watcher import Watcher

ROWS_PER_EVENT = 2000
BEAT_S = 5.0
"""How often a stream sends a sign of life and checks its key."""
READ_S = 60.0
"""How long a viewer may take to read an event."""
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class _Event(msgspec.Struct, frozen=True, omit_defaults=True):
    overview: dict[str, object] | None = None
    """All fields of an `Overview`."""
    fields: Sequence[str] = ()
    """Names of a row's values; defaults at the end of a row are left out."""
    rows: Sequence[JobRow] = ()
    forgotten: Sequence[str] = ()
    reset: bool = False


class WatchStreams:
    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._open: set[asyncio.Task[None]] = set()

    async def answer(
        self, request: web.Request, sender: Sender, look_again: Callable[[web.Request], Sender]
    ) -> web.StreamResponse:
        """Stream until the viewer leaves; `look_again` raises once its key is revoked."""
        sender.check(Watch(new_id()))
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        work = asyncio.create_task(self._stream(request, response))
        self._open.add(work)
        try:
            while not (await asyncio.wait({work}, timeout=BEAT_S))[0]:
                look_again(request)
                await response.write(b": alive\n\n")
            if not work.cancelled():
                work.result()
        except (ConnectionError, NotAllowed):
            pass  # the viewer has left, or its key was revoked
        finally:
            work.cancel()
            self._open.discard(work)
        return response

    def end(self) -> None:
        for work in self._open:
            work.cancel()

    async def _stream(self, request: web.Request, response: web.StreamResponse) -> None:
        async with self._watcher.viewer() as updates:
            async for update in updates:
                rows = sorted(update.changed, key=lambda row: row.accepted_at, reverse=True)
                overview, fields = with_defaults(update.overview), JobRow.__struct_fields__
                events = [_Event(overview, fields, rows[:ROWS_PER_EVENT], update.forgotten, update.reset)]
                rest = range(ROWS_PER_EVENT, len(rows), ROWS_PER_EVENT)
                events += [_Event(fields=fields, rows=rows[start : start + ROWS_PER_EVENT]) for start in rest]
                for event in events:
                    await _write(request, response, b"data:" + msgspec.json.encode(event) + b"\n\n")


async def _write(request: web.Request, response: web.StreamResponse, event: bytes) -> None:
    try:
        async with asyncio.timeout(READ_S):
            await response.write(event)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()  # what waits to be sent would hold up its end
        raise ConnectionResetError("the viewer reads nothing") from None
