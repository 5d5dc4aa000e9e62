"""How an asyncio client gives all backends new weights; as `weights`, which says how and why."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import ProrlError, UnknownBackend
from ..wire.messages.backends import BeginWeights, CancelWeights, EndWeights, SetWeightVersion
from ..wire.messages.base import new_id
from ..wire.messages.engines import BeginUpdate, CancelUpdate, EndUpdate, NoteWeightVersion, UpdateWeights
from .backends import left_s
from .weights import CANCEL_S, done, limit_of, noting_s, raise_first, raise_first_of_end

if TYPE_CHECKING:
    from pathlib import Path

    from ..wire.messages.engines import UpdateMode
    from .async_backends import AsyncBackends
    from .weights import Outcomes


class AsyncWeights:
    """Updates the weights of all backends; a part of `AsyncRolloutClient`. See `Weights`."""

    def __init__(self, backends: AsyncBackends) -> None:
        self._backends = backends

    async def begin(self, version: int, mode: UpdateMode, limit_s: float, until: float) -> None:
        """See `RolloutClient.begin_weights`."""
        await self._backends.ask(BeginWeights(new_id(), version, limit_s), left_s(until))
        try:
            outcomes = await self._backends.tell_engines(lambda: BeginUpdate(new_id(), version, limit_s, mode), until)
            raise_first(outcomes)
        except BaseException:
            await self._take_back(version)
            raise

    async def end(self, version: int, until: float) -> None:
        """See `RolloutClient.end_weights`."""
        outcomes = await self._backends.tell_engines(lambda: EndUpdate(new_id(), version), until)
        if done(outcomes):
            await self._note(version, outcomes)
            await self._backends.ask(EndWeights(new_id(), version), noting_s(until))
        raise_first_of_end(outcomes)

    async def cancel(self, version: int, until: float) -> None:
        """See `RolloutClient.cancel_weights`."""
        outcomes = await self._backends.tell_engines(lambda: CancelUpdate(new_id(), version), until)
        await self._backends.ask(CancelWeights(new_id(), version), noting_s(until))
        raise_first(outcomes)

    async def update(self, path: Path | str, version: int, mode: UpdateMode, until: float) -> None:
        """See `RolloutClient.update_weights`."""
        await self._backends.ask(BeginWeights(new_id(), version, limit_of(until)), left_s(until))
        try:
            outcomes = await self._backends.tell_engines(
                lambda: UpdateWeights(new_id(), str(path), version, mode), until
            )
        except BaseException:
            await self._forget(version)
            raise
        if done(outcomes):
            await self._note(version, outcomes)
            await self._backends.ask(EndWeights(new_id(), version), noting_s(until))
        else:
            await self._forget(version)
        raise_first(outcomes)

    async def set_version(self, version: int, until: float) -> None:
        """See `RolloutClient.set_weight_version`."""
        await self._backends.ask(SetWeightVersion(new_id(), version), left_s(until))
        raise_first(await self._backends.tell_engines(lambda: NoteWeightVersion(new_id(), version), until))

    async def _note(self, version: int, outcomes: Outcomes) -> None:
        """Tell the backend broker at once; heartbeats would, in a second."""
        for backend_id in done(outcomes):
            with suppress(UnknownBackend):  # it has left meanwhile
                await self._backends.ask(SetWeightVersion(new_id(), version, backend_id), CANCEL_S)

    async def _take_back(self, version: int) -> None:
        with suppress(ProrlError):
            await self._backends.tell_engines(lambda: CancelUpdate(new_id(), version), time.monotonic() + CANCEL_S)
        await self._forget(version)

    async def _forget(self, version: int) -> None:
        with suppress(ProrlError):
            await self._backends.ask(CancelWeights(new_id(), version), CANCEL_S)
