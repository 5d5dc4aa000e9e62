"""Rollouts for the frameworks that ask for one per call."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from finished_groups import chat, rewritten

from prorl_zmq import Job
from prorl_zmq.errors import JobsLost, NotTrainable, RequestTimeout
from prorl_zmq.integrations.single_jobs import SingleJobs, row_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_zmq.data.trajectory import Trajectory


class Client:
    """Ends each job as `end` says, a few at a time and in reverse."""

    def __init__(self, end: Callable[[Job], Trajectory | None] = lambda job: chat([1], [2], job_id=job.job_id)) -> None:
        self.end = end
        self.submitted: list[Job] = []
        self.cancelled: list[str] = []
        self.errors: list[Exception] = []
        self._ended: list[Trajectory] = []

    async def submit(self, job: Job) -> None:
        self.submitted.append(job)
        if (trajectory := self.end(job)) is not None:
            self._ended.append(trajectory)

    async def collect(self, *, wait_s: float) -> list[Trajectory]:
        await asyncio.sleep(min(wait_s, 0.01))
        if self.errors:
            raise self.errors.pop()
        ended, self._ended = self._ended[-3:], self._ended[:-3]
        return ended[::-1]

    async def cancel(self, job_id: str, *, timeout_s: float) -> None:
        assert timeout_s > 0
        self.cancelled.append(job_id)

    async def close(self) -> None:
        pass


def test_each_caller_gets_its_own_trajectory() -> None:
    client = Client()
    made: list[Client] = []

    async def run() -> None:
        jobs = SingleJobs(lambda: made.append(client) or client)  # type: ignore[arg-type,return-value,func-returns-value]
        for _ in range(2):  # the collector ends with the last job, and begins again with the next
            asked = [Job(task="math", instance={}) for _ in range(20)]
            got = await asyncio.gather(*(jobs.run(job) for job in asked))
            assert [one.job_id for one in got] == [job.job_id for job in asked]
        await jobs.close()

    asyncio.run(run())
    assert made == [client]


def test_a_cancelled_call_cancels_its_job_and_no_other() -> None:
    client = Client(lambda job: None if job.job_id == "slow" else chat([1], [2], job_id=job.job_id))

    async def run() -> None:
        jobs = SingleJobs(lambda: client)  # type: ignore[arg-type,return-value]
        slow = asyncio.create_task(jobs.run(Job(task="math", instance={}, job_id="slow")))
        await asyncio.sleep(0.05)
        slow.cancel()
        assert (await jobs.run(Job(task="math", instance={}, job_id="other"))).job_id == "other"
        with pytest.raises(asyncio.CancelledError):
            await slow
        await jobs.close()

    asyncio.run(run())
    assert client.cancelled == ["slow"]


def test_what_the_service_lost_is_told_to_whom_it_concerns() -> None:
    client = Client(lambda _: None)

    async def run() -> None:
        jobs = SingleJobs(lambda: client)  # type: ignore[arg-type,return-value]
        tasks = [asyncio.create_task(jobs.run(Job(task="math", instance={}, job_id=name))) for name in "ab"]
        await asyncio.sleep(0.05)
        client.errors = [RequestTimeout("no answer"), JobsLost("gone", job_ids="a", count=1)]
        with pytest.raises(JobsLost):
            await tasks[0]
        with pytest.raises(RequestTimeout):
            await tasks[1]
        await jobs.close()

    asyncio.run(run())


def test_several_segments_are_refused_where_one_row_is_a_rollout() -> None:
    with pytest.raises(NotTrainable, match="several segments, each of which AReaL"):
        row_of(rewritten(1.0), "AReaL")
