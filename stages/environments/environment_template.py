"""`EnvironmentTemplate`: the process that has imported an environment, from which its workers are forked."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ...errors import EnvironmentFailed
from ...system.fork_server import ONE_THREAD
from ...system.open_files import first_open_files
from ...tools.processes.child import Child
from .guarded_process import GuardedProcess

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGE = Path(__file__).parents[2]
PROGRAM = """\
import importlib, sys, types
package = types.ModuleType("prorl_environment")
package.__path__ = [sys.argv[1]]
sys.modules["prorl_environment"] = package
importlib.import_module("prorl_environment.stages.environments.worker_process").main(*sys.argv[2:])
"""
"""This package's files under another name: the interpreter has none of its dependencies, and perhaps a package of its
name."""
START_LIMIT_S = 180.0
"""Seconds in which the adapter must be imported."""
END_LIMIT_S = 2.0
"""Seconds in which a process must end once its socket is closed."""
ANSWER_BYTES = 64 * 1024


class EnvironmentPlace(NamedTuple):
    """Where an environment is."""

    name: str
    python: str
    """Its interpreter."""
    adapter: str
    """`module:Class`, or `/path/file.py:Class`."""
    stamp: int = 0
    """Differs after it was installed again (see `stamp_of`)."""


def stamp_of(python: str) -> int:
    """Return when an environment's interpreter was put in its place; 0: it is not there."""
    try:
        return os.lstat(python).st_ctime_ns
    except OSError:
        return 0


class Hello(msgspec.Struct, frozen=True):
    """The first message of a template."""

    slots: int = 1
    limit_s: float = START_LIMIT_S
    is_program: bool = False
    one_at_a_time: bool = False
    """Its workers play their calls one after the other, in the order in which they were sent."""
    forks: bool = True
    """Several workers can be forked from it; otherwise it becomes the only one."""
    error: str = ""


class EnvironmentTemplate:
    """One template process; `start` it, and `end` it."""

    def __init__(self, place: EnvironmentPlace) -> None:
        self.place = place
        self.hello = Hello()
        self._workers: dict[GuardedProcess, Callable[[str, str], None]] = {}
        """Those that were forked from it and have not ended, and what is called when they are lost with it."""
        self.idle_since = time.monotonic()
        """When it was started, or its last worker has ended."""
        self.is_spent = False
        """No further worker can be forked from it."""
        self.pid = 0
        """Of the guard above it and all its workers."""
        self._process: GuardedProcess | None = None

    async def start(self) -> None:
        """Start the process; return once the environment is imported. If it fails, `end` it too.

        Raises:
            EnvironmentFailed: it could not be started or imported.
        """
        self._process = process = GuardedProcess()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        printing, line = process.descriptors
        limits = map(str, first_open_files())
        arguments = (str(PACKAGE), str(line), str(theirs.fileno()), *limits, self.place.adapter)
        try:
            self._popen = subprocess.Popen(  # noqa: ASYNC220 - `Child` waits for it
                (self.place.python, "-I", "-c", PROGRAM, *arguments),
                cwd=process.folder,
                stdin=subprocess.DEVNULL,
                stdout=printing,
                stderr=subprocess.STDOUT,
                env=ONE_THREAD | os.environ,
                pass_fds=(line, theirs.fileno()),
                start_new_session=True,
            )
        except OSError as error:
            message = f"cannot be started: {self.place.python}: {error.strerror}"
            raise self._failed(message, reason="missing") from error
        finally:
            theirs.close()
            process.listen()
        self.pid = self._popen.pid
        self._child = Child(self.pid)
        self._child.when_ended(self._reap)
        process.when_ended(self._lose_workers)
        self.hello = await self._answer()
        if self.hello.error:
            raise self._failed(self.hello.error, where="", reason="raised")
        self.idle_since = time.monotonic()

    @property
    def is_busy(self) -> bool:
        """Whether a worker that was forked from it has not ended."""
        return bool(self._workers)

    def forked(self, channel: socket.socket, lost: Callable[[str, str], None]) -> GuardedProcess:
        """Order a worker that answers on a channel; return it. `release` it when it has ended.

        Args:
            channel: the worker's end.
            lost: called with a reason and words if the worker ends with this template.

        Raises:
            OSError: the template has ended.
        """
        self.is_spent = not self.hello.forks
        assert self._process is not None, "it was started"
        process = GuardedProcess() if self.hello.forks else self._process
        try:
            descriptors = [channel.fileno(), *(process.descriptors if self.hello.forks else ())]
            socket.send_fds(self._control, [process.folder.encode()], descriptors)
        except OSError:
            self.is_spent = True
            raise
        finally:
            if self.hello.forks:
                process.listen()
        self._workers[process] = lost
        return process

    def release(self, process: GuardedProcess) -> None:
        """Take note that a worker has ended."""
        process.clear()
        self._workers.pop(process, None)
        self.idle_since = time.monotonic()

    async def end(self) -> None:
        """Close the control socket, upon which the process ends; kill it if it does not. May be called again."""
        if self._process is not None:
            self._control.close()
            if self.pid:
                if not await self._process.wait(END_LIMIT_S):
                    self.kill()
                await self._child.wait(END_LIMIT_S)
            self._free()

    def kill(self) -> None:
        """Kill the process with all its workers and all that they started."""
        self.is_spent = True
        if self._process is not None:
            self._process.kill()

    def _lose_workers(self) -> None:
        assert self._process is not None, "it was started"
        words = self._process.words or "was lost"
        for lost in [*self._workers.values()]:
            lost("died", f"was ended, as its template {words}" if self.hello.forks else words)
        self._free()

    def _free(self) -> None:
        if self._process is not None:
            self.is_spent = True
            self._control.close()
            self._process.clear()

    async def _answer(self) -> Hello:
        assert self._process is not None, "it was started"
        loop = asyncio.get_running_loop()
        hearing = asyncio.ensure_future(loop.sock_recv(self._control, ANSWER_BYTES))
        self._process.when_ended(partial(_cancel, hearing))
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await asyncio.wait((hearing,))
        except TimeoutError:
            raise self._failed(f"was not imported within {START_LIMIT_S:g} s", reason="hung") from None
        finally:
            hearing.cancel()
        if not hearing.cancelled() and hearing.exception() is None and (answer := hearing.result()):
            return msgspec.json.decode(answer, type=Hello)
        await self._process.wait(END_LIMIT_S)
        await self._child.wait(END_LIMIT_S)
        code = self._child.reap() if self._child.ended else "unknown"
        words = self._process.words or f"ended with exit code {code}"
        raise self._failed(words, reason="died")

    def _reap(self) -> None:
        self._popen.returncode = self._child.reap()
        self._child.close()

    def _failed(self, how: str, where: str = "its worker ", *, reason: str) -> EnvironmentFailed:
        message = f"the environment {self.place.name}: {where}{how}"
        if where and self._process is not None and (printed := self._process.printed()):
            message += f"; the end of its output: {printed}"
        return EnvironmentFailed(message, environment=self.place.name, reason=reason)


def _cancel(hearing: asyncio.Future[bytes]) -> None:
    hearing.cancel()
