"""The connection from a stage process to one execution server: numbered requests, any at a time, each answered once.

When the server dies, every request that waits gets `SandboxFailed`, and so do all later ones. A cancelled request ends
on the server first, as far as that answers in time.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ...errors import InternalError, SandboxFailed, from_info
from ...system.unix_peers import peer_problem
from . import messages

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CONNECT_LIMIT_S = 10.0
CANCEL_LIMIT_S = 10.0
"""How long a cancelled request may take to end on the server."""


class ExecutionClient:
    """A connection; made by `connect`, ended by `close`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._lost: Callable[[], None] | None = None
        self._transport: asyncio.Transport | None = None
        self._disconnected: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    async def connect(cls, path: Path) -> ExecutionClient:
        """Connect to the server of the sandbox whose folder is `path`.

        Raises:
            SandboxFailed: no server serves it.
        """
        client = cls(path.name)
        loop = asyncio.get_running_loop()
        try:
            folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.setblocking(False)
                # The path may be longer than a socket allows.
                async with asyncio.timeout(CONNECT_LIMIT_S):
                    await loop.sock_connect(connection, f"/proc/self/fd/{folder}/{messages.SOCKET}")
                    if problem := peer_problem(connection):
                        raise SandboxFailed(f"the sandbox {path.name} is not ours: {problem}")
                    await loop.create_unix_connection(lambda: _Protocol(client), sock=connection)
            except BaseException:
                connection.close()
                raise
            finally:
                os.close(folder)
        except (OSError, TimeoutError) as error:
            raise SandboxFailed(f"the sandbox {path.name} is gone: {error}") from error
        return client

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Call back once when the server closes the connection, or dies."""
        self._lost = callback

    async def ask(self, request: messages.Request) -> Any:
        """Send a request and return its answer.

        Raises:
            SandboxFailed: the server is gone.
            ProrlError: the server's.
        """
        number, reply = self._send(request)
        try:
            packed = await asyncio.shield(reply)
        except asyncio.CancelledError:
            self._write(messages.frame(number, messages.Cancel()))
            with suppress(asyncio.CancelledError):
                await asyncio.wait((reply,), timeout=CANCEL_LIMIT_S)
            raise
        finally:
            self._waiting.pop(number, None)
            if reply.done() and not reply.cancelled():
                reply.exception()  # seen
        try:
            answer = messages.reply_of(packed, request.answer)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise InternalError(f"an execution server's reply cannot be read: {error}") from error
        if isinstance(answer, messages.Failed):
            raise from_info(answer.error)
        return answer

    def tell(self, request: messages.Request) -> None:
        with suppress(SandboxFailed):
            _, reply = self._send(request)
            reply.add_done_callback(lambda done: done.cancelled() or done.exception())

    def close(self) -> None:
        self._lost = None
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the connection is closed and its descriptor free."""
        if self._transport is not None:
            await asyncio.shield(self._disconnected)

    def _send(self, request: messages.Request) -> tuple[int, asyncio.Future[bytes]]:
        if self.closed:
            raise SandboxFailed(f"the execution server of the sandbox {self.name} is gone")
        self._number += 1
        packed = messages.frame(self._number, request)
        if len(packed) > messages.FRAME_LIMIT_BYTES:
            limit = messages.UPLOAD_LIMIT_BYTES
            raise SandboxFailed(f"a request has {len(packed)} bytes; at most {limit} are taken", reason="size")
        reply = self._waiting[self._number] = self._loop.create_future()
        self._write(packed)
        return self._number, reply

    def _write(self, packed: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(packed)

    def connected(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def replied(self, number: int, packed: bytes) -> None:
        reply = self._waiting.pop(number, None)
        if reply is not None and not reply.done():
            reply.set_result(packed)

    def disconnected(self) -> None:
        if not self._disconnected.done():
            self._disconnected.set_result(None)
        error = SandboxFailed(f"the execution server of the sandbox {self.name} is gone")
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(error)
        self._waiting.clear()
        lost, self._lost = self._lost, None
        if lost is not None:
            lost()


class _Protocol(asyncio.Protocol):
    def __init__(self, client: ExecutionClient) -> None:
        self._client = client
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client.connected(cast("asyncio.Transport", transport))  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._received += data
        for number, packed in messages.take_frames(self._received):
            self._client.replied(number, packed)

    def connection_lost(self, error: Exception | None) -> None:
        del error
        self._client.disconnected()
