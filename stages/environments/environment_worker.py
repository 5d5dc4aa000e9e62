"""`EnvironmentWorker`: a process that plays rollouts of one environment, as a stage process sees it.

The worker is hung if it answers nothing, a ping included, for the limit of one call; its own limits end single calls
that wait. Silence is counted in looks of this process, which a pause of this process does not add to.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ...errors import EnvironmentFailed
from ...system.open_files import lower_open_files
from ...tools.processes.child import Child
from ...tools.processes.process_tree import descendants, kill
from .worker import FRAME_LIMIT_BYTES, LENGTH

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = Path(__file__).with_name("worker.py")
START_LIMIT_S = 180.0
"""Seconds in which a worker must have imported the environment's packages."""
END_LIMIT_S = 2.0
"""Seconds in which a worker must end once its socket is closed."""
LOOK_S = 1.0
SLACK_LOOKS = 5
"""Looks beyond the limit of a call after which a silent worker counts as hung."""
OUTPUT_BYTES = 64 * 1024
"""Bytes of output that are read at a time, every `OUTPUT_S`; a worker that prints more waits."""
OUTPUT_S = 0.01
WORDS = 2000
"""Characters of the end of a worker's output, in errors."""


class EnvironmentPlace(NamedTuple):
    """Where an environment is."""

    name: str
    python: str
    """Its interpreter."""
    adapter: str
    """`module:Class`, or `/path/file.py:Class`."""
    installed_at_s: float = 0.0
    """Seconds since 1970; one that is installed anew has workers of its own."""


class Hello(msgspec.Struct, frozen=True):
    """The first frame of a worker."""

    slots: int
    limit_s: float
    is_program: bool
    one_at_a_time: bool
    """It plays its calls one after the other, in the order in which they were sent."""


class _Answer(msgspec.Struct, frozen=True):
    n: int
    value: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""


class EnvironmentWorker(asyncio.Protocol):
    """One worker process; `start` it, and `end` it.

    Args:
        place: the environment.
        lost: called once when it has ended, died or was killed, with the rollouts that may be the cause.
    """

    def __init__(self, place: EnvironmentPlace, lost: Callable[[EnvironmentWorker, list[str]], None]) -> None:
        self.place = place
        self.rollouts: set[str] = set()
        self.hello = Hello(1, START_LIMIT_S, is_program=False, one_at_a_time=False)
        self.retiring = False
        """It takes no further rollouts, and ends with those that it has."""
        self.idle_since = time.monotonic()
        self.failure: EnvironmentFailed | None = None
        """Why it can answer no more."""
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, tuple[asyncio.Future[msgspec.Raw], str]] = {}
        """The unanswered calls, oldest first, and their rollouts; also those whose caller was cancelled."""
        self._number = 0
        self._cleared: asyncio.Future[None] = self._loop.create_future()
        self.pid = 0
        self._data = bytearray()
        self._output: deque[bytes] = deque(maxlen=2)
        self._silent_looks = 0

    async def start(self) -> None:
        """Start the process; return once the environment is imported.

        Raises:
            EnvironmentFailed: it could not be started or imported.
        """
        ready: asyncio.Future[msgspec.Raw] = self._loop.create_future()
        self._calls[0] = (ready, "")
        self._folder = tempfile.mkdtemp(prefix="prorl-environment-")
        ours, theirs = socket.socketpair()
        self._printed, printing = os.pipe()
        arguments = (self.place.python, "-I", str(PROGRAM), str(theirs.fileno()), str(os.getpid()))
        try:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - `Child` waits for it
                (*arguments, self.place.adapter),
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=printing,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            os.close(self._printed)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise self._failed("missing", f"cannot be started: {self.place.python}: {error.strerror}") from error
        finally:
            theirs.close()
            os.close(printing)
        self.pid = self._process.pid
        lower_open_files(self.pid)
        self._child = Child(self.pid)
        self._child.when_ended(self._died)
        os.set_blocking(self._printed, False)
        self._loop.add_reader(self._printed, self._read_output)
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(self._watched)
        self._transport, _ = await self._loop.create_connection(lambda: self, sock=ours)
        self.hello = msgspec.json.decode(await self._answered(ready), type=Hello)
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
        if self.failure is not None or not self.pid:
            return
        suspects = [rollout for _, rollout in self._calls.values() if rollout]
        if self.hello.one_at_a_time:
            del suspects[1:]
        self._read_output()
        self.failure = self._failed(reason, how)
        self._watching.cancel()
        self._kill()
        for future, _ in self._calls.values():
            if not future.done():
                future.set_exception(self.failure)
                future.exception()  # a caller that was cancelled does not read it
        self._lost(self, suspects)
        self._child.when_ended(self._clear)

    async def end(self) -> None:
        """Close the socket, upon which the process ends; kill it if it does not."""
        if not self.pid:
            return
        if self.failure is None:
            self._transport.close()
            await self._child.wait(END_LIMIT_S)
            self.fail("cancelled", "was closed")
        await asyncio.wait((self._cleared,), timeout=END_LIMIT_S)

    # The socket

    def data_received(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= LENGTH.size:
            size = LENGTH.unpack_from(self._data)[0]
            if size > FRAME_LIMIT_BYTES:
                self.fail("died", f"sent a frame of {size} bytes")
                return
            if len(self._data) < LENGTH.size + size:
                return
            packed = bytes(self._data[LENGTH.size : LENGTH.size + size])
            del self._data[: LENGTH.size + size]
            try:
                answer = msgspec.json.decode(packed, type=_Answer)
            except msgspec.MsgspecError as error:
                self.fail("died", f"sent a frame that is no answer: {error}")
                return
            self._silent_looks = 0
            future, _ = self._calls.pop(answer.n, (None, ""))
            if future is not None and not future.done():
                if answer.error:
                    future.set_exception(self._failed("raised", answer.error, where=""))
                else:
                    future.set_result(answer.value)

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None or not self._child.ended:
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
            look_s = min(LOOK_S, self.hello.limit_s / 4)
            await asyncio.sleep(look_s)
            if not self._calls:
                continue
            self._silent_looks += 1
            limit_s = self.hello.limit_s
            if self._silent_looks * look_s > limit_s + SLACK_LOOKS * look_s:
                self.fail("hung", f"did not answer for {limit_s:g} s")
                return
            if 0 not in self._calls:
                self._number += 1
                self._send({"n": self._number, "do": "ping"})

    def _watched(self, watching: asyncio.Task[None]) -> None:
        if not watching.cancelled() and (error := watching.exception()) is not None:
            self.fail("unwatched", f"could not be watched: {error!r}")

    def _read_output(self) -> None:
        self._loop.remove_reader(self._printed)
        with suppress(OSError):
            if read := os.read(self._printed, OUTPUT_BYTES):
                self._output.append(read)
                if self.failure is None:
                    self._loop.call_later(OUTPUT_S, self._listen)

    def _listen(self) -> None:
        if self.failure is None:
            self._loop.add_reader(self._printed, self._read_output)

    def _kill(self) -> None:
        """Kill the process and what it started, also if it is a zombie, which keeps the number of its group."""
        if not self._child.reaped:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            kill(*descendants(self.pid), self.pid)

    def _died(self) -> None:
        self._kill()
        code = self._process.returncode = self._child.reap()
        how = f"was ended by signal {code - 128}" if code > 128 else f"ended with exit code {code}"
        self.fail("died", how)

    def _clear(self) -> None:
        self._process.returncode = self._child.reap()
        self._child.close()
        self._transport.close()
        os.close(self._printed)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._cleared.set_result(None)

    def _failed(self, reason: str, how: str, where: str = "its worker ") -> EnvironmentFailed:
        message = f"the environment {self.place.name}: {where}{how}"
        if where and (printed := b"".join(self._output).decode(errors="replace").strip()):
            message += f"; the end of its output: {printed[-WORDS:]}"
        return EnvironmentFailed(message, environment=self.place.name, reason=reason)
