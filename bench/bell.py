"""A bell: code in the service's processes reports to the benchmark that it has reached a point, and may wait there.

The benchmark binds a Unix socket; a phase or an engine connects, sends one `Note` as a line of JSON, and may wait for
one byte before it continues. Each connection lasts as long as the phase or generation that opened it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import TYPE_CHECKING, Self

import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

LIMIT_S = 60.0
"""Longest wait for what must come."""
GO = b"!"


class Note(msgspec.Struct, frozen=True):
    """Something has come to its point."""

    what: str
    job_id: str
    at: float
    """On the machine's monotonic clock."""


class Bell:
    """Where notes arrive, for a benchmark that waits for them; `close` it.

    Args:
        path: of the socket, which is made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(LIMIT_S)
        self._listener.bind(str(path))
        self._listener.listen(256)
        self._rung: dict[str, socket.socket] = {}
        """Connections by the job that rang, until it is let go."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._rung.values():
            connection.close()
        self._listener.close()

    def wait(self, count: int) -> list[Note]:
        """Wait for so many further notes.

        Raises:
            TimeoutError: they did not come in `LIMIT_S` each.
        """
        notes = []
        for _ in range(count):
            connection, _ = self._listener.accept()
            connection.settimeout(LIMIT_S)
            note = msgspec.json.decode(connection.makefile("rb").readline(), type=Note)
            self._rung[note.job_id] = connection
            notes.append(note)
        return notes

    def let_go(self, job_id: str) -> None:
        """Let the process that rang for a job continue; it may have ended already."""
        with self._rung.pop(job_id) as connection, contextlib.suppress(BrokenPipeError):
            connection.sendall(GO)

    def wait_end(self, job_id: str) -> None:
        """Wait for the end of what rang for a job and was not let go.

        Raises:
            TimeoutError: it continues.
        """
        with self._rung.pop(job_id) as connection:
            connection.recv(1)


@contextlib.asynccontextmanager
async def rung(path: str, what: str, job_id: str) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """Ring a bell for as long as the context; gives what waits to be let go."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(msgspec.json.encode(Note(what, job_id, time.monotonic())) + b"\n")
        await writer.drain()
        yield lambda: reader.readexactly(len(GO))
    finally:
        writer.close()
