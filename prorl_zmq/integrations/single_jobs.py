"""Runs jobs one by one, many at once, over one client: for frameworks that request a rollout per call."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from ..data.group import Group
from ..data.rows import single_rows_of
from ..errors import JobsLost, ProrlError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..client.asynchronous.client import AsyncRolloutClient
    from ..data.rows import Row
    from ..data.trajectory import Trajectory
    from ..wire.messages.jobs import Job

POLL_S = 1.0
CANCEL_S = 5.0


class SingleJobs:
    """Waits for each job's own trajectory. All calls must be on one asyncio loop.

    Args:
        connect: opens the client, at the first job.
    """

    def __init__(self, connect: Callable[[], AsyncRolloutClient]) -> None:
        self._connect = connect
        self._client: AsyncRolloutClient | None = None
        self._waiting: dict[str, asyncio.Future[Trajectory]] = {}
        self._collector: asyncio.Task[None] | None = None

    async def run(self, job: Job) -> Trajectory:
        """Return the job's trajectory, whatever its outcome; a cancelled call cancels its job.

        Raises:
            ProrlError: as `AsyncRolloutClient.submit` and `collect`.
        """
        if self._client is None:
            self._client = self._connect()
        ended: asyncio.Future[Trajectory] = asyncio.get_running_loop().create_future()
        self._waiting[job.job_id] = ended
        try:
            await self._client.submit(job)
            if self._collector is None or self._collector.done():
                self._collector = asyncio.create_task(self._collect(self._client))
            return await ended
        except asyncio.CancelledError:
            with suppress(ProrlError):
                await self._client.cancel(job.job_id, timeout_s=CANCEL_S)
            raise
        finally:
            del self._waiting[job.job_id]

    async def close(self) -> None:
        """Stop the collector, and close the client."""
        if self._collector is not None:
            self._collector.cancel()
            with suppress(asyncio.CancelledError):
                await self._collector
        if self._client is not None:
            await self._client.close()

    async def _collect(self, client: AsyncRolloutClient) -> None:
        while self._waiting:
            try:
                for trajectory in await client.collect(wait_s=POLL_S):
                    ended = self._waiting.get(trajectory.job_id)
                    if ended is not None and not ended.done():
                        ended.set_result(trajectory)
            except JobsLost as error:
                self._fail(str(error.fields["job_ids"]).split(), error)
            except ProrlError as error:
                self._fail(list(self._waiting), error)

    def _fail(self, job_ids: list[str], error: ProrlError) -> None:
        for job_id in job_ids:
            ended = self._waiting.get(job_id)
            if ended is not None and not ended.done():
                ended.set_exception(error)


def row_of(trajectory: Trajectory, framework: str) -> Row:
    """Return a trajectory's only row.

    Raises:
        NotTrainable: it is not trainable, or has several segments.
    """
    group = Group(trajectory.job_id, trajectory.job_id, (trajectory,))
    (row,) = single_rows_of([group], framework, "let the chat keep its history (`history = 'append'`)")
    return row
