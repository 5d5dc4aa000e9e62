from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from prorl_zmq import Job
from prorl_zmq.client.submission import Submission


class Unanswered:
    """Takes jobs, or does not, and never replies to their request."""

    timeout_s = 1.0

    def __init__(self, *, accepts: bool) -> None:
        self.accepts = accepts
        self.has: list[str] = []
        self.asked = asyncio.Event()

    async def submit(self, jobs: list[Job], busy_s: float) -> None:
        if self.accepts:
            self.has = [job.job_id for job in jobs]
        self.asked.set()
        await asyncio.Event().wait()

    async def cancel(self, job_ids: set[str]) -> dict[str, str]:
        return {job_id: "cancelled" if job_id in self.has else "unknown" for job_id in job_ids}

    async def collect(self, wait_s: float) -> list[Any]:
        came, self.has = [SimpleNamespace(job_id=job_id) for job_id in self.has], []
        return came


@pytest.mark.parametrize(("accepts", "unsent"), [(True, 0), (False, 3)])
def test_a_job_without_a_reply_to_its_request_is_counted_once(accepts: bool, unsent: int) -> None:
    async def main() -> None:
        client: Any = Unanswered(accepts=accepts)
        results: list[Any] = []
        submission = Submission(client, [Job(task="math", instance={}) for _ in range(3)], results.append)
        running = asyncio.create_task(submission.run())
        await client.asked.wait()
        running.cancel()
        await asyncio.wait([running])
        await submission.end(1.0)
        assert (submission.unsent, submission.waiting, len(results)) == (unsent, 0, 3 - unsent)

    asyncio.run(main())
