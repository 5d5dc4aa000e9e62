"""`ParkedTurns`: the generations of one engine host that wait since `Parking` holds their turns back."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ...errors import EngineFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from ...wire.messages.engines import Generate
    from .parking import Parking


class ParkedTurns:
    """The parked turns; used on the host's loop.

    Args:
        parking: decides; None: the engine reports nothing of its KV cache, and no turn is parked.
        on_parked: called with the request of a turn that is parked now, and the longest time for which it is.
    """

    def __init__(self, parking: Parking[str] | None, on_parked: Callable[[str, float], None]) -> None:
        self._parking = parking
        self._on_parked = on_parked
        self._waiting: dict[str, asyncio.Future[None]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, request: Generate, tokens: int) -> AsyncIterator[float]:
        """Wait until a turn may begin; yield the seconds for which it was parked. The turn ends with the context.

        Args:
            request: the turn.
            tokens: of its prompt.

        Raises:
            EngineFailed: the host stops.
        """
        if self._parking is None:
            yield 0.0
            return
        now, turn, job_id = time.monotonic(), request.request_id, request.job_id
        is_parked = self._parking.hold(turn, job_id, now - request.age_s, tokens, now)
        try:
            if is_parked:
                await self._wait(turn)
            yield time.monotonic() - now if is_parked else 0.0
        finally:
            self._parking.withdraw(turn)
            self._parking.ended(job_id, time.monotonic())

    async def _wait(self, turn: str) -> None:
        self._waiting[turn] = asyncio.get_running_loop().create_future()
        try:
            self.tell(turn)
            await self._waiting[turn]
        finally:
            del self._waiting[turn]

    def tell(self, turn: str) -> None:
        """Call `on_parked` if a turn is parked, since one more client asks for it."""
        if turn in self._waiting and self._parking is not None:
            self._on_parked(turn, self._parking.park_s)

    def release(self, turns: Iterable[str]) -> None:
        """Let turns begin, in this order; unknown ones are ignored."""
        for turn in turns:
            if turn in self._waiting and not self._waiting[turn].done():
                self._waiting[turn].set_result(None)

    def close(self) -> None:
        """Fail all turns that wait."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineFailed("the engine host is stopping", unreachable=True))
