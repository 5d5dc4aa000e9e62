"""`ProgramLink`: an MCP server that runs in a job's sandbox, over the pipes of its standard input and output.

One message a line. The pipes lead straight to this process, so a call costs no more than the server's own time.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

from ...errors import ProrlError
from ..processes.child import to_the_end
from .session import MESSAGE_LIMIT_BYTES, Link

if TYPE_CHECKING:
    from ...wire.messages.jobs import McpServer
    from ..execution.client import RemoteProgram
    from ..execution.messages import ExecResult
    from ..sandbox.sandbox import Sandbox

UNREAD_LIMIT_BYTES = 4 * 2**20
"""Most bytes that wait for the server to read them."""
EXIT_S = 1.0
"""Seconds in which a server must end after its input was closed; then it is killed."""
SENT_SIGNALS = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM})
"""Signals that come from another process, and not from a fault of the server's own."""
WORDS = 1000
"""Characters of the end of its standard error, in errors."""


class ProgramLink(Link):
    """The pipes of one server."""

    def __init__(self, server: McpServer, sandbox: Sandbox) -> None:
        self._server, self._sandbox = server, sandbox
        self._program: RemoteProgram | None = None
        self._reader: asyncio.ReadTransport | None = None
        self._writer: asyncio.WriteTransport | None = None
        self._listening = True
        self._ended: ExecResult | None = None

    async def open(self) -> None:
        server = self._server
        program = await self._sandbox.program(server.command, server.environment, server.directory)
        self._program = program
        loop = asyncio.get_running_loop()
        stdin, stdout = os.fdopen(program.stdin, "wb", buffering=0), os.fdopen(program.stdout, "rb", buffering=0)
        writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, stdin)
        self._writer = writer
        reader, _ = await loop.connect_read_pipe(lambda: _Lines(self), stdout)
        self._reader = reader

    def send(self, message: bytes, number: int | None) -> None:
        del number
        if self._writer is None or self._writer.is_closing():
            return  # it has closed its input: the end of its output says the rest
        if self._writer.get_write_buffer_size() > UNREAD_LIMIT_BYTES:
            self.session.lost(f"does not read its input: {UNREAD_LIMIT_BYTES >> 20} MiB wait")
            return
        self._writer.write(message + b"\n")

    def listen(self, *, on: bool) -> None:
        if self._reader is None or on == self._listening or self._reader.is_closing():
            return
        self._listening = on
        if on:
            self._reader.resume_reading()
        else:
            self._reader.pause_reading()

    async def last_words(self) -> str:
        await self._end(EXIT_S)
        if self._ended is None:
            return ""
        code, words = self._ended.exit_code, self._ended.stderr.decode("utf-8", "replace").strip()[-WORDS:]
        how = f"it was killed by signal {code - 128}" if code > 128 else f"it exited with {code}"
        self.killed = not self._ended.timed_out and code - 128 in SENT_SIGNALS
        return "; ".join((() if self._ended.timed_out else (how,)) + ((f"its last words: {words}",) if words else ()))

    async def close(self) -> None:
        await to_the_end(self._close())

    async def _close(self) -> None:
        with suppress(ProrlError):  # the sandbox is gone, and the server with it
            await self._end(EXIT_S)

    async def _end(self, wait_s: float) -> None:
        for transport in (self._writer, self._reader):
            if transport is not None:
                transport.close()
        program, self._program = self._program, None
        if program is not None:
            self._ended = await program.end(wait_s)


class _Lines(asyncio.Protocol):
    """Splits a server's output into lines, and drops lines that are too long."""

    def __init__(self, link: ProgramLink) -> None:
        self._link = link
        self._buffer = bytearray()
        self._dropping = False

    def data_received(self, data: bytes) -> None:
        session = self._link.session
        searched = len(self._buffer)
        self._buffer += data
        start = 0
        while (end := self._buffer.find(b"\n", max(start, searched))) >= 0:
            if self._dropping:
                self._dropping = False
            elif line := bytes(self._buffer[start:end]).strip():
                session.received(line)
            start = end + 1
        del self._buffer[:start]
        if self._dropping:
            session.dropped(len(self._buffer))
            self._buffer.clear()
        elif len(self._buffer) > MESSAGE_LIMIT_BYTES:
            self._dropping = True
            session.too_long(len(self._buffer))
            self._buffer.clear()

    def eof_received(self) -> None:
        self._link.session.lost("ended")

    def connection_lost(self, error: Exception | None) -> None:
        del error
        self._link.session.lost("ended")
