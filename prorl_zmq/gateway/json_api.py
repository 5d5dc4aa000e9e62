"""The JSON API: the brokers' own requests, as HTTP has them, for languages without ZeroMQ.

Jobs belong to the session of the bearer token. A trajectory stays at the service until it is acknowledged: by `DELETE`,
or by name in a later call for the next ones. Every call may be repeated: jobs carry their ids, prompts their place.
Left out on purpose: the upload of weights, which engines read from files or from the trainer itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..client.current_trace import in_trace
from ..client.requests import check_job_ids, pack_job
from ..security.rights import ANYBODY
from ..service.rollout_brokers import fates, summed, trace_in
from ..wire.messages.backends import BackendList, DrainBackend, ListBackends, RemoveBackend
from ..wire.messages.base import new_id
from ..wire.messages.front_door import Cancel, Collect, Collected, Hello, Status, Submit, Trace
from ..wire.messages.jobs import Job
from .batches_api import BatchesApi
from .bodies import (
    CancelledBody,
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
from .endpoint import Endpoint, WaitQuery
from .http_errors import json_response
from .rollouts_api import RolloutsApi
from .trajectory_answers import binary, json_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..client.requests import Received
    from ..data.trajectory import Trajectory
    from ..wire.messages.front_door import JobTrace
    from .connection import GatewayConnection
    from .endpoint import Call


class TrajectoryQuery(WaitQuery, frozen=True):
    """As `WaitQuery`, for one job."""

    arrays: bool = True
    """False: the result only."""


class JsonApi:
    def __init__(self, connection: GatewayConnection) -> None:
        self._connection = connection
        self.rollouts = RolloutsApi(connection, self.cancel)
        job = "/v1/jobs/{job_id}"
        self.endpoints = (
            Endpoint("POST", "/v1/jobs", self.submit, Submitted, Jobs | Job),
            Endpoint("GET", "/v1/jobs", self.count_jobs, JobCounts),
            Endpoint("GET", job, self.job_state, JobState),
            Endpoint("DELETE", job, self.cancel, CancelledBody),
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
        )

    # Jobs -------------------------------------------------------------------------------------------------------------

    async def submit(self, call: Call) -> Submitted:
        """Submit a job or a list of jobs, all or none. A job that is there already under its id is not added twice."""
        jobs: tuple[Job, ...] = (call.body,) if isinstance(call.body, Job) else call.body
        limit_bytes = (await self._connection.hello(call.sender)).job_limit_bytes
        packed = [pack_job(job, limit_bytes) for job in in_trace(jobs, call.traceparent)]
        accepted = await self._connection.ask(call.sender, Submit(new_id(), session_of(call.sender)), packed)
        return Submitted(job_ids=tuple(job.job_id for job in jobs), new=accepted.new)

    async def count_jobs(self, call: Call) -> JobCounts:
        """Count the jobs of this token that are not done with."""
        return await self._counts(call, ())

    async def job_state(self, call: Call) -> JobState:
        """Say how far a job has come."""
        trace = await self._trace(call)
        return JobState.at(trace)

    async def cancel(self, call: Call) -> CancelledBody:
        """End a job as `cancelled`; its trajectory as far as it came is then there to be fetched."""
        request = Cancel(new_id(), (_job_id(call),), job_owner(call.sender))
        answers = await self._connection.ask_of_job(call.sender, request)
        told = fates(cancelled.jobs for cancelled in answers.found.values())
        answers.check(every=set(told.values()) == {"unknown"})  # one that has not answered may have it
        return CancelledBody(jobs=told)

    async def trajectory(self, call: Call) -> object:
        """Return an ended job's trajectory, which stays until it is acknowledged; 202 with its state while it runs.

        With `Accept: application/octet-stream`: the block of the five arrays, as the wire protocol has it.
        """
        request = self._collect(call, 1, call.query.wait_s, job_ids=(_job_id(call),))
        _, found = await self._collected(call, request)
        if not found:
            return json_response(JobState.at(await self._trace(call)), 202)
        trajectory, block = found[0]
        if call.accepts_bytes:
            return binary(trajectory, block)
        arrays = call.query.arrays
        return await json_of([trajectory], lambda: TrajectoryBody.of(trajectory, arrays=arrays))

    async def acknowledge(self, call: Call) -> JobCounts:
        """Say that a trajectory was received: the service forgets it."""
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
        """Give a backend no more jobs; those that have it keep it."""
        await self._connection.ask_backend_broker(call.sender, DrainBackend(new_id(), call.path["backend_id"]))
        return Health()

    async def remove(self, call: Call) -> Health:
        """Forget a backend."""
        await self._connection.ask_backend_broker(call.sender, RemoveBackend(new_id(), call.path["backend_id"]))
        return Health()

    async def status(self, call: Call) -> StatusBody:
        """Describe the service: stage processes, queues, outcomes, batches, summed up over its rollout brokers."""
        answers = await self._connection.ask_all(call.sender, Status(new_id()))
        answers.check()
        return StatusBody.of(summed(answers.found.values()), answers.silent())

    async def health(self) -> Health:
        """Say whether some rollout broker answers."""
        (await self._connection.ask_all(ANYBODY, Hello(new_id()))).check()
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

    async def _trace(self, call: Call) -> JobTrace:
        request = Trace(new_id(), _job_id(call), job_owner(call.sender))
        return trace_in(await self._connection.ask_of_job(call.sender, request), request.job_id)


def _job_id(call: Call) -> str:
    job_id = call.path["job_id"]
    check_job_ids((job_id,))
    return job_id
