"""The connection from a stage process to one execution server: numbered requests, any at a time, each answered once.

When the server dies, every request that waits gets `SandboxFailed`, and so do all later ones. A cancelled request first
ends on the server, if that answers in time.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import msgspec

from ...errors import ErrorInfo, InternalError, InvalidToolCall, SandboxFailed, from_info
from ...system.unix_peers import peer_problem
from . import messages
from .calls import REQUESTS, RESULTS, SandboxCalls

if TYPE_CHECKING:
    from pathlib import Path

    from ..sessions.bash_session import BashResult
    from ..sessions.cell_session import CellResult
    from .messages import ExecResult

CONNECT_LIMIT_S = 10.0
CANCEL_LIMIT_S = 10.0
"""How long a cancelled request may take to end on the server."""
P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate[SandboxCalls, P], Coroutine[Any, Any, T]]


class ExecutionClient(messages.Line):
    """A connection; made by `connect`, ended by `close`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._gone = f"the execution server of the sandbox {name} is gone"
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._lost: Callable[[], None] | None = None
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
            with messages.short_path(path) as address:
                connection = socket.socket(socket.AF_UNIX)
                try:
                    connection.setblocking(False)
                    async with asyncio.timeout(CONNECT_LIMIT_S):
                        await loop.sock_connect(connection, address)
                        if problem := peer_problem(connection):
                            raise SandboxFailed(f"the sandbox {path.name} is not ours: {problem}")
                        await loop.create_unix_connection(lambda: client, sock=connection)
                except BaseException:
                    connection.close()
                    raise
        except (OSError, TimeoutError) as error:
            raise SandboxFailed(f"the sandbox {path.name} is gone: {error}") from error
        return client

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Call back once when the server closes the connection, or dies."""
        self._lost = callback

    async def call(self, method: Method[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the server's `SandboxCalls`.

        Raises:
            SandboxFailed: the server is gone.
            ProrlError: the method raised it; an `InvalidToolCall` for a `ValueError`, and for an argument that cannot
                be sent; a `MalformedMessage` for one that the method does not take.
        """
        name = method.__name__
        result: T = await self.ask(REQUESTS[name](*args, **kwargs), RESULTS[name])
        return result

    async def ask(self, request: msgspec.Struct, returns: Any = None) -> Any:
        """Send a request; return its result, which is of the type `returns` (see `call`)."""
        number, reply = self._request(request)
        try:
            packed = await asyncio.shield(reply)
        except asyncio.CancelledError:
            self.send(number, messages.encode(messages.Cancel()))
            with suppress(asyncio.CancelledError):
                await asyncio.wait((reply,), timeout=CANCEL_LIMIT_S)
            raise
        finally:
            self._waiting.pop(number, None)
            if reply.done() and not reply.cancelled():
                reply.exception()  # seen
        failed = packed.startswith(messages.ERROR)
        if not failed and not packed.startswith(messages.RESULT):
            raise InternalError(f"an execution server's reply cannot be read: it begins with {packed[:1]!r}")
        try:
            result = msgspec.msgpack.decode(memoryview(packed)[1:], type=ErrorInfo if failed else returns)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise InternalError(f"an execution server's reply cannot be read: {error}") from error
        if failed:
            raise from_info(result)
        return result

    def tell(self, request: msgspec.Struct) -> None:
        with suppress(SandboxFailed):
            _, reply = self._request(request)
            reply.add_done_callback(lambda done: done.cancelled() or done.exception())

    def close(self) -> None:
        self._lost = None
        self.drop()

    async def wait_closed(self) -> None:
        """Wait until the connection is closed and its descriptor free."""
        if self._transport is not None:
            await asyncio.shield(self._disconnected)

    def _request(self, request: msgspec.Struct) -> tuple[int, asyncio.Future[bytes]]:
        if self.closed:
            raise SandboxFailed(self._gone)
        self._number += 1
        try:
            packed = messages.encode(request)
        except (UnicodeEncodeError, OverflowError) as error:
            raise InvalidToolCall(f"an argument cannot be sent: {error}") from error
        if len(packed) > messages.FRAME_LIMIT_BYTES:
            limit = messages.UPLOAD_LIMIT_BYTES
            raise SandboxFailed(f"a request has {len(packed)} bytes; at most {limit} are taken", reason="size")
        reply = self._waiting[self._number] = self._loop.create_future()
        self.send(self._number, packed)
        return self._number, reply

    def received(self, number: int, content: bytes) -> None:
        reply = self._waiting.pop(number, None)
        if reply is not None and not reply.done():
            reply.set_result(content)

    def connection_lost(self, error: Exception | None) -> None:
        del error
        if not self._disconnected.done():
            self._disconnected.set_result(None)
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(SandboxFailed(self._gone))
        self._waiting.clear()
        lost, self._lost = self._lost, None
        if lost is not None:
            lost()


class RemoteSession:
    """A tool session of the server. The caller that started it closes it, or the sandbox does."""

    def __init__(self, client: ExecutionClient, number: int) -> None:
        self._client = client
        self.number = number

    async def _call(self, method: Method[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await self._client.call(method, *args, **kwargs)
        except InvalidToolCall as error:
            raise ValueError(error.message) from error

    async def close(self) -> None:
        """End it with all that it started; may be called again."""
        with suppress(SandboxFailed):  # it ended with its sandbox
            await self._client.call(SandboxCalls.close_session, self.number)


class RemoteBash(RemoteSession):
    """A bash (see `bash_session.BashSession`)."""

    async def run(self, command: str, timeout_s: float, wait_s: float | None = None) -> BashResult:
        return await self._call(SandboxCalls.run_bash, self.number, command, timeout_s, wait_s)

    async def send(self, data: bytes, timeout_s: float, wait_s: float | None = None) -> BashResult:
        return await self._call(SandboxCalls.send_bash, self.number, data, timeout_s, wait_s)


class RemoteProgram(RemoteSession):
    """A program whose standard input and output are non-blocking pipes of this process; the caller closes them.

    It lives until `end`, the end of the sandbox, or, if it heeds that, of its input.
    """

    def __init__(self, client: ExecutionClient, number: int, stdin: int, stdout: int) -> None:
        super().__init__(client, number)
        self.stdin, self.stdout = stdin, stdout

    async def end(self, wait_s: float = 0.0) -> ExecResult:
        """Wait up to `wait_s` for its end, and kill what is left; return its exit code and standard error."""
        return await self._call(SandboxCalls.end_program, self.number, wait_s)


class RemoteCells(RemoteSession):
    """A Python, or another kernel (see `cell_session.CellSession`)."""

    async def run(self, code: str, timeout_s: float) -> CellResult:
        return await self._call(SandboxCalls.run_cell, self.number, code, timeout_s)
