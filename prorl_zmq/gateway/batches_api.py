"""`BatchesApi`: the endpoints of batches, which are groups of rollouts worth learning from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..client.batch_progress import batch_options
from ..client.current_trace import in_trace
from ..client.requests import pack_job
from ..errors import UnknownBatch
from ..wire.messages.base import new_id
from ..wire.messages.batches import BatchClosed, CloseBatch, Fed, Feed, NextGroup, OpenBatch, SessionAlive
from ..wire.messages.front_door import ServiceStatus, Status
from .bodies import (
    Acknowledged,
    Batches,
    GroupBody,
    Health,
    NewBatch,
    NextGroupBody,
    Opened,
    Prompts,
    TrajectoryBody,
)
from .connection import session_of
from .endpoint import Endpoint, WaitQuery, json_of

if TYPE_CHECKING:
    from ..wire.messages.batches import GroupGiven
    from .connection import GatewayConnection
    from .endpoint import Call


class BatchesApi:
    def __init__(self, connection: GatewayConnection) -> None:
        self._connection = connection
        batch = "/v1/batches/{batch_id}"
        self.endpoints = (
            Endpoint("POST", "/v1/batches", self.open_batch, Opened, NewBatch),
            Endpoint("GET", "/v1/batches", self.batches, Batches),
            Endpoint("GET", batch, self.batch, Batches),
            Endpoint("POST", f"{batch}/prompts", self.feed, Fed, Prompts),
            Endpoint("POST", f"{batch}/groups/next", self.next_group, GroupBody, NextGroupBody, WaitQuery),
            Endpoint("POST", f"{batch}/close", self.close_batch, BatchClosed, Acknowledged),
            Endpoint("POST", "/v1/alive", self.alive, Health),
        )

    async def open_batch(self, call: Call) -> Opened:
        """Open a batch. It ends when this token makes no call for groups and no `alive` for its `lease_s`."""
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

    async def feed(self, call: Call) -> Fed:
        """Feed prompts to a batch."""
        body: Prompts = call.body
        limit_bytes = (await self._connection.hello(call.sender)).job_limit_bytes
        packed = [pack_job(job, limit_bytes, "prompt") for job in in_trace(body.prompts, call.traceparent)]
        request = Feed(new_id(), session_of(call.sender), _batch_id(call), body.start, last=body.last)
        fed: Fed = await self._connection.ask(call.sender, request, packed)
        return fed

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
        delivery = await self._connection.ask_results(call.sender, request)
        reply: GroupGiven = delivery.reply
        found = [trajectory for trajectory, _ in delivery.trajectories()]

        def written() -> GroupBody:
            return GroupBody(
                batch=reply.batch,
                report=reply.report,
                group_id=reply.group_id,
                prompt_id=reply.prompt_id,
                trajectories=tuple(TrajectoryBody.of(one, arrays=body.arrays) for one in found),
                wanted=reply.wanted,
                ended=reply.ended,
            )

        return await json_of(found, written)

    async def close_batch(self, call: Call) -> BatchClosed:
        """Close a batch; its options decide which unfinished work is carried over."""
        request = CloseBatch(new_id(), session_of(call.sender), _batch_id(call), call.body.acknowledge)
        closed: BatchClosed = await self._connection.ask(call.sender, request)
        return closed

    async def alive(self, call: Call) -> Health:
        """Renew the lease of this token's batches."""
        await self._connection.ask(call.sender, SessionAlive(new_id(), session_of(call.sender)))
        return Health()


def _batch_id(call: Call) -> str:
    return call.path["batch_id"]
