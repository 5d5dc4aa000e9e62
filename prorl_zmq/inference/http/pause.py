"""The pause of one server for new weights: it generates nothing for this engine from the pause's begin until its end.

A server that reports which weights generated which token (`Dialect.tells_spans`) is paused itself, as the mode says.
For any other server new generations wait here, and running ones finish or are aborted, so that all later tokens come
from the new weights; then the server is paused too, if it can be. If a server can neither pause nor abort (vLLM outside
of its development mode, ProRL's), its requests are cancelled here: their tokens are lost, and they are resent. Only
mode `drain` loses nothing there.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ...errors import EngineFailed
from ..engine import Generation
from .weight_updates import DRAIN_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ...wire.messages.engines import UpdateMode
    from .weight_updates import WeightUpdates

ABORT_INTERVAL_S = 1.0
"""Seconds after which generations that reached the server after an abort are aborted too."""
ABORT_S = 60.0

Answer = TypeVar("Answer")


class ServerPause:
    """Pauses one server; callers serialise all calls that change it.

    Args:
        tells_spans: whether the server reports which weights generated which token.
    """

    def __init__(self, *, tells_spans: bool) -> None:
        self._tells_spans = tells_spans
        self._open = asyncio.Event()
        """Unset while new generations wait."""
        self._open.set()
        self._removed = False
        self._running: set[asyncio.Timeout] = set()
        """One for each generation on the server; expiring it cancels the request."""
        self._idle = asyncio.Event()
        self._idle.set()
        self.begun = False
        """From a pause's begin until its end."""
        self.calls: WeightUpdates | None = None
        """The calls that paused the server; None: new generations only wait here."""
        self._keeping = False
        """Whether generations are being aborted only to continue with new weights."""

    async def passing(self, ask: Callable[[], Awaitable[Generation]]) -> tuple[Generation, bool]:
        """Request a generation from the server, after waiting for the end of a pause.

        Returns:
            The answer, or an empty one with finish reason `abort` if the pause cancelled it; and whether it is to
                continue with the new weights.

        Raises:
            EngineFailed: the engine was closed.
        """
        generation = await self.pass_one(ask)
        if generation is None:
            generation = Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), (), "abort")
        return generation, self._keeping and generation.finish_reason == "abort"

    async def pass_one(self, ask: Callable[[], Awaitable[Answer]]) -> Answer | None:
        """Request an answer from the server, after waiting for the end of a pause; None: a pause cancelled it.

        Raises:
            EngineFailed: the engine was closed.
        """
        while not self._open.is_set():
            await self._open.wait()
        if self._removed:
            raise EngineFailed("the engine was closed", unreachable=True)
        time = asyncio.timeout(None)
        self._running.add(time)
        self._idle.clear()
        try:
            async with time:
                return await ask()
        except TimeoutError:
            if not time.expired():
                raise
            return None
        finally:
            self._running.discard(time)
            if not self._running:
                self._idle.set()

    async def begin(self, calls: WeightUpdates | None, mode: UpdateMode) -> None:
        """Return when the server generates nothing for this engine; do nothing if a pause has begun already.

        Args:
            calls: of the server; None: it has none.
            mode: see `Engine.begin_update`.

        Raises:
            EngineFailed: the server could not be paused, and continues as before.
        """
        if self.begun:
            return
        self.begun, self.calls = True, calls
        try:
            if calls is not None and self._tells_spans:
                await calls.pause(mode)
            else:
                self._open.clear()
                await self._clear(calls, mode)
                if calls is not None:
                    await calls.pause("drain")
            if calls is not None:
                await calls.name_loading()
        except BaseException:
            with suppress(EngineFailed):
                await self.end()
            raise

    async def end(self) -> None:
        """Resume the server and the waiting generations; may be called again if the server failed to resume.

        Raises:
            EngineFailed: the server did not resume.
        """
        try:
            if self.calls is not None:
                await self.calls.resume()
        finally:
            self.begun = False
            self._open.set()

    def remove(self) -> None:
        """Fail all waiting generations, and all later ones."""
        self._removed = True
        self._open.set()

    async def _clear(self, calls: WeightUpdates | None, mode: UpdateMode) -> None:
        """Return when none of this engine's generations runs; new ones wait."""
        if mode == "drain":
            if not await self._until_idle(DRAIN_S):
                raise EngineFailed(f"generations did not end within {DRAIN_S:g} s; the weights are the old ones")
            return
        self._keeping = mode == "keep"
        try:
            deadline = asyncio.get_running_loop().time() + ABORT_S
            while self._running:
                if calls is not None:
                    await calls.abort_all()
                else:
                    for time in self._running:
                        time.reschedule(asyncio.get_running_loop().time())
                if await self._until_idle(ABORT_INTERVAL_S):
                    return
                if asyncio.get_running_loop().time() > deadline:
                    raise EngineFailed(
                        f"generations could not be aborted within {ABORT_S:g} s; the weights are the old ones"
                    )
        finally:
            self._keeping = False

    async def _until_idle(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
