"""`AsyncRolloutClient`: `RolloutClient` for asyncio (any loop), on DEALER sockets with many requests at once."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Self

import zmq

from . import codec
from .client import RESEND_S, default_front_door
from .errors import Busy, Closed, MalformedMessage, NoBackend, ProrlError, RequestTimeout
from .messages import (
    Accepted,
    AddBackend,
    Backend,
    BackendList,
    BackendStatus,
    Cancel,
    Cancelled,
    ClearBackends,
    DrainBackend,
    Hello,
    Job,
    JobTrace,
    ListBackends,
    NoteWeightVersion,
    RemoveBackend,
    ServiceStatus,
    SetWeightVersion,
    Status,
    Trace,
    UpdateWeights,
    Welcome,
    new_id,
)
from .requests import IDS_PER_REQUEST, POLL_S, CollectState, check_job_ids, read_reply, submissions
from .security.keyring import CLIENT, Keyring
from .security.line import Line
from .sockets import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from pathlib import Path

    from .messages import UpdateMode
    from .trajectory import Trajectory


class AsyncRolloutClient:
    """Submits jobs and collects trajectories on an asyncio loop. Use it as an asynchronous context manager.

    Args:
        endpoint: the service's front door; None: that of `prorl serve` without a topology file.
        session: the name under which jobs and results are kept apart from other trainers'; None: a new one.
        timeout_s: longest time, in seconds, that a call waits for the service if it is not told otherwise.
        keys: see `RolloutClient`.

    Raises:
        ConfigError: the key folder is not private, or lacks a key.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        session: str | None = None,
        timeout_s: float = 30.0,
        keys: str | Path | None = None,
    ) -> None:
        self.session = session if session is not None else new_id()
        self.timeout_s = timeout_s
        self._keyring = Keyring.load(keys, CLIENT)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._endpoint = endpoint if endpoint is not None else default_front_door()
        self._lines: dict[str, _AsyncLine] = {}
        self._collecting = CollectState(self.session, new_id())
        self._one_collect = asyncio.Lock()
        self._welcome: Welcome | None = None
        self.backends = AsyncBackends(self)
        """The inference backends: add, drain, remove, clear, list."""

    async def submit(
        self, jobs: Job | Iterable[Job], *, timeout_s: float | None = None, busy_s: float | None = None
    ) -> list[str]:
        """Hand jobs over, and give their ids; see `RolloutClient.submit`."""
        until = self._until(timeout_s)
        limit_bytes = (await self._hello(until)).job_limit_bytes
        busy_until = until if busy_s is None else min(until, time.monotonic() + busy_s)
        accepted: list[str] = []
        for frames, ids in submissions(self.session, [jobs] if isinstance(jobs, Job) else jobs, limit_bytes):
            reply = await self._submit(frames, until, busy_until)
            self._collecting.expect(ids, reply.journal_id)
            accepted += ids
        return accepted

    async def collect(self, max_results: int = 64, *, wait_s: float | None = None) -> list[Trajectory]:
        """Take up to `max_results` finished jobs; see `RolloutClient.collect`. Concurrent calls take turns."""
        until = time.monotonic() + (self.timeout_s if wait_s is None else wait_s)
        while not self._collecting.waiting:
            await self._collect(max_results, min(max(0.0, until - time.monotonic()), POLL_S))
            self._collecting.check_lost()
            if time.monotonic() >= until:
                break
        return self._collecting.take(max_results)

    async def stream(self, *, timeout_s: float | None = None) -> AsyncIterator[Trajectory]:
        """Give the session's trajectories as they finish, until all have ended; see `RolloutClient.stream`."""
        last = time.monotonic()
        wait = 0.0
        while True:
            await self._collect(64, wait)
            self._collecting.check_lost()
            if self._collecting.waiting:
                while self._collecting.waiting:
                    yield self._collecting.take(1)[0]
                last = time.monotonic()
            elif not self._collecting.remaining:
                return
            elif timeout_s is not None and time.monotonic() - last >= timeout_s:
                raise RequestTimeout(
                    f"no job ended for {timeout_s:g} s; {self._collecting.remaining} are still going on",
                    timeout_s=timeout_s,
                )
            left = POLL_S if timeout_s is None else timeout_s - (time.monotonic() - last)
            wait = max(0.0, min(left, POLL_S)) if self._collecting.remaining else 0.0

    async def cancel(self, job_ids: str | Iterable[str], *, timeout_s: float | None = None) -> dict[str, str]:
        """End jobs with outcome `cancelled`; see `RolloutClient.cancel`."""
        ids = (job_ids,) if isinstance(job_ids, str) else tuple(job_ids)
        check_job_ids(ids)
        until = self._until(timeout_s)
        fates: dict[str, str] = {}
        for start in range(0, len(ids), IDS_PER_REQUEST):
            reply: Cancelled = await self._ask(Cancel(new_id(), ids[start : start + IDS_PER_REQUEST]), until)
            fates.update(reply.jobs)
        return fates

    async def status(self, *, timeout_s: float | None = None) -> ServiceStatus:
        """Describe the service; see `RolloutClient.status`."""
        reply: ServiceStatus = await self._ask(Status(new_id()), self._until(timeout_s))
        return reply

    async def trace(self, job_id: str, *, timeout_s: float | None = None) -> JobTrace:
        """Tell what a job went through; see `RolloutClient.trace`."""
        check_job_ids((job_id,))
        reply: JobTrace = await self._ask(Trace(new_id(), job_id), self._until(timeout_s))
        return reply

    async def set_weight_version(self, weight_version: int, *, timeout_s: float | None = None) -> None:
        """Say that all backends serve these weights from now on; see `RolloutClient.set_weight_version`."""
        until = self._until(timeout_s)
        await self.backends.ask(SetWeightVersion(new_id(), weight_version), timeout_s)
        await self._tell_engines(lambda: NoteWeightVersion(new_id(), weight_version), until)

    async def update_weights(
        self, path: str | Path, weight_version: int, *, mode: UpdateMode = "keep", timeout_s: float | None = None
    ) -> None:
        """Have every backend serve the weights at `path`; see `RolloutClient.update_weights`."""
        until = self._until(timeout_s)
        await self._tell_engines(lambda: UpdateWeights(new_id(), str(path), weight_version, mode), until)

    async def close(self) -> None:
        """Acknowledge what was collected, give back the rest (if the service answers in a second), and close."""
        if self._context.closed:
            return
        try:
            if self._welcome is not None:
                await self._collect(0, 0.0, timeout_s=1.0, goodbye=True)
        except ProrlError:
            pass  # unacknowledged results stay with the session, where its next client finds them
        finally:
            for line in self._lines.values():
                line.close()
            self._context.destroy(linger=0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Requests ---------------------------------------------------------------------------------------------------------

    def _until(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)

    async def _tell_engines(self, request: Callable[[], UpdateWeights | NoteWeightVersion], until: float) -> None:
        """Ask all engine hosts the same at one time, and note the version of each that has done it."""

        async def tell(backend: Backend) -> None:
            asked = request()
            try:
                line = self._line(backend.endpoint, backend)
                await line.ask([codec.encode(asked)], asked.request_id, until)
            except ProrlError as error:
                error.fields["backend"] = backend.backend_id
                error.message = f"backend {backend.backend_id}: {error.message}"
                error.args = (error.message,)
                raise
            noted = SetWeightVersion(new_id(), asked.weight_version, backend.backend_id)
            await self.backends.ask(noted, max(0.0, until - time.monotonic()))

        told = [tell(status.backend) for status in await self.backends.list()]
        if not told:
            raise NoBackend("no backend is registered, so none has taken the weights; see `prorl backends list`")
        for outcome in await asyncio.gather(*told, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def _line(self, endpoint: str, backend: Backend | None = None) -> _AsyncLine:
        """Give the line to a broker, or to a backend's engine host."""
        if self._context.closed:
            raise Closed("the client was closed")
        if endpoint not in self._lines:
            self._lines[endpoint] = _AsyncLine(
                self._context, endpoint, self._keyring, None if backend is None else backend.curve_key
            )
        return self._lines[endpoint]

    async def _hello(self, until: float) -> Welcome:
        if self._welcome is None:
            hello = Hello(new_id())
            self._welcome = await self._line(self._endpoint).ask([codec.encode(hello)], hello.request_id, until)
        return self._welcome

    async def _ask(self, request: Any, until: float) -> Any:
        await self._hello(until)
        return await self._line(self._endpoint).ask([codec.encode(request)], request.request_id, until)

    async def _submit(self, frames: list[bytes], until: float, busy_until: float) -> Accepted:
        request_id = codec.request_id(codec.unpack(frames[0]))
        while True:
            try:
                reply: Accepted = await self._line(self._endpoint).ask(frames, request_id, until)
            except Busy as error:
                pause = float(error.fields.get("retry_after_s") or 1.0)
                if time.monotonic() + pause > busy_until:
                    raise
                await asyncio.sleep(pause)
            else:
                return reply

    async def _collect(
        self, max_results: int, wait_s: float, timeout_s: float | None = None, *, goodbye: bool = False
    ) -> None:
        async with self._one_collect:
            if self._collecting.waiting and max_results:
                return
            until = self._until(timeout_s) + wait_s
            await self._hello(until)
            request = self._collecting.request(max_results, wait_s, goodbye=goodbye)
            line = self._line(self._endpoint)
            frames = await line.ask_frames([codec.encode(request)], request.request_id, until, held_s=wait_s)
            self._collecting.receive(request, frames)


class AsyncBackends:
    """The inference backends of a service; a part of `AsyncRolloutClient`. See `client.Backends`."""

    def __init__(self, client: AsyncRolloutClient) -> None:
        self._client = client

    async def add(self, backend: Backend) -> None:
        """Register a backend that does not register itself; adding a draining one again makes it ready."""
        await self.ask(AddBackend(new_id(), backend))

    async def drain(self, backend_id: str) -> None:
        """Assign no more jobs to a backend; those that hold it keep it."""
        await self.ask(DrainBackend(new_id(), backend_id))

    async def remove(self, backend_id: str) -> None:
        """Forget a backend and the assignments on it."""
        await self.ask(RemoveBackend(new_id(), backend_id))

    async def clear(self) -> None:
        """Forget all backends."""
        await self.ask(ClearBackends(new_id()))

    async def list(self, *, timeout_s: float | None = None) -> tuple[BackendStatus, ...]:
        """Describe all backends: state, weight version, assignments in flight."""
        reply: BackendList = await self.ask(ListBackends(new_id()), timeout_s)
        return reply.backends

    async def ask(self, request: Any, timeout_s: float | None = None) -> Any:
        """Send any request to the backend broker and give its reply."""
        client = self._client
        until = client._until(timeout_s)  # noqa: SLF001 - a part of the client
        endpoint = (await client._hello(until)).backend_broker  # noqa: SLF001 - a part of the client
        line = client._line(endpoint)  # noqa: SLF001 - a part of the client
        return await line.ask([codec.encode(request)], request.request_id, until)


class _AsyncLine:
    """A DEALER socket whose replies find their requests by id; a request is sent again while no reply comes."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keyring: Keyring | None,
        curve_key: str | None,
    ) -> None:
        self._endpoint = endpoint
        self._pending: dict[str, asyncio.Future[list[bytes | zmq.Frame]]] = {}
        self._socket = Line(
            context,
            zmq.DEALER,
            endpoint,
            keyring,
            self._receive,
            curve_key=curve_key,
            copied=2,
            on_refused=self._refused,
            limit_bytes=MAX_FRAME_BYTES,
        )

    async def ask(self, frames: list[bytes], request_id: str, until: float) -> Any:
        return read_reply(await self.ask_frames(frames, request_id, until))

    async def ask_frames(
        self, frames: list[bytes], request_id: str, until: float, held_s: float = 0.0
    ) -> list[bytes | zmq.Frame]:
        future: asyncio.Future[list[bytes | zmq.Frame]] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = future
        started = time.monotonic()
        try:
            while True:
                self._socket.send([b"", *frames])
                left = min(until - time.monotonic(), held_s + RESEND_S)
                done, _ = await asyncio.wait([future], timeout=max(0.0, left))
                if done:
                    return future.result()
                if time.monotonic() >= until:
                    waited = time.monotonic() - started
                    why = self._socket.handshake.problem or "is the service running? (`prorl serve`)"
                    message = f"no reply from {self._endpoint} within {waited:.1f} s; {why}"
                    raise RequestTimeout(message, timeout_s=waited)
        finally:
            del self._pending[request_id]

    def close(self) -> None:
        self._socket.close()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(Closed("the client was closed"))

    def _refused(self) -> None:
        for future in self._pending.values():
            if not future.done():
                future.set_exception(self._socket.handshake.error())

    def _receive(self, frames: list[bytes | zmq.Frame]) -> None:
        try:
            request_id = codec.request_id(codec.unpack(frames[1]))  # type: ignore[arg-type]
        except (MalformedMessage, IndexError):
            return  # the request is sent again
        future = self._pending.get(request_id)
        if future is not None and not future.done():
            future.set_result(frames[1:])
