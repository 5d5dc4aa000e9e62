"""`ServiceViews`: looks at jobs and batches from near, at whichever rollout broker of the service has them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from ...errors import ProrlError, UnknownBatch, UnknownJob

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from ...client.asynchronous.client import AsyncRolloutClient
    from ...data.trajectory import Trajectory
    from ...watching.watcher import Watcher
    from ...wire.messages.front_door import JobTrace
    from ...wire.messages.jobs import Result
    from ...wire.messages.watching import BatchView

T = TypeVar("T")


class ServiceViews:
    def __init__(self, clients: Mapping[str, AsyncRolloutClient], watcher: Watcher) -> None:
        self._clients = clients
        self._watcher = watcher

    async def trace(self, job_id: str) -> JobTrace:
        return await self._of_job(job_id, lambda client: client.trace(job_id))

    async def peek(self, job_id: str) -> tuple[Result, Trajectory | None]:
        return await self._of_job(job_id, lambda client: client.views.peek(job_id))

    async def batch(self, batch_id: str) -> BatchView:
        return await _first(self._clients.values(), lambda client: client.views.batch(batch_id))

    async def cancel(self, job_id: str) -> dict[str, str]:
        return await self._of_job(job_id, lambda client: client.cancel(job_id))

    async def _of_job(self, job_id: str, question: Callable[[AsyncRolloutClient], Awaitable[T]]) -> T:
        known = self._clients.get(self._watcher.broker_of(job_id))
        return await _first([known] if known is not None else self._clients.values(), question)


async def _first(clients: Iterable[AsyncRolloutClient], question: Callable[[AsyncRolloutClient], Awaitable[T]]) -> T:
    """Ask several brokers; return what the one that knows says, or raise the best reason why none does."""

    async def one(client: AsyncRolloutClient) -> T | ProrlError:
        try:
            return await question(client)
        except ProrlError as error:
            return error

    problems = []
    for answer in await asyncio.gather(*map(one, clients)):
        if not isinstance(answer, ProrlError):
            return answer
        problems.append(answer)
    raise min(problems, key=lambda error: isinstance(error, UnknownJob | UnknownBatch))
