"""The JSON API: the brokers' own requests, as HTTP has them, for languages without ZeroMQ.

Jobs belong to the session of the bearer token. A trajectory stays at the service until it is acknowledged: by `DELETE`,
or by name in a later call for the next ones. Every call may be repeated: jobs carry their ids, prompts their place.
Left out on purpose: the upload of weights, which engines read from files or from the trainer itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from ..client.batch_progress import batch_options
from ..client.requests import check_job_ids, pack_job, read_reply, read_trajectory
from ..data.trajectory import block_bytes
from ..errors import MalformedMessage, UnknownBatch
from ..security.rights import ANYBODY
from ..wire import codec
from ..wire.messages.backends import BackendList, DrainBackend, ListBackends, RemoveBackend
from ..wire.messages.base import new_id
from ..wire.messages.batches import CloseBatch, Feed, GroupGiven, NextGroup, OpenBatch, SessionAlive
from ..wire.messages.front_door import Cancel, Collect, Collected, Hello, ServiceStatus, Status, Submit, Trace
from ..wire.messages.jobs import Job, Result
from .bodies import (
    Acknowledged,
    Batches,
    CancelledBody,
    ClosedBatch,
    GroupBody,
    Health,
    JobCounts,
    Jobs,
    JobState,
    NewBatch,
    NextGroupBody,
    NextTrajectories,
    Opened,
    Prompts,
    PromptsFed,
    Submitted,
    Trajectories,
    TrajectoryBody,
    Waiting,
)
from .connection import job_owner, session_of
from .endpoint import Endpoint, NoQuery
from .http_errors import json_response

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..client.requests import Received
    from ..data.trajectory import Trajectory
    from ..wire.messages.front_door import JobTrace
    from .connection import GatewayConnection
    from .endpoint import Call

ASIDE_TOKENS = 16_384
"""From so many tokens on, JSON is written in a thread."""


class WaitQuery(NoQuery, frozen=True):
    """How long the answer may be held back."""

    wait_s: Waiting = 0.0
    """Seconds to wait while there is nothing to give."""


class TrajectoryQuery(WaitQuery, frozen=True):
    """As `WaitQuery`, for one job."""

    arrays: bool = True
    """False: the result only."""


class JsonApi:
    def __init__(self, connection: GatewayConnection) -> None:
        self._connection = connection
        job, batch = "/v1/jobs/{job_id}", "/v1/batches/{batch_id}"
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
            Endpoint("POST", "/v1/batches", self.open_batch, Opened, NewBatch),
            Endpoint("GET", "/v1/batches", self.batches, Batches),
            Endpoint("GET", batch, self.batch, Batches),
            Endpoint("POST", f"{batch}/prompts", self.feed, PromptsFed, Prompts),
            Endpoint("POST", f"{batch}/groups/next", self.next_group, GroupBody, NextGroupBody, WaitQuery),
            Endpoint("POST", f"{batch}/close", self.close_batch, ClosedBatch, Acknowledged),
            Endpoint("POST", "/v1/alive", self.alive, Health),
            Endpoint("GET", "/v1/backends", self.backends, BackendList),
            Endpoint("POST", "/v1/backends/{backend_id}/drain", self.drain, Health),
            Endpoint("DELETE", "/v1/backends/{backend_id}", self.remove, Health),
            Endpoint("GET", "/v1/status", self.status, ServiceStatus),
        )

    # Jobs -------------------------------------------------------------------------------------------------------------

    async def submit(self, call: Call) -> Submitted:
        """Submit a job or a list of jobs, all or none. A job that is there already under its id is not added twice."""
        jobs: tuple[Job, ...] = (call.body,) if isinstance(call.body, Job) else call.body
        limit_bytes = await self._connection.job_limit_bytes()
        packed = [pack_job(job, limit_bytes) for job in jobs]
        accepted = await self._connection.ask(call.sender, Submit(new_id(), session_of(call.sender)), packed)
        return Submitted(job_ids=tuple(job.job_id for job in jobs), new=accepted.new)

    async def count_jobs(self, call: Call) -> JobCounts:
        """Count the jobs of this token that are not done with."""
        return await self._counts(call, ())

    async def job_state(self, call: Call) -> JobState:
        """Say how far a job has come."""
        trace = await self._trace(call)
        return state_of(trace)

    async def cancel(self, call: Call) -> CancelledBody:
        """End a job as `cancelled`; its trajectory as far as it came is then there to be fetched."""
        request = Cancel(new_id(), (_job_id(call),), job_owner(call.sender))
        return CancelledBody(jobs=dict((await self._connection.ask(call.sender, request)).jobs))

    async def trajectory(self, call: Call) -> object:
        """Return an ended job's trajectory, which stays until it is acknowledged; 202 with its state while it runs.

        With `Accept: application/octet-stream`: the block of the five arrays, as the wire protocol has it.
        """
        request = self._collect(call, 1, call.query.wait_s, job_ids=(_job_id(call),))
        _, found = await self._collected(call, request)
        if not found:
            return json_response(state_of(await self._trace(call)), 202)
        trajectory, block = found[0]
        return binary(trajectory, block) if call.accepts_bytes else await _written(call.query.arrays, trajectory)

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

        def written() -> bytes:
            bodies = tuple(TrajectoryBody.of(trajectory, arrays=body.arrays) for trajectory, _ in found)
            return msgspec.json.encode(
                Trajectories(trajectories=bodies, remaining=reply.remaining, journal_id=reply.journal_id)
            )

        return await _aside(written, sum(len(trajectory.token_ids) for trajectory, _ in found))

    # Batches ----------------------------------------------------------------------------------------------------------

    async def open_batch(self, call: Call) -> Opened:
        """Open a batch. It ends if nothing is heard of this token for its `lease_s`: a call for groups, or `alive`."""
        body: NewBatch = call.body
        given = {name: getattr(body.options, name) for name in body.options.__struct_fields__}
        options = batch_options(given.pop("keep"), **given)
        request = OpenBatch(new_id(), session_of(call.sender), body.batch_id, options)
        reply = await self._connection.ask(call.sender, request)
        return Opened(batch_id=body.batch_id, fed=reply.fed, wanted=reply.wanted)

    async def batches(self, call: Call) -> Batches:
        """List the open batches of this token."""
        status: ServiceStatus = await self._connection.ask(call.sender, Status(new_id()))
        session = session_of(call.sender)
        return Batches(batches=tuple(batch for batch in status.batches if batch.session == session))

    async def batch(self, call: Call) -> Batches:
        """Describe one open batch."""
        listed = [batch for batch in (await self.batches(call)).batches if batch.batch_id == call.path["batch_id"]]
        if not listed:
            raise UnknownBatch(f"no batch {call.path['batch_id']} of this token is open")
        return Batches(batches=tuple(listed))

    async def feed(self, call: Call) -> PromptsFed:
        """Feed prompts to a batch."""
        body: Prompts = call.body
        limit_bytes = await self._connection.job_limit_bytes()
        packed = [pack_job(job, limit_bytes, "prompt") for job in body.prompts]
        request = Feed(new_id(), session_of(call.sender), _batch_id(call), body.start, last=body.last)
        return PromptsFed(fed=(await self._connection.ask(call.sender, request, packed)).fed)

    async def next_group(self, call: Call) -> object:
        """Take the next kept group of a batch, and acknowledge earlier ones."""
        body: NextGroupBody = call.body
        request = NextGroup(
            new_id(),
            session_of(call.sender),
            _batch_id(call),
            body.consumer,
            body.acknowledge,
            feeds=body.feeds,
            wait_s=call.query.wait_s,
        )
        frames = await self._connection.ask_frames(call.sender, request, held_s=request.wait_s)
        reply: GroupGiven = read_reply(frames)
        rest = iter(frames[1:])
        found = [_rollout(rest) for _ in range(reply.rollouts)]

        def written() -> bytes:
            return msgspec.json.encode(
                GroupBody(
                    batch=reply.batch,
                    report=reply.report,
                    group_id=reply.group_id,
                    prompt_id=reply.prompt_id,
                    trajectories=tuple(TrajectoryBody.of(one, arrays=body.arrays) for one in found),
                    wanted=reply.wanted,
                    ended=reply.ended,
                )
            )

        return await _aside(written, sum(len(one.token_ids) for one in found))

    async def close_batch(self, call: Call) -> ClosedBatch:
        """Close a batch; what it has under way is carried over as its options say."""
        request = CloseBatch(new_id(), session_of(call.sender), _batch_id(call), call.body.acknowledge)
        reply = await self._connection.ask(call.sender, request)
        return ClosedBatch(batch=reply.batch, report=reply.report)

    async def alive(self, call: Call) -> Health:
        """Renew the lease of this token's batches."""
        await self._connection.ask(call.sender, SessionAlive(new_id(), session_of(call.sender)))
        return Health()

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

    async def status(self, call: Call) -> ServiceStatus:
        """Describe the service: stage processes, queues, outcomes, batches."""
        status: ServiceStatus = await self._connection.ask(call.sender, Status(new_id()))
        return status

    async def health(self) -> Health:
        """Say whether the front door answers."""
        await self._connection.ask(ANYBODY, Hello(new_id()))
        return Health()

    # ------------------------------------------------------------------------------------------------------------------

    def _collect(self, call: Call, max_results: int, wait_s: float, *, client_id: str = "", **more: Any) -> Collect:
        names = client_id or new_id()
        session = session_of(call.sender)
        return Collect(new_id(), session, names, max_results=max_results, wait_s=wait_s, **more)

    async def _collected(self, call: Call, request: Collect) -> tuple[Collected, list[tuple[Trajectory, Received]]]:
        frames = await self._connection.ask_frames(call.sender, request, held_s=request.wait_s)
        reply: Collected = read_reply(frames)
        blocks = iter(frames[1:])
        found: list[tuple[Trajectory, Received]] = []
        for result in reply.results:
            block = next(blocks, b"") if result.tokens else b""
            found.append((read_trajectory(result, iter([block])), block))
        return reply, found

    async def _counts(self, call: Call, acknowledge: Sequence[str]) -> JobCounts:
        request = self._collect(call, 0, 0.0, acknowledge=tuple(acknowledge))
        reply, _ = await self._collected(call, request)
        return JobCounts(session=request.session, remaining=reply.remaining)

    async def _trace(self, call: Call) -> JobTrace:
        trace: JobTrace = await self._connection.ask(
            call.sender, Trace(new_id(), _job_id(call), job_owner(call.sender))
        )
        return trace


def state_of(trace: JobTrace) -> JobState:
    """Return the short of what a job went through."""
    now = next((span for span in reversed(trace.spans) if span.end_s is None), None)
    state = "ended" if trace.outcome else "running" if now is not None and now.place == "held" else "queued"
    return JobState(
        job_id=trace.job_id,
        state=state,
        phase=str(now.phase) if now is not None else "",
        attempt=trace.spans[-1].attempt if trace.spans else 1,
        age_s=trace.age_s,
        outcome=trace.outcome,
        reward=trace.reward,
    )


def binary(trajectory: Trajectory, block: Received) -> web.Response:
    """Return a trajectory's block; its layout follows from the two numbers in the headers."""
    result = trajectory.result
    headers = {"Prorl-Tokens": str(result.tokens), "Prorl-Turns": str(result.turns), "Prorl-Outcome": result.outcome}
    if result.reward is not None:
        headers["Prorl-Reward"] = repr(result.reward)
    content = block if isinstance(block, bytes) else block.bytes
    if len(content) != block_bytes(result.tokens, result.turns):
        raise MalformedMessage(f"the trajectory of job {result.job_id} has {len(content)} bytes")
    return web.Response(body=content, headers=headers, content_type="application/octet-stream")


async def _written(arrays: bool, trajectory: Trajectory) -> web.Response:
    def written() -> bytes:
        return msgspec.json.encode(TrajectoryBody.of(trajectory, arrays=arrays))

    return await _aside(written, len(trajectory.token_ids))


async def _aside(write: Any, tokens: int) -> web.Response:
    """Write JSON, in a thread if it is much."""
    body: bytes = await asyncio.to_thread(write) if tokens >= ASIDE_TOKENS else write()
    return web.Response(body=body, content_type="application/json")


def _rollout(frames: Iterator[Received]) -> Trajectory:
    packed = next(frames, b"")
    result: Result = codec.decode(packed if isinstance(packed, bytes) else packed.bytes, Result)
    return read_trajectory(result, frames)


def _job_id(call: Call) -> str:
    job_id = call.path["job_id"]
    check_job_ids((job_id,))
    return job_id


def _batch_id(call: Call) -> str:
    return call.path["batch_id"]
