"""The base of bash and cell sessions: one process at a time, one call at a time, and how both end.

If the process ends between two calls, the next call starts another one in the same directory and reports it. A
cancelled call first ends what it runs, then raises the cancellation.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ...errors import ProrlError, SandboxBroken, ToolSessionLost
from ...system.pauses import wait_running
from ..processes.child import to_the_end
from ..processes.output import HeadTail

if TYPE_CHECKING:
    from contextlib import ExitStack

    from ..containers.container import Container
    from ..processes.child import Child


DISTURBED = frozenset({"join", "start", "time", "python", "kernel"})
"""Why a process that started before does not start now: others in the sandbox may be the reason."""


class SessionResult(Protocol):
    @property
    def restarted(self) -> bool: ...


Outcome = TypeVar("Outcome")


class SessionProcess(ABC, Generic[Outcome]):
    """One bash or interpreter: owns its process and the descriptors to it. Made by its session, ended by `close`."""

    def __init__(self, container: Container, output: HeadTail) -> None:
        self._container = container
        self._output = output
        self._child: Child
        self._resources: ExitStack
        """Its descriptors."""
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[Outcome | None] = self._loop.create_future()
        """Its outcome at the end of what it runs; None if the process ended."""
        self._freed = False
        """Its descriptors are closed; others may have their numbers by now."""

    @abstractmethod
    async def _get_ready(self) -> None:
        """Wait for its first prompt, or raise a `SandboxFailed` that says what to do."""

    async def get_ready(self) -> None:
        """Wait until it can run something; end it if it cannot."""
        try:
            await self._get_ready()
        except BaseException:
            await to_the_end(self.close())
            raise

    @property
    def ended(self) -> bool:
        return self._child.ended

    async def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the end of what it runs; return whether that came."""
        return await wait_running(self._done, timeout_s)

    def outcome(self) -> Outcome | None:
        return self._done.result()

    def kill(self) -> None:
        """Kill it and all that it started; `close` waits for their end."""
        if not self._child.reaped:
            self._container.kill(self._child.pid)

    async def close(self) -> int:
        """Kill what still runs, wait for its end, close the descriptors; return the exit code.

        Raises:
            SandboxFailed: it did not end (see `Container.end`).
        """
        try:
            return await self._container.end(self._child)
        finally:
            self._freed = True
            self._resources.close()


P = TypeVar("P", bound=SessionProcess[Any])
R = TypeVar("R", bound=SessionResult)


class ToolSession(ABC, Generic[P, R]):
    name: str
    """What error messages call it."""

    def __init__(self, container: Container, output_limit_bytes: int, directory: str) -> None:
        self._container = container
        self._output = HeadTail(output_limit_bytes)
        self._process: P | None = None
        self._directory = directory
        self._started_before = False
        self._restarted = False
        """The process ended in a cancelled call, or between two calls; the next result reports it."""
        self._closed = False
        self._one_at_a_time = asyncio.Lock()

    @abstractmethod
    def _new_process(self) -> P:
        """Start a process in `self._directory`, or raise a `SandboxFailed` that says what to do."""

    @abstractmethod
    async def _stop(self, process: P) -> None:
        """End what runs: by an interrupt, else by killing what it started, else by killing the process."""

    @abstractmethod
    async def _result(self, process: P, *, timed_out: bool) -> R:
        """Return the result of a call that has ended."""

    async def start(self) -> None:
        """Start the process. Without it, the first `run` does.

        Raises:
            SandboxFailed: it could not be started; the message says what to do, and `reason` is `image` where the
                image has no bash.
            ToolSessionLost: the session is closed.
        """
        async with self._one_at_a_time:
            await self._running_process()

    async def close(self) -> None:
        """End the process and all that it started; a call in progress gets `ToolSessionLost`. May be called again.

        Raises:
            SandboxFailed: it did not end when killed.
        """
        self._closed = True
        if self._process is not None:
            self._process.kill()
        async with self._one_at_a_time:
            if self._process is not None:
                await to_the_end(self._end(self._process))

    async def _process_for_call(self) -> P:
        try:
            return await self._running_process()
        except SandboxBroken:
            raise
        except ProrlError as error:
            raise ToolSessionLost(f"the {self.name} is lost: {error.message}") from error

    async def _running_process(self) -> P:
        if self._closed:
            raise ToolSessionLost(f"the {self.name} is closed")
        if self._process is not None and self._process.ended:  # killed, its TMOUT is over, or a thread's fault
            await to_the_end(self._end(self._process))
            self._restarted = True
        if self._process is None:
            disturbed = DISTURBED if self._started_before else frozenset({"join"})
            self._process = await self._container.begin(self._started, disturbed)
            self._started_before = True
        return self._process

    async def _started(self) -> P:
        self._output.clear()
        process = self._new_process()
        await process.get_ready()
        return process

    async def _finish(self, process: P, timeout_s: float, *, stop: bool = True) -> R | None:
        """Wait for the end of what runs, stop it at the limit, and return its result.

        Without `stop`, leave it running at the limit and return None.
        """
        try:
            ended = await process.wait(timeout_s)
            if not ended:
                if not stop:
                    return None
                await self._stop(process)
        except asyncio.CancelledError:
            await to_the_end(self._abandon(process))
            raise
        return await to_the_end(self._result(process, timed_out=not ended))

    async def _abandon(self, process: P) -> None:
        """Stop what a cancelled call ran; the next result reports whether the process was lost."""
        await self._stop(process)
        with suppress(ToolSessionLost):
            self._restarted = (await self._result(process, timed_out=False)).restarted

    async def _end(self, process: P) -> int:
        self._process = None
        return await process.close()
