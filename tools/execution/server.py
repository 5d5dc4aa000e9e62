"""The execution server: one small process per sandbox that owns its container and tool sessions.

It is outside the container. Inside, it would need an interpreter in every image, and the model could stop it, trace it
and read what it holds; outside, it needs only `/bin/sh` in the image, and the model cannot see it. A terminal's program
joins the container on its own (see `containers.container`), so being outside costs nothing per action.

    Unix stream socket SANDBOX/server.sock    clients: the stage processes of the node that work with the sandbox

One client holds the sandbox, by `Take`, and renews its lease. When the lease expires, since its holder died or hangs,
the server ends the container, removes the sandbox's folder and ends. When the server itself is killed, the kernel kills
the container's runtime (`namespaced`), and the spawner removes what is left.

It has one thread and starts no other, since it forks. It keeps nothing on disk.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, cast

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
from .request_handler import SandboxRequestHandler
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
        self._handler = SandboxRequestHandler(self._container)
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
        """Start the container, serve until the lease expires, a client closes the sandbox, or SIGTERM; then end it all.

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
            os.unlink(messages.SOCKET)  # noqa: PTH108 - relative on purpose; the lock says that nobody serves it
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
            if each.name not in (LOCK, messages.SOCKET, SPEC):  # whoever attaches is told why it ended
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
            request = messages.requests.decode(packed)
        except msgspec.MsgspecError as error:
            failure = MalformedMessage(f"a call of the sandbox has an argument of a wrong type: {error}")
            connection.reply(number, messages.Failed(failure.info()))
            return
        key = (connection, number)
        if isinstance(request, messages.Cancel):
            if key in self._tasks:
                self._tasks[key].cancel()
            return
        if isinstance(request, messages.Close):
            connection.finish_with(number, messages.Done())
            self._end()
            return
        if isinstance(request, messages.Renew):
            if connection is self._holder:
                self._renew()
            connection.reply(number, messages.Failed(self._broken.info()) if self._broken else messages.Done())
            return
        task = self._tasks[key] = asyncio.get_running_loop().create_task(self._answer(connection, number, request))
        task.add_done_callback(lambda done: self._done(key, done))
        if len(self._tasks) == 1:
            self._watch.hurry()

    def _done(self, key: tuple[_Connection, int], task: asyncio.Task[None]) -> None:
        self._tasks.pop(key, None)
        if task.cancelled():  # before its first step
            connection, number = key
            connection.reply(number, messages.Failed(Cancelled("the call was stopped").info()))

    async def _answer(self, connection: _Connection, number: int, request: messages.AnyRequest) -> None:
        reply: msgspec.Struct
        try:
            reply = await self._do(connection, request)
        except asyncio.CancelledError:
            reply = messages.Failed(Cancelled("the call was stopped").info())
        except ProrlError as error:
            reply = messages.Failed((self._broken or error).info())
        except ValueError as error:
            reply = messages.Failed(InvalidToolCall(str(error)).info())
        except Exception as error:
            log.exception("sandbox %s: %s", self._path.name, type(request).__name__)
            message = f"the execution server met {type(error).__name__}: {error}"
            reply = messages.Failed(InternalError(message).info())
        connection.reply(number, reply)

    async def _do(self, connection: _Connection, request: messages.AnyRequest) -> msgspec.Struct:
        if isinstance(request, messages.Take):
            self._take(connection, request.lease_s)
            return messages.Done()
        if isinstance(request, messages.FreeDisk):
            self._free_disk(request)
            return messages.Done()
        if self._broken is not None:
            raise self._broken
        answer = await self._handler.do(request)
        if self._broken is not None:
            raise self._broken  # what it answered was the end of its container
        return answer

    def _take(self, connection: _Connection, lease_s: float) -> None:
        before, self._holder = self._holder, connection
        if before is not None and before is not connection:
            before.drop()
        self._lease_s = lease_s
        self._renew()


class _Connection(asyncio.Protocol):
    def __init__(self, server: ExecutionServer) -> None:
        self._server = server
        self._received = bytearray()
        self._last: bytes = b""
        """The reply to send when all is done."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        self._server.connected(self)

    def connection_lost(self, error: Exception | None) -> None:
        del error
        self._server.disconnected(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        for number, packed in messages.take_frames(self._received):
            self._server.requested(self, number, packed)
        if messages.too_large(self._received):
            self.drop()

    def reply(self, number: int, reply: msgspec.Struct) -> None:
        if not self._last and not self._transport.is_closing():
            self._transport.write(messages.reply_frame(number, reply))

    def finish_with(self, number: int, reply: msgspec.Struct) -> None:
        self._last = messages.reply_frame(number, reply)

    def finish(self) -> None:
        self._transport.write(self._last)
        self._transport.close()

    def drop(self) -> None:
        self._transport.abort()
