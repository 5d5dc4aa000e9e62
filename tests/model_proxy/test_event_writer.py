"""A client that reads nothing of a stream."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

from prorl_zmq.model_proxy import event_writer
from prorl_zmq.model_proxy.event_writer import EventWriter, finished

if TYPE_CHECKING:
    import pytest


class Unread:
    """A response whose connection takes no bytes."""

    prepared = True

    async def write(self, _: bytes) -> None:
        await asyncio.Event().wait()

    async def write_eof(self) -> None:
        await asyncio.Event().wait()


def test_the_connection_of_a_client_that_reads_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_writer, "READ_S", 0.01)
    unread: Any = Unread()
    requests: list[Any] = [SimpleNamespace(transport=Mock()) for _ in range(2)]
    writer = EventWriter(requests[0], 1.0)
    writer.response = unread
    asyncio.run(writer.write(b"data: 1\n\n"))
    assert asyncio.run(finished(requests[1], unread)) is False
    for request in requests:
        request.transport.abort.assert_called_once_with()
