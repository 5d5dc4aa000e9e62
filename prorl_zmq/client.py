"""`RolloutClient`: a trainer's line to the service, on blocking REQ sockets.

    with RolloutClient() as client:
        client.submit(jobs)
        for trajectory in client.stream():
            learn(trajectory.token_ids, trajectory.reward)

Every request may be sent twice: if no reply comes (the broker was restarted), the same request goes out again until the
call's time is up. Results belong to the client's session and stay at the service until they are acknowledged, which
happens with the next `collect` after the one that gave them, or at `close`.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Self

import zmq

from . import codec
from .config import default_run_dir
from .errors import Busy, Closed, NoBackend, ProrlError, RequestTimeout
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
from .security.handshake import Handshake
from .security.keyring import CLIENT, Keyring, connect_to_peer, connect_to_service
from .sockets import open_socket, receive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from .messages import UpdateMode
    from .trajectory import Trajectory

RESEND_S = 2.0
"""A request is sent again after so long without a reply, beyond the time that its reply may be held: a broker that was
killed is back in about as long (bench/chaos.py), and what was on its way to it is lost."""
SEND_MS = 1000
"""Longest wait to hand a request to libzmq; only a connection that is being refused makes it wait at all."""


def default_front_door() -> str:
    """Give the front door of a service that was started without a topology file on this machine."""
    return f"ipc://{default_run_dir()}/front_door"


class RolloutClient:
    """Submits jobs and collects trajectories. For one thread; two threads take two clients.

    Args:
        endpoint: the service's front door; None: that of `prorl serve` without a topology file.
        session: the name under which jobs and results are kept apart from other trainers'; None: a new one. A trainer
            that was restarted names its old session to collect what it had submitted.
        timeout_s: longest time, in seconds, that a call waits for the service if it is not told otherwise.
        keys: for a service over TCP with keys: the folder that has ours and the service's public one, or our secret
            file in it (see SECURITY.md). None: `$PRORL_KEYS`, and without it no keys.

    Raises:
        ConfigError: the key folder is not private, or lacks a key.
        InvalidEndpoint: the endpoint is malformed.
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
        self._door = _Line.to_service(self._context, self._endpoint, self._keyring)
        self._collecting = CollectState(self.session, new_id())
        self._welcome: Welcome | None = None
        self.backends = Backends(self)
        """The inference backends: add, drain, remove, clear, list."""

    def submit(
        self, jobs: Job | Iterable[Job], *, timeout_s: float | None = None, busy_s: float | None = None
    ) -> list[str]:
        """Hand jobs over; when this returns, the service will end each in exactly one outcome. Returns their ids.

        While the service is full or starting, the call tries again until its time is up. All jobs of one call must
        find room; a session that has more than the service takes at once (`max_jobs`, `max_session_share`) submits
        them in parts, and collects in between.

        Args:
            jobs: those to submit.
            timeout_s: longest time in seconds for all of it; None: the client's `timeout_s`.
            busy_s: longest time to try again while the service is full; None: as long as there is time.

        Raises:
            UnknownTask, InvalidJob, JobTooLarge, DuplicateJob: a job was refused; of its request none was accepted.
            Busy: the service stayed full.
            RequestTimeout: it did not answer.
        """
        until = self._until(timeout_s)
        limit_bytes = self._hello(until).job_limit_bytes
        busy_until = until if busy_s is None else min(until, time.monotonic() + busy_s)
        accepted: list[str] = []
        for frames, ids in submissions(self.session, [jobs] if isinstance(jobs, Job) else jobs, limit_bytes):
            reply = self._submit(frames, until, busy_until)
            self._collecting.expect(ids, reply.journal_id)
            accepted += ids
        return accepted

    def collect(self, max_results: int = 64, *, wait_s: float | None = None) -> list[Trajectory]:
        """Take up to `max_results` finished jobs of the session; wait up to `wait_s` seconds for the first.

        Results of earlier calls are acknowledged by this one. An empty list means that the time is up.

        Raises:
            JobsLost: the rollout broker was started anew without its journal.
            RequestTimeout: the service did not answer.
        """
        until = time.monotonic() + (self.timeout_s if wait_s is None else wait_s)
        while not self._collecting.waiting:
            self._collect(max_results, min(max(0.0, until - time.monotonic()), POLL_S))
            self._collecting.check_lost()
            if time.monotonic() >= until:
                break
        return self._collecting.take(max_results)

    def stream(self, *, timeout_s: float | None = None) -> Iterator[Trajectory]:
        """Give the session's trajectories as they finish, until every job that was submitted has ended.

        Each is acknowledged when the next are asked for, so what a consumer dies over is given again to its session.

        Args:
            timeout_s: longest time in seconds without a new trajectory; None: no limit, since jobs have their own.

        Raises:
            JobsLost: the rollout broker was started anew without its journal.
            RequestTimeout: nothing finished for that time, or the service did not answer.
        """
        last = time.monotonic()
        wait = 0.0
        while True:
            self._collect(64, wait)
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

    def cancel(self, job_ids: str | Iterable[str], *, timeout_s: float | None = None) -> dict[str, str]:
        """End jobs with outcome `cancelled`. Returns `cancelled`, `finished` or `unknown` for each id.

        Raises:
            UnknownJob: one of these cannot be a job's id at all.
            RequestTimeout: the service did not answer.
        """
        ids = (job_ids,) if isinstance(job_ids, str) else tuple(job_ids)
        check_job_ids(ids)
        until = self._until(timeout_s)
        fates: dict[str, str] = {}
        for start in range(0, len(ids), IDS_PER_REQUEST):
            reply: Cancelled = self._ask(Cancel(new_id(), ids[start : start + IDS_PER_REQUEST]), until)
            fates.update(reply.jobs)
        return fates

    def status(self, *, timeout_s: float | None = None) -> ServiceStatus:
        """Describe the service: stage processes, queues, outcomes.

        Raises:
            RequestTimeout: it did not answer.
        """
        reply: ServiceStatus = self._ask(Status(new_id()), self._until(timeout_s))
        return reply

    def trace(self, job_id: str, *, timeout_s: float | None = None) -> JobTrace:
        """Tell what a job went through: each state, where, how long, and what ended it.

        Args:
            job_id: its id, or a beginning that no other job's has.
            timeout_s: longest wait for the answer; None: the client's `timeout_s`.

        Raises:
            UnknownJob: no such job is known (any more), or several ids begin so.
            RequestTimeout: the service did not answer.
        """
        check_job_ids((job_id,))
        reply: JobTrace = self._ask(Trace(new_id(), job_id), self._until(timeout_s))
        return reply

    def set_weight_version(self, weight_version: int, *, timeout_s: float | None = None) -> None:
        """Say that all backends serve these weights from now on; for engines that are updated by other means.

        Every token that they generate from now on carries the version, but where a server says another one itself.

        Raises:
            NoBackend: there is none.
            RequestTimeout: the backend broker, or an engine host, did not answer; `backend` names it.
        """
        until = self._until(timeout_s)
        self.backends.ask(SetWeightVersion(new_id(), weight_version), timeout_s)
        for _ in self._tell_engines(lambda: NoteWeightVersion(new_id(), weight_version), until):
            pass

    def update_weights(
        self, path: str | Path, weight_version: int, *, mode: UpdateMode = "keep", timeout_s: float | None = None
    ) -> None:
        """Have every backend serve the weights at `path` (seen from the engine hosts) from its next token on.

        Args:
            path: for vLLM a directory with safetensors of the model's own names and shapes; for the embedded engine an
                .npz file.
            weight_version: what to call them; every token that they generate carries it.
            mode: what becomes of running generations. `keep`: they pause and go on with the new weights. `drain`: they
                end first, with the old ones. `abort`: they are ended, and the rest of their turns is generated anew.
            timeout_s: longest wait for all backends; None: the client's `timeout_s`. With `drain`, allow for the
                longest turn.

        Raises:
            NoBackend: there is none.
            InvalidWeights: an engine refused them and serves what it served; `backend` names it.
            RequestTimeout: an engine did not answer; `backend` names it.
        """
        until = self._until(timeout_s)
        for backend_id in self._tell_engines(lambda: UpdateWeights(new_id(), str(path), weight_version, mode), until):
            self.backends.ask(SetWeightVersion(new_id(), weight_version, backend_id), timeout_s)

    def close(self) -> None:
        """Acknowledge what was collected, give back the rest (if the service answers in a second), and close."""
        if self._context.closed:
            return
        try:
            if self._welcome is not None:
                self._collect(0, 0.0, timeout_s=1.0, goodbye=True)
        except ProrlError:
            pass  # unacknowledged results stay with the session, where its next client finds them
        finally:
            self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Requests ---------------------------------------------------------------------------------------------------------

    def _until(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)

    def _hello(self, until: float) -> Welcome:
        if self._welcome is None:
            hello = Hello(new_id())
            self._welcome = self._door.ask([codec.encode(hello)], hello.request_id, until)
        return self._welcome

    def _ask(self, request: Any, until: float) -> Any:
        self._hello(until)
        return self._door.ask([codec.encode(request)], request.request_id, until)

    def _submit(self, frames: list[bytes], until: float, busy_until: float) -> Accepted:
        request_id = codec.request_id(codec.unpack(frames[0]))
        while True:
            try:
                reply: Accepted = self._door.ask(frames, request_id, until)
            except Busy as error:
                pause = float(error.fields.get("retry_after_s") or 1.0)
                if time.monotonic() + pause > busy_until:
                    raise
                time.sleep(pause)
            else:
                return reply

    def _collect(
        self, max_results: int, wait_s: float, timeout_s: float | None = None, *, goodbye: bool = False
    ) -> None:
        if self._collecting.waiting and max_results:
            return
        until = self._until(timeout_s) + wait_s
        self._hello(until)
        request = self._collecting.request(max_results, wait_s, goodbye=goodbye)
        frames = self._door.ask_frames([codec.encode(request)], request.request_id, until, held_s=wait_s)
        self._collecting.receive(request, frames)

    def _tell_engines(self, request: Callable[[], UpdateWeights | NoteWeightVersion], until: float) -> Iterator[str]:
        """Ask all engine hosts the same at one time, and give each backend's id once it has done it."""
        lines = {
            status.backend.backend_id: _Line.to_engine(self._context, status.backend, self._keyring)
            for status in self.backends.list()
        }
        if not lines:
            raise NoBackend("no backend is registered, so none has taken the weights; see `prorl backends list`")
        try:
            requests = {backend_id: request() for backend_id in lines}
            for backend_id, line in lines.items():
                line.send([codec.encode(requests[backend_id])])
            for backend_id, line in lines.items():
                with _naming(backend_id):
                    if line.reply(requests[backend_id].request_id, until) is None:
                        raise RequestTimeout("its engine host did not answer in time")
                yield backend_id
        finally:
            for line in lines.values():
                line.close()

    def _backend_broker(self, until: float) -> _Line:
        return _Line.to_service(self._context, self._hello(until).backend_broker, self._keyring)


class Backends:
    """The inference backends of a service; a part of `RolloutClient`.

    Each call raises `RequestTimeout` if the backend broker does not answer.
    """

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._line: _Line | None = None

    def add(self, backend: Backend) -> None:
        """Register a backend that does not register itself; adding a draining one again makes it ready.

        Raises:
            DuplicateBackend: another one has its id.
        """
        self.ask(AddBackend(new_id(), backend))

    def drain(self, backend_id: str) -> None:
        """Assign no more jobs to a backend; those that hold it keep it.

        Raises:
            UnknownBackend: there is none of that id.
        """
        self.ask(DrainBackend(new_id(), backend_id))

    def remove(self, backend_id: str) -> None:
        """Forget a backend and the assignments on it.

        Raises:
            UnknownBackend: there is none of that id.
        """
        self.ask(RemoveBackend(new_id(), backend_id))

    def clear(self) -> None:
        """Forget all backends."""
        self.ask(ClearBackends(new_id()))

    def list(self, *, timeout_s: float | None = None) -> tuple[BackendStatus, ...]:
        """Describe all backends: state, weight version, assignments in flight."""
        reply: BackendList = self.ask(ListBackends(new_id()), timeout_s)
        return reply.backends

    def ask(self, request: Any, timeout_s: float | None = None) -> Any:
        """Send any request to the backend broker and give its reply."""
        until = self._client._until(timeout_s)  # noqa: SLF001 - a part of the client
        if self._line is None:
            self._line = self._client._backend_broker(until)  # noqa: SLF001 - a part of the client
        return self._line.ask([codec.encode(request)], request.request_id, until)


class _Line:
    """A REQ socket that sends a request again while no reply comes, and knows which reply is its own.

    Of a connection that the other side refuses it says so at once, and tries it again with the next request.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keyring: Keyring | None,
        connect: Callable[[zmq.Socket[bytes]], None],
    ) -> None:
        self._socket = open_socket(context, zmq.REQ)
        self._socket.sndtimeo = SEND_MS
        self._endpoint = endpoint
        self._handshake = Handshake(self._socket, endpoint, keyring)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if endpoint.startswith("tcp://"):
            self._poller.register(self._handshake.watch(), zmq.POLLIN)
        try:
            connect(self._socket)
        except BaseException:
            self.close()
            raise

    @classmethod
    def to_service(cls, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keyring: Keyring | None) -> Self:
        """Open the line to a broker."""
        return cls(context, endpoint, keyring, lambda socket: connect_to_service(socket, endpoint, keyring))

    @classmethod
    def to_engine(cls, context: zmq.Context[zmq.Socket[bytes]], backend: Backend, keyring: Keyring | None) -> Self:
        """Open the line to an engine host."""
        endpoint, key = backend.endpoint, backend.curve_key
        return cls(context, endpoint, keyring, lambda socket: connect_to_peer(socket, endpoint, key, keyring))

    def ask(self, frames: list[bytes], request_id: str, until: float) -> Any:
        return read_reply(self.ask_frames(frames, request_id, until))

    def ask_frames(
        self, frames: list[bytes], request_id: str, until: float, held_s: float = 0.0
    ) -> list[bytes | zmq.Frame]:
        started = time.monotonic()
        while True:
            self.send(frames)
            received = self.receive(request_id, min(until, time.monotonic() + held_s + RESEND_S))
            if received is not None:
                return received
            if time.monotonic() >= until:
                waited = time.monotonic() - started
                why = self._handshake.problem or "is the service running? (`prorl serve`)"
                message = f"no reply from {self._endpoint} within {waited:.1f} s; {why}"
                raise RequestTimeout(message, timeout_s=waited)

    def send(self, frames: list[bytes]) -> None:
        if self._socket.closed:
            raise Closed("the client was closed")
        self._handshake.drain()
        if self._handshake.refused:
            self._handshake.renew()
        with contextlib.suppress(zmq.Again):  # refused at this moment: the wait for the reply will say so
            self._socket.send_multipart(frames)

    def reply(self, request_id: str, until: float) -> Any:
        frames = self.receive(request_id, until)
        return read_reply(frames) if frames is not None else None

    def receive(self, request_id: str, until: float) -> list[bytes | zmq.Frame] | None:
        """Give the reply to a request; None if none came in time. Replies to earlier ones are dropped."""
        while ready := dict(self._poller.poll(max(0, int(1000 * (until - time.monotonic()))))):
            self._handshake.drain()
            if self._handshake.refused:
                raise self._handshake.error()
            if self._socket not in ready:
                continue
            try:
                frames = receive(self._socket, copied=1)
            except zmq.Again:
                continue  # it was the late reply to an earlier sending, which REQ_CORRELATE drops
            if codec.request_id(codec.unpack(frames[0])) in (request_id, "unknown"):  # type: ignore[arg-type]
                return frames
        return None

    def close(self) -> None:
        self._handshake.close()
        self._socket.close()


class _naming:  # noqa: N801 - reads as a statement
    """Add the backend's id to an error that passes."""

    def __init__(self, backend_id: str) -> None:
        self._backend_id = backend_id

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, ProrlError):
            error.fields["backend"] = self._backend_id
            error.message = f"backend {self._backend_id}: {error.message}"
            error.args = (error.message,)
