"""`EnvironmentWorker`: a process that plays rollouts of one environment, as a stage process sees it.

The worker is hung if it answers nothing, a ping included, for the limit of one call; its own limits end single calls
that wait. Silence is counted in looks of this process, which a pause of this process does not add to.
"""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import EnvironmentFailed
from .environment_template import END_LIMIT_S, START_LIMIT_S
from .worker import FRAME_LIMIT_BYTES, LENGTH

if TYPE_CHECKING:
    from collections.abc import Callable

    from .environment_template import EnvironmentTemplate
    from .guarded_process import GuardedProcess

LOOK_S = 1.0
SLACK_LOOKS = 5
"""Looks beyond the limit of a call after which a silent worker counts as hung."""


class _Answer(msgspec.Struct, frozen=True):
    n: int
    value: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""


class EnvironmentWorker(asyncio.Protocol):
    """One worker process; `start` it, and `end` it.

    Args:
        template: what it is forked from.
        lost: called once when it has ended, died or was killed, with the rollouts that may be the cause.
    """

    def __init__(self, template: EnvironmentTemplate, lost: Callable[[EnvironmentWorker, list[str]], None]) -> None:
        self.place, self.hello = template.place, template.hello
        self.rollouts: set[str] = set()
        self.retiring = False
        """It takes no further rollouts, and ends with those that it has."""
        self.idle_since = time.monotonic()
        self.failure: EnvironmentFailed | None = None
        """Why it can answer no more."""
        self.pid = 0
        self._template = template
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, tuple[asyncio.Future[msgspec.Raw], str]] = {}
        """The unanswered calls, oldest first, and their rollouts; also those whose caller was cancelled."""
        self._number = 0
        self._cleared: asyncio.Future[None] = self._loop.create_future()
        self._process: GuardedProcess | None = None
        self._rest = bytearray()
        """The beginning of a frame of which more must come."""
        self._limit_s = START_LIMIT_S
        self._silent_looks = 0

    async def start(self) -> None:
        """Start the process; return once it plays.

        Raises:
            EnvironmentFailed: it could not be started.
        """
        ready: asyncio.Future[msgspec.Raw] = self._loop.create_future()
        self._calls[0] = (ready, "")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = self._template.forked(theirs, self.fail)
            except OSError as error:
                ours.close()
                raise self._failed("died", f"cannot be forked: {error.strerror}") from error
        self._process = process
        self._transport, _ = await self._loop.create_connection(lambda: self, sock=ours)
        process.when_ended(self._died)
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(self._watched)
        self.pid = msgspec.json.decode(await self._answered(ready), type=int)
        self._limit_s = self.hello.limit_s
        self._silent_looks = 0

    @property
    def free(self) -> int:
        return 0 if self.retiring or self.failure is not None else self.hello.slots - len(self.rollouts)

    async def call(self, do: str, rollout: str, **arguments: Any) -> msgspec.Raw:
        """Call a method of a rollout's adapter.

        Raises:
            EnvironmentFailed: it raised, or the worker is dead or hung.
        """
        if self.failure is not None:
            raise self.failure
        self._number += 1
        future: asyncio.Future[msgspec.Raw] = self._loop.create_future()
        if not self._calls:
            self._silent_looks = 0
        self._calls[self._number] = (future, rollout)
        self._send({"n": self._number, "do": do, "rollout": rollout, **arguments})
        return await self._answered(future)

    def fail(self, reason: str, how: str) -> None:
        """Kill the process with all that it started; its calls fail."""
        if self.failure is not None or self._process is None:
            return
        suspects = [rollout for _, rollout in self._calls.values() if rollout]
        if self.hello.one_at_a_time:
            del suspects[1:]
        self.failure = self._failed(reason, how)
        self._watching.cancel()
        self._process.kill()
        for future, _ in self._calls.values():
            if not future.done():
                future.set_exception(self.failure)
                future.exception()  # a caller that was cancelled does not read it
        self._lost(self, suspects)
        self._process.when_ended(self._clear)

    async def end(self) -> None:
        """Close the socket, upon which the process ends; kill it if it does not."""
        if self._process is None:
            return
        if self.failure is None:
            self._transport.close()
            await self._process.wait(END_LIMIT_S)
            self.fail("cancelled", "was closed")
        await asyncio.wait((self._cleared,), timeout=END_LIMIT_S)

    # The socket

    def data_received(self, data: bytes) -> None:
        whole: bytes | bytearray = data
        if self._rest:
            self._rest += data
            whole = self._rest
        start = 0
        while start + LENGTH.size <= len(whole):
            size = LENGTH.unpack_from(whole, start)[0]
            if size > FRAME_LIMIT_BYTES:
                self.fail("died", f"sent a frame of {size} bytes")
                return
            end = start + LENGTH.size + size
            if end > len(whole):
                break
            if not self._take(bytes(whole[start + LENGTH.size : end])):
                return
            start = end
        if whole is self._rest:
            del self._rest[:start]
        else:
            self._rest += whole[start:]

    def _take(self, packed: bytes) -> bool:
        """Take an answer; return whether it is one."""
        try:
            answer = msgspec.json.decode(packed, type=_Answer)
        except msgspec.MsgspecError as error:
            self.fail("died", f"sent a frame that is no answer: {error}")
            return False
        self._silent_looks = 0
        future, _ = self._calls.pop(answer.n, (None, ""))
        if future is not None and not future.done():
            if answer.error:
                future.set_exception(self._failed("raised", answer.error, where=""))
            else:
                future.set_result(answer.value)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None or (self._process is not None and not self._process.ended):
            self._loop.call_later(END_LIMIT_S, self.fail, "died", "closed its socket")

    def _send(self, call: dict[str, Any]) -> None:
        if not self._transport.is_closing():  # otherwise the call fails with the process
            packed = msgspec.json.encode(call)
            self._transport.write(LENGTH.pack(len(packed)) + packed)

    async def _answered(self, future: asyncio.Future[msgspec.Raw]) -> msgspec.Raw:
        try:
            return await future
        except EnvironmentFailed as error:  # one error may end many calls
            raise EnvironmentFailed(error.message, **error.fields) from None

    # The process

    async def _watch(self) -> None:
        """Ping while calls are open, and kill a worker that is silent for too long."""
        while True:
            look_s = min(LOOK_S, self._limit_s / 4)
            await asyncio.sleep(look_s)
            if not self._calls:
                continue
            self._silent_looks += 1
            if self._silent_looks * look_s > self._limit_s + SLACK_LOOKS * look_s:
                self.fail("hung", f"did not answer for {self._limit_s:g} s")
                return
            if 0 not in self._calls:
                self._number += 1
                self._send({"n": self._number, "do": "ping"})

    def _watched(self, watching: asyncio.Task[None]) -> None:
        if not watching.cancelled() and (error := watching.exception()) is not None:
            self.fail("unwatched", f"could not be watched: {error!r}")

    def _died(self) -> None:
        assert self._process is not None, "it was started"
        if not self._process.words:  # its guard was killed: only the one above can end what is left
            self._template.kill()
        self.fail("died", self._process.words or "was ended, as its guard was killed")

    def _clear(self) -> None:
        assert self._process is not None, "it was started"
        self._transport.close()
        self._template.release(self._process)
        if not self._cleared.done():
            self._cleared.set_result(None)

    def _failed(self, reason: str, how: str, where: str = "its worker ") -> EnvironmentFailed:
        message = f"the environment {self.place.name}: {where}{how}"
        if where and self._process is not None and (printed := self._process.printed()):
            message += f"; the end of its output: {printed}"
        return EnvironmentFailed(message, environment=self.place.name, reason=reason)
