"""`JsonApi`: the brokers' requests over HTTP, for languages without ZeroMQ.

Jobs belong to the session of the bearer token. A trajectory stays at the service until it is acknowledged. Every call
may be repeated. Weights cannot be uploaded: engines read files, or receive tensors from the trainer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ..client.current_trace import in_trace
from ..client.requests import check_job_ids, pack_job
from ..security.rights import ANYBODY
from ..service.rollout_brokers import fates, summed
from ..wire.messages.backends import BackendList, DrainBackend, ListBackends, RemoveBackend
from ..wire.messages.base import new_id
from ..wire.messages.front_door import Cancel, Cancelled, Collect, Collected, Hello, Status, Submit
from ..wire.messages.jobs import Job
from .batches_api import BatchesApi
from .bodies import (
    Health,
    JobCounts,
    Jobs,
    JobState,
    NextTrajectories,
    StatusBody,
    Submitted,
    Trajectories,
    TrajectoryBody,
)
from .connection import job_owner, session_of
from .endpoint import Endpoint, WaitQuery, binary, json_of
from .http_errors import json_response
from .rollouts_api import RolloutsApi

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..client.requests import Received
    from ..data.trajectory import Trajectory
    from ..service.rollout_brokers import Answers
    from .connection import GatewayConnection
    from .endpoint import Call


class TrajectoryQuery(WaitQuery, frozen=True):
    """How to return one trajectory."""

    arrays: bool = True
    """False: only the result."""


class JsonApi:
    def __init__(self, connection: GatewayConnection) -> None:
        self._connection = connection
        self._greeting: asyncio.Task[Answers[Any]] | None = None
        """The question to the brokers that requests for `/healthz` share: they need no token."""
        self.rollouts = RolloutsApi(connection, self.cancel)
        job = "/v1/jobs/{job_id}"
        self.endpoints = (
            Endpoint("POST", "/v1/jobs", self.submit, Submitted, Jobs | Job),
            Endpoint("GET", "/v1/jobs", self.count_jobs, JobCounts),
            Endpoint("GET", job, self.job_state, JobState),
            Endpoint("DELETE", job, self.cancel, Cancelled),
            Endpoint("GET", f"{job}/trajectory", self.trajectory, TrajectoryBody, query=TrajectoryQuery, binary=True),
            Endpoint("DELETE", f"{job}/trajectory", self.acknowledge, JobCounts),
            Endpoint(
                "POST", "/v1/trajectories/next", self.next_trajectories, Trajectories, NextTrajectories, WaitQuery
            ),
            *BatchesApi(connection).endpoints,
            *self.rollouts.endpoints,
            Endpoint("GET", "/v1/backends", self.backends, BackendList),
            Endpoint("POST", "/v1/backends/{backend_id}/drain", self.drain, Health),
            Endpoint("DELETE", "/v1/backends/{backend_id}", self.remove, Health),
            Endpoint("GET", "/v1/status", self.status, StatusBody),
            Endpoint("GET", "/healthz", self.health, Health, needs="nothing"),
        )

    # Jobs -------------------------------------------------------------------------------------------------------------

    async def submit(self, call: Call) -> Submitted:
        """Submit a job or a list of jobs, all or none. A job whose id is known is not added twice."""
        jobs: tuple[Job, ...] = (call.body,) if isinstance(call.body, Job) else call.body
        limit_bytes = (await self._connection.hello(call.sender)).job_limit_bytes
        packed = [pack_job(job, limit_bytes) for job in in_trace(jobs, call.traceparent)]
        accepted = await self._connection.ask(call.sender, Submit(new_id(), session_of(call.sender)), packed)
        return Submitted(job_ids=tuple(job.job_id for job in jobs), new=accepted.new)

    async def count_jobs(self, call: Call) -> JobCounts:
        """Count this token's jobs that have not ended or are not acknowledged."""
        return await self._counts(call, ())

    async def job_state(self, call: Call) -> JobState:
        """Return the state of a job."""
        return JobState.at(await self._connection.trace(call.sender, call.path["job_id"]))

    async def cancel(self, call: Call) -> Cancelled:
        """Cancel a job. Its partial trajectory can then be fetched."""
        request = Cancel(new_id(), (_job_id(call),), job_owner(call.sender))
        answers = await self._connection.ask_of_job(call.sender, request)
        jobs: dict[str, Any] = fates(cancelled.jobs for cancelled in answers.found.values())
        answers.check(every=set(jobs.values()) == {"unknown"})  # one that has not answered may have it
        return Cancelled(request.request_id, jobs)

    async def trajectory(self, call: Call) -> object:
        """Return an ended job's trajectory; 202 with its state while it runs. Acknowledge it to delete it.

        With `Accept: application/octet-stream`: the block of the five arrays, as in the wire protocol.
        """
        request = self._collect(call, 1, call.query.wait_s, job_ids=(_job_id(call),))
        _, found = await self._collected(call, request)
        if not found:
            return json_response(await self.job_state(call), 202)
        trajectory, block = found[0]
        if call.accepts_bytes:
            return binary(trajectory, block)
        arrays = call.query.arrays
        return await json_of([trajectory], lambda: TrajectoryBody.of(trajectory, arrays=arrays))

    async def acknowledge(self, call: Call) -> JobCounts:
        """Acknowledge a trajectory: the service deletes it."""
        return await self._counts(call, (_job_id(call),))

    async def next_trajectories(self, call: Call) -> object:
        """Take finished trajectories, and acknowledge earlier ones."""
        body: NextTrajectories = call.body
        request = self._collect(
            call, body.max_results, call.query.wait_s, acknowledge=body.acknowledge, client_id=body.consumer
        )
        reply, found = await self._collected(call, request)

        trajectories = [trajectory for trajectory, _ in found]

        def written() -> Trajectories:
            bodies = tuple(TrajectoryBody.of(one, arrays=body.arrays) for one in trajectories)
            return Trajectories(trajectories=bodies, remaining=reply.remaining, journal_id=reply.journal_id)

        return await json_of(trajectories, written)

    # The service ------------------------------------------------------------------------------------------------------

    async def backends(self, call: Call) -> BackendList:
        """List the inference backends."""
        listed: BackendList = await self._connection.ask_backend_broker(call.sender, ListBackends(new_id()))
        return listed

    async def drain(self, call: Call) -> Health:
        """Drain a backend: it gets no new jobs and keeps those that it has."""
        await self._connection.ask_backend_broker(call.sender, DrainBackend(new_id(), call.path["backend_id"]))
        return Health()

    async def remove(self, call: Call) -> Health:
        """Remove a backend."""
        await self._connection.ask_backend_broker(call.sender, RemoveBackend(new_id(), call.path["backend_id"]))
        return Health()

    async def status(self, call: Call) -> StatusBody:
        """Describe the service, summed over its rollout brokers: stage processes, queues, outcomes, batches."""
        answers = await self._connection.ask_all(call.sender, Status(new_id()))
        answers.check()
        return StatusBody.of(summed(answers.found.values()), answers.silent())

    async def health(self, _call: Call) -> Health:
        """Check that a rollout broker answers."""
        if self._greeting is None or self._greeting.done():
            self._greeting = asyncio.create_task(self._connection.ask_all(ANYBODY, Hello(new_id())))
            self._greeting.add_done_callback(_read_error)
        (await asyncio.shield(self._greeting)).check()
        return Health()

    # ------------------------------------------------------------------------------------------------------------------

    def _collect(self, call: Call, max_results: int, wait_s: float, *, client_id: str = "", **more: Any) -> Collect:
        names = client_id or new_id()
        session = session_of(call.sender)
        return Collect(new_id(), session, names, max_results=max_results, wait_s=wait_s, **more)

    async def _collected(self, call: Call, request: Collect) -> tuple[Collected, list[tuple[Trajectory, Received]]]:
        delivery = await self._connection.ask_results(call.sender, request)
        return delivery.reply, delivery.trajectories()

    async def _counts(self, call: Call, acknowledge: Sequence[str]) -> JobCounts:
        request = self._collect(call, 0, 0.0, acknowledge=tuple(acknowledge))
        reply, _ = await self._collected(call, request)
        return JobCounts(session=request.session, remaining=reply.remaining)


def _read_error(asked: asyncio.Task[Any]) -> None:
    """Read the error of a question whose requests may all have been cancelled, so that asyncio does not report it."""
    if not asked.cancelled():
        asked.exception()


def _job_id(call: Call) -> str:
    job_id = call.path["job_id"]
    check_job_ids((job_id,))
    return job_id
