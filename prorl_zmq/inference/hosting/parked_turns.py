"""`ParkedTurns`: the generations of one engine host that wait since `Parking` holds their turns back."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from ...errors import EngineFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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

    async def wait(self, request: Generate, tokens: int) -> float:
        """Return when a turn may begin, with the seconds that it was parked.

        Args:
            request: the turn.
            tokens: of its prompt.

        Raises:
            EngineFailed: the host stops.
        """
        now, turn = time.monotonic(), request.request_id
        if self._parking is None or not self._parking.hold(turn, request.job_id, now - request.age_s, tokens, now):
            return 0.0
        self._waiting[turn] = asyncio.get_running_loop().create_future()
        try:
            self.tell(turn)
            await self._waiting[turn]
        finally:
            del self._waiting[turn]
            self._parking.withdraw(turn)
        return time.monotonic() - now

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
