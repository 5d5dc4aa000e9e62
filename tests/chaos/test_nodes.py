"""The link of bench/chaos.py: that a cut is one, and that what was held arrives."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from chaos_nodes import Proxy


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100):
        writer.write(data)
    writer.close()


def test_a_proxy_that_is_held_forwards_nothing_and_then_everything() -> None:
    async def main() -> None:
        server = await asyncio.start_server(_echo, "127.0.0.1", 0)
        proxy = Proxy(server.sockets[0].getsockname()[1])
        await proxy.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"one")
        assert await asyncio.wait_for(reader.readexactly(3), 10) == b"one"

        proxy.hold()
        writer.write(b"two")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(1), 0.2)
        other_reader, other = await asyncio.open_connection("127.0.0.1", proxy.port)
        other.write(b"six")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(other_reader.readexactly(1), 0.2)

        proxy.release()
        assert await asyncio.wait_for(reader.readexactly(3), 10) == b"two"
        assert await asyncio.wait_for(other_reader.readexactly(3), 10) == b"six"
        for each in (writer, other):
            each.close()
        await proxy.close()
        assert await asyncio.wait_for(reader.read(), 10) == b""
        server.close()
        await server.wait_closed()

    asyncio.run(main())
