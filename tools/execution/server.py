"""The execution server: one small process per sandbox that owns its container and tool sessions.

It runs outside the container: inside, it would need an interpreter in every image, and the model could stop, trace and
read it. Outside it needs only `/bin/sh` in the image, and it costs nothing per action, since programs join the
container on their own (see `containers.container`).

    Unix stream socket SANDBOX/server.sock    clients: the stage processes of the node that work with the sandbox

One client holds the sandbox, by `Take`, and renews its lease. When the lease expires, since its holder died or hangs,
the server ends the container, removes the sandbox's folder and ends. When the server itself is killed, the kernel kills
the container's runtime (`namespaced`), and the spawner removes the rest.

It has one thread and starts no other, since it forks. It stores nothing on disk.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import (
    Cancelled,
    EndpointInUse,
    InternalError,
    InvalidToolCall,
    MalformedMessage,
    ProrlError,
    SandboxFailed,
    SandboxLimitExceeded,
)
from ...system.pauses import PAUSE_S
from ..containers import tree
from ..containers.kinds import container_class
from ..containers.specification import SPEC
from . import messages
from .calls import SandboxCalls, decode_request
from .watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ...wire.messages.jobs import SandboxKind
    from ..containers.specification import SandboxSpec

LOCK = "server.lock"
FIRST_LEASE_S = 10.0
"""How long a new server waits for the first client."""
REMOVE_LIMIT_S = 30.0
BACKLOG = 16

log = logging.getLogger("prorl.sandbox")


class ExecutionServer:
    """Serves one sandbox; `run` returns when it has ended."""

    def __init__(self, path: Path, kind: SandboxKind, spec: SandboxSpec) -> None:
        self._path = path
        self._container = container_class(kind)(path, spec)
        self._calls = SandboxCalls(self._container)
        self._tasks: dict[tuple[_Connection, int], asyncio.Task[None]] = {}
        self._holder: _Connection | None = None
        self._connections: set[_Connection] = set()
        self._lease_s = FIRST_LEASE_S
        self._lease_timer: asyncio.TimerHandle | None = None
        self._watch = Watch(self._container, lambda: bool(self._tasks), self._break, self._end)
        self._broken: ProrlError | None = None
        """Why the container was ended for good."""

    @property
    def name(self) -> str:
        return self._path.name

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Serve until the lease expires, a client closes the sandbox, or SIGTERM; then end all of it.

        Raises:
            EndpointInUse: another server serves this sandbox.
            SandboxFailed: the container did not start, or could not be ended.
        """
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        with (self._path / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                message = f"another server already serves the sandbox {self._path.name}"
                raise EndpointInUse(message, endpoint=str(self._path / messages.SOCKET)) from None
            loop.add_signal_handler(signal.SIGTERM, self._end)
            try:
                await self._container.start()
                await self._serve(on_ready)
            finally:
                await self._close()

    async def _serve(self, on_ready: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        # The path may be longer than a socket's may be; this process has no other use for its folder.
        os.chdir(self._path)
        with suppress(FileNotFoundError):
            os.unlink(messages.SOCKET)  # noqa: PTH108 - relative on purpose; the lock excludes another server
        server = await loop.create_unix_server(partial(_Connection, self), messages.SOCKET, backlog=BACKLOG)
        self._renew()
        self._watch.start()
        try:
            on_ready()
            await self._ended
        finally:
            self._watch.stop()
            if self._lease_timer is not None:
                self._lease_timer.cancel()
            server.close()

    async def _close(self) -> None:
        """End the container and remove the folder; then answer the client that asked for it."""
        for task in list(self._tasks.values()):
            task.cancel()
        if self._tasks:
            self._container.kill_all()
            await asyncio.wait(self._tasks.values())
        try:
            await self._container.close()
        finally:
            tree.remove_tree(self._path, REMOVE_LIMIT_S)
            for connection in list(self._connections):
                connection.finish()
            await asyncio.sleep(0)  # a turn of the loop, for these words to go out

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _break(self, error: ProrlError) -> None:
        """End the container for good, and answer every request with `error` from now on."""
        log.warning("sandbox %s: %s", self._path.name, error)
        self._broken = error
        self._container.kill_all()

    def _free_disk(self, request: messages.FreeDisk) -> None:
        held = f"this sandbox held most of it ({request.size_bytes >> 20} MiB, {request.entries} files)"
        error: ProrlError = SandboxFailed(f"the disk of the sandboxes is full, and {held}", reason="disk")
        if request.own:
            error = SandboxLimitExceeded(f"the disk of the sandboxes was full: {held}", limit="disk_bytes")
        self._break(error)
        for each in list(self._path.iterdir()):
            if each.name not in (LOCK, messages.SOCKET, SPEC):  # a client that attaches learns why it ended
                with suppress(ProrlError, OSError):
                    if each.is_dir() and not each.is_symlink():
                        tree.remove_tree(each, REMOVE_LIMIT_S)
                    else:
                        each.unlink()

    def _renew(self) -> None:
        loop = asyncio.get_running_loop()
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        due = loop.time() + self._lease_s
        self._lease_timer = loop.call_at(due, self._lease_over, due)

    def _lease_over(self, due: float) -> None:
        if asyncio.get_running_loop().time() - due >= PAUSE_S:
            self._renew()  # this process was stopped, and has not read what its holder sent
        else:
            self._end()

    # What clients ask -------------------------------------------------------------------------------------------------

    def connected(self, connection: _Connection) -> None:
        self._connections.add(connection)

    def disconnected(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        for (owner, _), task in list(self._tasks.items()):
            if owner is connection:
                task.cancel()

    def requested(self, connection: _Connection, number: int, packed: bytes) -> None:
        try:
            request = decode_request(packed)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            words = f"a call of the sandbox has an invalid argument: {error}"
            connection.reply(number, MalformedMessage(words))
            return
        key = (connection, number)
        match request:
            case messages.Cancel():
                if key in self._tasks:
                    self._tasks[key].cancel()
            case messages.Close():
                connection.last = number
                self._end()
            case messages.Renew():
                if connection is self._holder:
                    self._renew()
                connection.reply(number, self._broken)
            case _ if key in self._tasks:
                connection.drop()  # two replies of one number
            case _:
                work = self._answer(connection, number, request)
                task = self._tasks[key] = asyncio.get_running_loop().create_task(work)
                task.add_done_callback(lambda done: self._done(key, done))
                if len(self._tasks) == 1:
                    self._watch.hurry()

    def _done(self, key: tuple[_Connection, int], task: asyncio.Task[None]) -> None:
        self._tasks.pop(key, None)
        if task.cancelled():  # before its first step
            connection, number = key
            connection.reply(number, Cancelled("the call was stopped"))

    async def _answer(self, connection: _Connection, number: int, request: msgspec.Struct) -> None:
        reply: Any
        try:
            reply = await self._do(connection, request)
        except asyncio.CancelledError:
            reply = Cancelled("the call was stopped")
        except ProrlError as error:
            reply = self._broken or error
        except ValueError as error:
            reply = InvalidToolCall(str(error))
        except Exception as error:
            log.exception("sandbox %s: %s", self._path.name, type(request).__name__)
            reply = InternalError(f"the execution server met {type(error).__name__}: {error}")
        connection.reply(number, reply)

    async def _do(self, connection: _Connection, request: msgspec.Struct) -> Any:
        match request:
            case messages.Take(lease_s):
                return self._take(connection, lease_s)
            case messages.FreeDisk():
                return self._free_disk(request)
        if self._broken is not None:
            raise self._broken
        result = await getattr(self._calls, type(request).__name__)(*msgspec.structs.astuple(request))
        if self._broken is not None:
            raise self._broken  # the call ended with its container
        return result

    def _take(self, connection: _Connection, lease_s: float) -> None:
        before, self._holder = self._holder, connection
        if before is not None and before is not connection:
            before.drop()
        self._lease_s = lease_s
        self._renew()


class _Connection(messages.Line):
    last: int | None = None
    """The `Close` to answer when all is done; nothing else is answered after it."""

    def __init__(self, server: ExecutionServer) -> None:
        super().__init__()
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.connected(self)

    def connection_lost(self, error: Exception | None) -> None:
        del error
        self._server.disconnected(self)

    def received(self, number: int, content: bytes) -> None:
        self._server.requested(self, number, content)

    def reply(self, number: int, result: Any) -> None:
        if self.last is None:
            self.send(number, _reply(result))

    def finish(self) -> None:
        if self.last is not None:
            self.send(self.last, messages.RESULT + messages.encode(None))
        if self._transport is not None:
            self._transport.close()


def _reply(result: Any) -> bytes:
    """Return the content of a reply; an error in place of a result that no reply can hold."""
    if isinstance(result, ProrlError):
        return messages.ERROR + messages.encode(result.info())
    try:
        content = messages.encode(result)
    except (UnicodeEncodeError, OverflowError) as error:
        return _reply(InternalError(f"a result of the sandbox cannot be sent: {error}"))
    if len(content) >= (limit := messages.FRAME_LIMIT_BYTES):
        return _reply(SandboxFailed(f"a result has {len(content)} bytes; at most {limit} can be sent", reason="size"))
    return messages.RESULT + content
