"""`AsyncBatch`: `Batch` for asyncio, on `AsyncRolloutClient`. Concurrent calls of one batch take turns."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from ..errors import Busy, Closed, ProrlError, RequestTimeout
from ..wire import codec
from .requests import POLL_S, read_reply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from ..data.group import Group
    from ..wire.messages.batches import BatchReport, BatchState, BatchStatus
    from ..wire.messages.jobs import Job
    from .async_client import AsyncRolloutClient
    from .batch_progress import BatchProgress
    from .requests import Received


class AsyncBatch:
    """An open batch; made by `AsyncRolloutClient.open_batch`. Closing it carries over what it has under way."""

    def __init__(self, client: AsyncRolloutClient, batch_id: str, progress: BatchProgress) -> None:
        self.batch_id = batch_id
        self._client = client
        self._progress = progress
        self._turn = asyncio.Lock()
        self._closed = False

    @property
    def state(self) -> BatchState:
        """See `Batch.state`."""
        return self._progress.status.state if self._progress.status is not None else "open"

    @property
    def status(self) -> BatchStatus | None:
        """How far it had come at the last reply; None before the first."""
        return self._progress.status

    @property
    def report(self) -> BatchReport | None:
        """What it took; None before the first reply."""
        return self._progress.report

    def feed(self, prompts: Job | Iterable[Job], *, last: bool = True) -> None:
        """Give prompts; see `Batch.feed`. The iterable is drawn from on the event loop, so it must not block."""
        self._progress.feed(prompts, last=last)

    async def next_group(self, timeout_s: float | None = None) -> Group | None:
        """Wait for a kept group; None: the batch has ended. See `Batch.next_group`."""
        if self._closed:
            raise Closed(f"the batch {self.batch_id} was closed")
        until = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        async with self._turn:
            progress = self._progress
            while not progress.has_ended:
                await self._feed_wanted()
                wait_s = max(0.0, min(POLL_S, until - time.monotonic()))
                request = progress.group_request(wait_s)
                group = progress.receive(request, await self._ask(request, [codec.encode(request)], wait_s))
                if group is not None:
                    return group
                progress.check_fed()
                if time.monotonic() >= until and not progress.has_ended:
                    raise RequestTimeout(f"no group within {timeout_s:g} s; {progress.describe()}", timeout_s=timeout_s)
            progress.check_failed()
            return None

    async def __aiter__(self) -> AsyncIterator[Group]:
        """Give groups until the batch has ended."""
        while (group := await self.next_group()) is not None:
            yield group

    async def close(self) -> None:
        """End the batch; see `Batch.close`."""
        if not self._closed:
            self._closed = True
            request = self._progress.close_request()
            self._progress.closed(read_reply(await self._ask(request, [codec.encode(request)])))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.close()
            return
        with suppress(ProrlError):  # the first error is the one to see, and the lease ends the batch
            await self.close()

    async def _feed_wanted(self) -> None:
        made = self._progress.feed_request()
        if made is None:
            return
        request, frames = made
        try:
            self._progress.fed(request, read_reply(await self._ask(request, frames)))
        except Busy:
            self._progress.feed_later()
        except ProrlError as error:
            self._progress.refused(error)
            raise

    async def _ask(self, request: Any, frames: list[bytes], held_s: float = 0.0) -> list[Received]:
        until = time.monotonic() + held_s + self._client.timeout_s
        return await self._client.ask_frames(request, frames, until, held_s=held_s)
