"""How an asyncio client gives all backends new weights; as `weights`, which says how and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..wire.messages.backends import BeginWeights, CancelWeights, EndWeights, LoadWeights, SetWeightVersion
from ..wire.messages.base import new_id
from .weights import allowed_s, reply_s

if TYPE_CHECKING:
    from pathlib import Path

    from ..wire.messages.engines import UpdateMode
    from .async_backends import AsyncBackends


class AsyncWeights:
    """Updates the weights of all backends; a part of `AsyncRolloutClient`. See `Weights`."""

    def __init__(self, backends: AsyncBackends) -> None:
        self._backends = backends

    async def begin(self, version: int, mode: UpdateMode, limit_s: float, until: float) -> None:
        """See `RolloutClient.begin_weights`."""
        await self._ask(BeginWeights(new_id(), version, limit_s, mode, allowed_s(until)))

    async def end(self, version: int, until: float) -> None:
        """See `RolloutClient.end_weights`."""
        await self._ask(EndWeights(new_id(), version, allowed_s(until)))

    async def cancel(self, version: int, until: float) -> None:
        """See `RolloutClient.cancel_weights`."""
        await self._ask(CancelWeights(new_id(), version, allowed_s(until)))

    async def update(self, path: Path | str, version: int, mode: UpdateMode, until: float) -> None:
        """See `RolloutClient.update_weights`."""
        await self._ask(LoadWeights(new_id(), str(path), version, mode, allowed_s(until)))

    async def set_version(self, version: int, until: float) -> None:
        """See `RolloutClient.set_weight_version`."""
        await self._ask(SetWeightVersion(new_id(), version, None, allowed_s(until)))

    async def _ask(self, request: Any) -> None:
        await self._backends.ask(request, reply_s(request))
