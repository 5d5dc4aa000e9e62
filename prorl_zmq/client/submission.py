"""`Submission`: runs a file's jobs through a service, submitting them in parts and collecting in between.

A part that the service has no room for is halved; a single job is retried after a result was collected, which makes
room. So a file may have any number of jobs. Owns no client: `run` and `end` may be cancelled at any await, and each
result is either passed on or still at the service.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from ..errors import Busy, ProrlError, RequestTimeout
from ..wire import codec
from .requests import JOBS_PER_REQUEST, REQUEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..data.trajectory import Trajectory
    from ..wire.messages.jobs import Job
    from .asynchronous.client import AsyncRolloutClient

RETRY_S = 1.0
"""How long to wait for a result before a job is retried."""


class Submission:
    """The jobs of one session: those to submit, and those that it has; `on_result` gets each result once."""

    def __init__(
        self, client: AsyncRolloutClient, jobs: Iterable[Job], on_result: Callable[[Trajectory], None]
    ) -> None:
        self._client = client
        self._on_result = on_result
        self._unsent = list(jobs)
        self._unsent.reverse()  # the next job is last
        self._waiting: set[str] = set()
        self._doubtful: set[str] = set()
        """Unsent jobs that the service may have: their request got no reply."""

    @property
    def unsent(self) -> int:
        """Jobs that the service does not have, as far as is known."""
        return len(self._unsent) - len(self._doubtful)

    @property
    def waiting(self) -> int:
        """Jobs that the service has or may have, and whose results have not been collected."""
        return len(self._waiting)

    async def run(self) -> None:
        """Submit all jobs, and collect until the session has none left.

        Raises:
            Busy: the service accepted no job for the client's `timeout_s`, though none of this session was in flight.
            ProrlError: a job was rejected, or the service did not answer.
        """
        most = JOBS_PER_REQUEST
        refused_at: float | None = None
        while self._unsent:
            part = self._part(most)
            try:
                await self._submit(part)
            except Busy as error:
                most = max(1, len(part) // 2)
                if len(part) > 1:
                    continue
                came = await self._collect(RETRY_S)
                now = time.monotonic()
                if came or self._waiting:
                    refused_at = None
                elif refused_at is None:
                    refused_at = now
                elif now - refused_at >= self._client.timeout_s:
                    raise error from None
            else:
                most, refused_at = min(2 * most, JOBS_PER_REQUEST), None
        async for trajectory in self._client.stream():
            self._take(trajectory)

    async def end(self, limit_s: float) -> None:
        """Cancel jobs that have not ended, and collect the outcomes that arrive within `limit_s` seconds."""
        try:
            async with asyncio.timeout(limit_s):
                fates = await self._client.cancel(self._waiting)
                unknown = {job_id for job_id, fate in fates.items() if fate == "unknown"}
                self._waiting -= unknown
                self._doubtful -= unknown
                while self._waiting:
                    await self._collect(limit_s)
                await self._collect(0.0)
        except (TimeoutError, ProrlError):
            return  # other results stay with the session

    def _part(self, most: int) -> list[Job]:
        """Return the next jobs that fit one request, which is accepted or refused as a whole."""
        part: list[Job] = []
        size = 0
        while len(part) < min(most, len(self._unsent)):
            job = self._unsent[-1 - len(part)]
            size += len(codec.encode(job))
            if part and size > REQUEST_BYTES:
                break
            part.append(job)
        return part

    async def _submit(self, part: list[Job]) -> None:
        job_ids = {job.job_id for job in part}
        self._waiting |= job_ids
        try:
            await self._client.submit(part, busy_s=0.0)
        except (RequestTimeout, asyncio.CancelledError):
            self._doubtful = job_ids
            raise
        except ProrlError:
            self._waiting -= job_ids
            raise
        del self._unsent[-len(part) :]

    async def _collect(self, wait_s: float) -> bool:
        """Wait for a result, collect and acknowledge all, and return whether there was one."""
        found = await self._client.collect(wait_s=wait_s)
        came = bool(found)
        while found:
            for trajectory in found:
                self._take(trajectory)
            found = await self._client.collect(wait_s=0.0)
        return came

    def _take(self, trajectory: Trajectory) -> None:
        self._waiting.discard(trajectory.job_id)
        self._on_result(trajectory)
