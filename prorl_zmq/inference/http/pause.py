"""The pause of one server for new weights: nothing of ours is generated from its begin until its end.

A server that says which weights made which token (`Dialect.tells_spans`) is paused itself, as the mode says, and
reports the versions. Another one is cleared behind a gate: what runs there ends by itself or is aborted, so that all
that follows comes from the new weights; then it is paused too, if it can be. One that can neither be paused nor told to
abort (vLLM outside of its development mode, ProRL's) is let go: its requests are ended from our side, what it made of
their turns is lost, and they are asked for again; only mode `drain` loses nothing there.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from ...errors import EngineFailed
from ..engine import Generation
from .gate import Gate
from .weight_updates import DRAIN_S

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from contextlib import AbstractAsyncContextManager

    from ...wire.messages.engines import UpdateMode
    from .weight_updates import WeightUpdates

ABORT_INTERVAL_S = 1.0
"""After this, generations that were still on their way to the server when it aborted all are aborted too."""
ABORT_S = 60.0


class ServerPause:
    """Pauses one server; all calls that change it come one after the other.

    Args:
        updates: the server's calls for new weights, which it may lack; None: it has none.
        tells_spans: its answers say which weights made which tokens.
    """

    def __init__(self, updates: WeightUpdates | None, *, tells_spans: bool) -> None:
        self._updates = updates
        self._tells_spans = tells_spans
        self._gate = Gate()
        self._asking: set[asyncio.Timeout] = set()
        """Of each generation on the server; it is let go by ending its time."""
        self.begun = False
        """From a pause's begin until its end."""
        self.calls: WeightUpdates | None = None
        """What the server was paused with; None: only the gate was shut."""
        self.keeping = False
        """Generations are being aborted only to go on with new weights."""

    def passing(self) -> AbstractAsyncContextManager[None]:
        """Be on the server's side of the gate; waits while that is shut, and raises `EngineFailed` once removed."""
        return self._gate.passing()

    async def until_let_go(self, asking: Awaitable[Generation]) -> Generation:
        """Return the server's answer; one without tokens, as if it had aborted, if it was let go."""
        time = asyncio.timeout(None)
        try:
            async with time:
                self._asking.add(time)
                return await asking
        except TimeoutError:
            if not time.expired():
                raise
            return Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), (), "abort")
        finally:
            self._asking.discard(time)

    async def usable_calls(self) -> WeightUpdates | None:
        """Return the server's calls for new weights; None: it has none.

        Raises:
            EngineFailed: it does not say.
        """
        if self._updates is not None:
            try:
                await self._updates.check()
            except EngineFailed as error:
                if not error.fields.get("missing"):
                    raise
            else:
                return self._updates
        return None

    async def begin(self, calls: WeightUpdates | None, mode: UpdateMode) -> None:
        """See that nothing of ours is generated, unless that is so already.

        Args:
            calls: what the server can do; None: nothing.
            mode: what becomes of what runs.

        Raises:
            EngineFailed: it goes on as before.
        """
        if self.begun:
            return
        self.begun, self.calls = True, calls
        try:
            if calls is not None and self._tells_spans:
                await calls.pause(mode)
            else:
                self._gate.shut()
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
        """Let the server and the gate go on; may be called again if the server failed in it.

        Raises:
            EngineFailed: the server did not go on.
        """
        try:
            if self.calls is not None:
                await self.calls.resume()
        finally:
            self.begun = False
            self._gate.open()

    def leave(self) -> None:
        """Do not have the server go on: nobody knows what it does."""
        self.calls = None

    def remove(self) -> None:
        """Send away all who wait at the gate, and who will come."""
        self._gate.remove()

    async def _clear(self, calls: WeightUpdates | None, mode: UpdateMode) -> None:
        """See that none of our generations runs; the gate is shut."""
        if mode == "drain":
            if not await self._gate.until_empty(DRAIN_S):
                raise EngineFailed(f"generations did not end within {DRAIN_S:g} s; the weights are the old ones")
            return
        self.keeping = mode == "keep"
        try:
            deadline = asyncio.get_running_loop().time() + ABORT_S
            while not await self._gate.until_empty(0):
                if calls is not None:
                    await calls.abort_all()
                else:
                    self._let_go()
                if await self._gate.until_empty(ABORT_INTERVAL_S):
                    return
                if asyncio.get_running_loop().time() > deadline:
                    raise EngineFailed(
                        f"generations could not be aborted within {ABORT_S:g} s; the weights are the old ones"
                    )
        finally:
            self.keeping = False

    def _let_go(self) -> None:
        for time in self._asking:
            time.reschedule(asyncio.get_running_loop().time())
