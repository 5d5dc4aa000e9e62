"""Streams to viewers who do not read."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiohttp import web
from support.ports import free_port

from prorl_zmq.gateway.dashboard import watch_stream
from prorl_zmq.gateway.dashboard.watch_stream import WatchStreams
from prorl_zmq.security.rights import ANYBODY
from prorl_zmq.watching.overview import Overview, Update
from prorl_zmq.wire.messages.jobs import Phase
from prorl_zmq.wire.messages.watching import JobRow

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

ROWS = tuple(
    JobRow(f"job-{number}", "t" * 200, "", Phase.RUN, "held", 1, accepted_at=0.0, entered_at=0.0)
    for number in range(2000)
)


class EndlessNews:
    """A watcher of a service in which all changes all the time."""

    def __init__(self) -> None:
        self.viewers = 0

    @asynccontextmanager
    async def viewer(self) -> AsyncIterator[AsyncIterator[Update]]:
        self.viewers += 1
        try:
            yield self._updates()
        finally:
            self.viewers -= 1

    async def _updates(self) -> AsyncIterator[Update]:
        while True:
            yield Update(Overview(at=0.0), ROWS, reset=False)
            await asyncio.sleep(0)


def test_a_viewer_that_never_reads_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_stream, "READ_S", 0.3)
    monkeypatch.setattr(watch_stream, "BEAT_S", 0.05)

    async def main() -> None:
        watcher = EndlessNews()
        streams = WatchStreams(watcher)  # type: ignore[arg-type]
        ended = asyncio.Event()

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                return await streams.answer(request, ANYBODY, lambda _: ANYBODY)
            finally:
                ended.set()

        app = web.Application()
        app.router.add_get("/", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(20):
            await ended.wait()
        assert watcher.viewers == 0
        writer.close()
        async with asyncio.timeout(20):  # nothing that was not read holds it up
            await runner.cleanup()

    asyncio.run(main())
