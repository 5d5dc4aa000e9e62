"""A stage process's connection to the backend broker, which assigns backends to the process's jobs.

Assignments last while `keep_alive` is called. Requests without an answer are resent.
"""

from __future__ import annotations

import asyncio
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import Closed, InternalError, MalformedMessage, NoBackend, RequestTimeout, from_info
from ..security.request_connection import AsyncRequestConnection
from ..wire import codec
from ..wire.messages.backends import (
    AnyBackendReply,
    Assign,
    Assigned,
    BackendList,
    GenerationFailed,
    ListBackends,
    NameAll,
    Release,
    WaitLonger,
)
from ..wire.messages.base import POLICY, Refused, holder, new_id
from ..wire.messages.jobs import NamedModel
from ..wire.sockets import CONTROL_FRAME_BYTES
from .held_assignments import HeldAssignments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import zmq

    from ..security.keyring import Keyring
    from ..wire.messages.backends import AnyBackendRequest, Backend
    from ..wire.messages.jobs import Job

RESEND_S = 5.0
"""Resend a request for an assignment after this many seconds without an answer: the broker may have restarted."""
REPLY_SLACK_S = 5.0
"""Seconds beyond the job's own wait limit within which the broker's answer may come."""
LISTED_S = 30.0
"""Seconds for which a backend list is cached (only vocabularies are read from it)."""
LISTED_EMPTY_S = 2.0
"""The same, for a model without backends."""
LIST_S = 15.0
"""How long the broker may take to list its backends."""
PROBLEM_LIMIT = 1000


class BackendClient:
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        owner: str,
        node: str,
        keyring: Keyring | None = None,
    ) -> None:
        self._connection = AsyncRequestConnection(
            context,
            endpoint,
            keyring,
            resend_s=RESEND_S,
            fail_if_refused=False,
            is_interim=self._is_interim,
            hint="is it running?",
            limit_bytes=CONTROL_FRAME_BYTES,
        )
        self._owner = owner
        self._node = node
        self._wait_longer: dict[str, Callable[[], None]] = {}
        """For each request without a reply: handles `WaitLonger`."""
        self._held = HeldAssignments(owner)
        self._began: dict[str, float] = {}
        """Of each holder, when its group began, or the job got its first backend."""
        self._of_model: dict[str, tuple[float, Sequence[Backend]]] = {}
        """For each teacher: until when the list of its backends is cached, and these."""
        self._listing: dict[str, asyncio.Task[Sequence[Backend]]] = {}
        """By teacher, while the broker is asked."""

    def connect(self, endpoint: str) -> None:
        """Connect to the broker's current endpoint if it changed, and resend requests without an answer there."""
        if endpoint != self._connection.requester.endpoint:
            self._connection.reconnect(endpoint)

    async def assign(
        self,
        job: Job,
        attempt: int,
        on_starting: Callable[[], None] = lambda: None,
        *,
        leaving: str = "",
        model: str = POLICY,
        on_waited: Callable[[float], None] = lambda _seconds: None,
    ) -> Backend:
        """Return the job's backend of a model, waiting as long as the job allows.

        The wait counts from when no backend is starting, and ready ones have room; `on_starting` is called if that is
        not the case yet, and `on_waited` with the seconds for which ready ones had no room.

        A job that is `leaving` its backend gets another one; the same, when it may be tried, if it is alone.
        """
        holder_id = job.job_id if model == POLICY else holder(job.job_id, model)
        self._held.wait(holder_id, attempt, own=model == job.model)
        request = Assign(
            new_id(),
            owner=self._owner,
            job_id=job.job_id,
            attempt=attempt,
            wait_s=job.backend_wait_s,
            group_id=job.group_id,
            node=self._node,
            leaving=leaving,
            model=model,
            named=model in _named_models(job),
            pin=job.pin,
            pinned=self._held.pinned(holder_id, attempt),
        )
        reply = await self._ask(request, job.backend_wait_s + REPLY_SLACK_S, on_starting)
        if isinstance(reply, Refused):
            raise from_info(reply.error)
        if not isinstance(reply, Assigned):
            raise InternalError(f"the backend broker answered an assignment with {type(reply).__name__}")
        self._held.assigned(holder_id, attempt, reply.backend.backend_id, reply.pinned)
        self._began[holder_id] = min(self._began.get(holder_id, math.inf), time.monotonic() - reply.group_age_s)
        if reply.room_wait_s:
            on_waited(reply.room_wait_s)
        return reply.backend

    async def tokenizers(self) -> set[str]:
        """Return the tokenizers of all backends.

        Raises:
            NoBackend: the broker did not answer.
        """
        return {one.chat.tokenizer for one in await self._listed()}

    async def of_model(self, model: str) -> Sequence[Backend]:
        """Return a backend of a model for each of its chat formats, as listed at most `LISTED_S` ago.

        Calls at the same time ask the broker once.

        Raises:
            NoBackend: the broker did not answer.
        """
        until, found = self._of_model.get(model, (-math.inf, ()))
        if time.monotonic() <= until:
            return found
        if model not in self._listing:
            self._listing[model] = asyncio.create_task(self._list(model), name=f"list the backends of {model}")
            self._listing[model].add_done_callback(partial(self._has_listed, model))
        return await asyncio.shield(self._listing[model])

    async def _list(self, model: str) -> Sequence[Backend]:
        found = tuple({one.chat: one for one in await self._listed() if one.name == model}.values())
        self._of_model[model] = (time.monotonic() + (LISTED_S if found else LISTED_EMPTY_S), found)
        return found

    def _has_listed(self, model: str, task: asyncio.Task[Sequence[Backend]]) -> None:
        del self._listing[model]
        if not task.cancelled():
            task.exception()  # its callers may all be cancelled

    async def _listed(self) -> list[Backend]:
        try:
            frames = await self._connection.ask_frames(ListBackends(new_id()), time.monotonic() + LIST_S)
        except Closed:
            raise asyncio.CancelledError from None
        except RequestTimeout as error:
            raise NoBackend(f"the backend broker did not answer: {error.message}", waited_s=error.timeout_s) from None
        reply: AnyBackendReply = codec.decode(frames[0], AnyBackendReply)  # type: ignore[arg-type]
        if not isinstance(reply, BackendList):
            raise InternalError(f"the backend broker answered a question for its list with {type(reply).__name__}")
        return [one.backend for one in reply.backends]

    def report_failure(self, job_id: str, backend: Backend, problem: str) -> None:
        """Report a failed generation: other jobs will avoid the backend for a while."""
        self._send(GenerationFailed(new_id(), job_id, backend.backend_id, problem[:PROBLEM_LIMIT], backend.life))

    def note_served(self, job_id: str, attempt: int, model: str = POLICY) -> None:
        """Count a generation that the job's backend served; the next message reports it to the broker."""
        self._held.note_served(job_id if model == POLICY else holder(job_id, model), attempt)

    def age_s(self, job_id: str, model: str) -> float:
        """Return the seconds since the job's group began, or the job got its first backend of the model."""
        began = self._began.get(job_id if model == POLICY else holder(job_id, model))
        return time.monotonic() - began if began is not None else 0.0

    def pinned(self, job_id: str, attempt: int, model: str) -> int | None:
        """Return the version of a model's adapter on which the attempt is to end; None: it goes by the current one."""
        return self._held.pinned(job_id if model == POLICY else holder(job_id, model), attempt)

    def release(self, job_id: str, attempt: int, model: str = POLICY, context_tokens: int = 0) -> None:
        """Release the job's assignment of a model, or stop waiting for one. That of a newer attempt stays.

        `context_tokens` is the longest prompt of the attempt with its answer; 0: unknown.
        """
        holder_id = job_id if model == POLICY else holder(job_id, model)
        held = self._held.release(holder_id, attempt)
        if held is not None:
            self._began.pop(holder_id, None)
            self._send(Release(new_id(), job_id, attempt, held.served, model, context_tokens))

    def backends(self) -> dict[str, str]:
        """Return the backends of the jobs' own turns, by job."""
        return self._held.backends()

    @property
    def holds_some(self) -> bool:
        """Whether any job has a backend or waits for one."""
        return len(self._held) > 0

    def keep_alive(self) -> None:
        self._send(self._held.report())

    def close(self) -> None:
        """Close the socket, and cancel calls that wait for an answer."""
        self._connection.close()

    async def _ask(self, request: Assign, limit_s: float, on_starting: Callable[[], None]) -> AnyBackendReply:
        def wait_longer() -> None:
            self._connection.extend(request.request_id, time.monotonic() + limit_s + RESEND_S)
            on_starting()

        self._wait_longer[request.request_id] = wait_longer
        try:
            frames = await self._connection.ask_frames(request, time.monotonic() + limit_s)
        except Closed:
            raise asyncio.CancelledError from None
        except RequestTimeout as error:
            message = f"the backend broker did not answer: {error.message}"
            raise NoBackend(message, job_id=request.job_id, waited_s=error.timeout_s) from None
        finally:
            del self._wait_longer[request.request_id]
        reply: AnyBackendReply = codec.decode(frames[0], AnyBackendReply)  # type: ignore[arg-type]
        return reply

    def _send(self, request: AnyBackendRequest) -> None:
        self._connection.send([codec.encode(request)])

    def _is_interim(self, content: dict[str, Any]) -> bool:
        try:
            reply: AnyBackendReply = codec.convert(content, AnyBackendReply)
        except MalformedMessage:
            return True  # the request is sent again
        if isinstance(reply, NameAll):
            self._send(self._held.report(full=True))
        if isinstance(reply, WaitLonger) and (wait_longer := self._wait_longer.get(reply.request_id)) is not None:
            wait_longer()
        return isinstance(reply, NameAll | WaitLonger)


def _named_models(job: Job) -> set[str]:
    return {job.model, *(NamedModel.of(named).name for named in job.models.values())}
