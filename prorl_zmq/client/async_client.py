"""`AsyncRolloutClient`: `RolloutClient` for asyncio (any loop), on DEALER sockets with many requests at once."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Self

import zmq

from ..errors import Busy, Closed, ProrlError, RequestTimeout
from ..security.keyring import CLIENT, Keyring
from ..wire import codec
from ..wire.messages.base import new_id
from ..wire.messages.front_door import Cancel, Hello, NoteWeights, Status, Trace
from ..wire.messages.jobs import Job
from .async_backends import AsyncBackends
from .async_batch import AsyncBatch
from .async_request_connection import AsyncRequestConnection
from .async_weights import AsyncWeights
from .batch_progress import BatchProgress, batch_options
from .client import default_front_door
from .keep_alive import KeepAlive
from .requests import IDS_PER_REQUEST, POLL_S, CollectState, check_job_ids, read_reply, submissions
from .weights import UPDATE_LIMIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

    from ..data.trajectory import Trajectory
    from ..wire.messages.batches import CarryOver, GroupFilter
    from ..wire.messages.engines import UpdateMode
    from ..wire.messages.front_door import Accepted, Cancelled, JobTrace, ServiceStatus, Welcome
    from .requests import Received


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
        self._lines: dict[str, AsyncRequestConnection] = {}
        self._collecting = CollectState(self.session, new_id())
        self._one_collect = asyncio.Lock()
        self._welcome: Welcome | None = None
        self._keep_alive: KeepAlive | None = None
        self.backends = AsyncBackends(self)
        """The inference backends: add, drain, remove, clear, list."""
        self.weight_version: int | None = None
        """What this client said last that the backends serve; None: nothing yet."""
        self._weights = AsyncWeights(self.backends)

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

    async def open_batch(
        self,
        target_groups: int,
        group_size: int,
        *,
        keep: str | GroupFilter = "informative",
        carry: CarryOver = "running",
        weight: float = 1.0,
        max_staleness: int | None = None,
        max_replacements: int = 4,
        stop_early: bool = True,
        adopt: bool = True,
        max_given_up: int = 32,
        lease_s: float = 60.0,
        batch_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncBatch:
        """Ask for groups of rollouts; see `RolloutClient.open_batch`."""
        options = batch_options(
            keep,
            target_groups=target_groups,
            group_size=group_size,
            carry=carry,
            weight=weight,
            max_staleness=max_staleness,
            max_replacements=max_replacements,
            stop_early=stop_early,
            adopt=adopt,
            max_given_up=max_given_up,
            lease_s=lease_s,
        )
        until = self._until(timeout_s)
        name = batch_id if batch_id is not None else new_id()
        progress = BatchProgress(self.session, name, options, (await self._hello(until)).job_limit_bytes)
        progress.opened(await self._ask(progress.open_request(), until))
        if self._keep_alive is None:
            self._keep_alive = KeepAlive(self._endpoint, self._keyring, self.session, lease_s)
        self._keep_alive.shorten(lease_s)
        return AsyncBatch(self, name, progress)

    async def begin_weights(
        self,
        version: int,
        mode: UpdateMode = "keep",
        *,
        update_limit_s: float = UPDATE_LIMIT_S,
        timeout_s: float | None = None,
    ) -> None:
        """Stop all generating, so that you can change the engines' weights; see `RolloutClient.begin_weights`."""
        await self._weights.begin(version, mode, update_limit_s, self._until(timeout_s))

    async def end_weights(self, version: int, *, timeout_s: float | None = None) -> None:
        """Say that the engines have the weights that were begun; see `RolloutClient.end_weights`."""
        await self._weights.end(version, self._until(timeout_s))
        await self._note_weights(version)

    async def cancel_weights(self, version: int, *, timeout_s: float | None = None) -> None:
        """Take `begin_weights` back; see `RolloutClient.cancel_weights`."""
        await self._weights.cancel(version, self._until(timeout_s))

    async def update_weights(
        self, path: str | Path, weight_version: int, *, mode: UpdateMode = "keep", timeout_s: float | None = None
    ) -> None:
        """Have every backend load the weights at `path`; see `RolloutClient.update_weights`."""
        await self._weights.update(path, weight_version, mode, self._until(timeout_s))
        await self._note_weights(weight_version)

    async def set_weight_version(self, weight_version: int, *, timeout_s: float | None = None) -> None:
        """Say that all backends serve these weights from now on; see `RolloutClient.set_weight_version`."""
        await self._weights.set_version(weight_version, self._until(timeout_s))
        await self._note_weights(weight_version)

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
            if self._keep_alive is not None:
                self._keep_alive.close()
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

    async def _note_weights(self, version: int) -> None:
        """Tell the batches, which may drop what is too old now."""
        self.weight_version = version
        await self._ask(NoteWeights(new_id(), version), self._until(None))

    def _line(self, endpoint: str) -> AsyncRequestConnection:
        if self._context.closed:
            raise Closed("the client was closed")
        if endpoint not in self._lines:
            self._lines[endpoint] = AsyncRequestConnection(self._context, endpoint, self._keyring)
        return self._lines[endpoint]

    async def _hello(self, until: float) -> Welcome:
        if self._welcome is None:
            hello = Hello(new_id())
            self._welcome = await self._line(self._endpoint).ask([codec.encode(hello)], hello.request_id, until)
        return self._welcome

    async def _ask(self, request: Any, until: float) -> Any:
        return read_reply(await self.ask_frames(request, [codec.encode(request)], until))

    async def ask_frames(self, request: Any, frames: list[bytes], until: float, held_s: float = 0.0) -> list[Received]:
        """Send a request to the front door, and give its reply's frames; for the parts of this client."""
        await self._hello(until)
        return await self._line(self._endpoint).ask_frames(frames, request.request_id, until, held_s=held_s)

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
            request = self._collecting.request(max_results, wait_s, goodbye=goodbye)
            frames = await self.ask_frames(request, [codec.encode(request)], until, held_s=wait_s)
            self._collecting.receive(request, frames)
