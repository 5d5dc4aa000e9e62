"""A stage process's line to the backend broker: assignments for its jobs, on asyncio.

The assignments last while `keep_alive` is called; the broker releases those of a process that has died. A broker that
is started anew loses nothing that matters: requests without an answer are sent again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import zmq

from .. import codec
from ..aio import AsyncSocket
from ..errors import InternalError, MalformedMessage, NoBackend, from_info
from ..messages import AnyBackendReply, Assign, Assigned, BackendRefused, OwnerAlive, Release, new_id
from ..sockets import connect, open_socket

if TYPE_CHECKING:
    from ..messages import AnyBackendRequest, Backend, Job

RESEND_S = 5.0
"""An assignment is asked for again after so long without an answer, in case the broker was restarted."""
REPLY_SLACK_S = 5.0
"""How much later than the wait that a job allows the broker's answer may come."""


class BackendClient:
    """Asks the backend broker on behalf of one stage process.

    Args:
        context: the process's ZeroMQ context.
        endpoint: the backend broker's.
        owner: the stage process's id.
        node: its node; backends there are preferred.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, owner: str, node: str) -> None:
        socket = open_socket(context, zmq.DEALER)
        connect(socket, endpoint)
        self._socket = AsyncSocket(socket, self._receive, copied=2)
        self._owner = owner
        self._node = node
        self._pending: dict[str, asyncio.Future[AnyBackendReply]] = {}
        self._held: dict[str, int] = {}

    async def assign(self, job: Job, attempt: int) -> Backend:
        """Give the job's backend, waiting for one as long as the job allows.

        Raises:
            NoBackend: none took the job in that time.
        """
        return await self._assign(job, attempt, unreachable="")

    async def reassign(self, job: Job, attempt: int, unreachable: str) -> Backend:
        """Give the job another backend than `unreachable`, which it has; the same again if it is the only one.

        The other jobs will avoid that backend until it is heard of. Waits as `assign` does.

        Raises:
            NoBackend: none took the job in the time that it allows.
        """
        return await self._assign(job, attempt, unreachable)

    def release(self, job_id: str, attempt: int) -> None:
        """End the job's assignment, or stop waiting for it."""
        if self._held.pop(job_id, None) is not None:
            self._send(Release(new_id(), job_id, attempt))

    def keep_alive(self) -> None:
        """Renew the lease on the assignments of this process."""
        self._send(OwnerAlive(new_id(), self._owner, dict(self._held)))

    def close(self) -> None:
        """Close the socket; what waits for an answer is cancelled."""
        self._socket.close()
        for future in self._pending.values():
            future.cancel()

    async def _assign(self, job: Job, attempt: int, unreachable: str) -> Backend:
        self._held[job.job_id] = attempt
        request = Assign(
            new_id(),
            owner=self._owner,
            job_id=job.job_id,
            attempt=attempt,
            wait_s=job.backend_wait_s,
            group_id=job.group_id,
            node=self._node,
            unreachable=unreachable,
        )
        reply = await self._ask(request, job.backend_wait_s + REPLY_SLACK_S)
        if isinstance(reply, BackendRefused):
            raise from_info(reply.error)
        if not isinstance(reply, Assigned):
            raise InternalError(f"the backend broker answered an assignment with {type(reply).__name__}")
        return reply.backend

    async def _ask(self, request: Assign, limit_s: float) -> AnyBackendReply:
        future: asyncio.Future[AnyBackendReply] = asyncio.get_running_loop().create_future()
        self._pending[request.request_id] = future
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    self._send(request)
                    done, _ = await asyncio.wait([future], timeout=RESEND_S)
                    if done:
                        return future.result()
        except TimeoutError:
            message = f"the backend broker did not answer within {limit_s:g} s; is it running?"
            raise NoBackend(message, job_id=request.job_id, waited_s=limit_s) from None
        finally:
            del self._pending[request.request_id]

    def _send(self, request: AnyBackendRequest) -> None:
        self._socket.send([b"", codec.encode(request)])

    def _receive(self, frames: list[bytes | zmq.Frame]) -> None:
        try:
            reply = codec.decode(frames[-1], AnyBackendReply)  # type: ignore[arg-type]
        except MalformedMessage:
            return  # the request is sent again
        future = self._pending.get(reply.request_id)
        if future is not None and not future.done():
            future.set_result(reply)
