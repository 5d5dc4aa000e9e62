"""What trainers ask, answered: checks each request, changes the job table, and holds the replies of long polls.

Owns no socket: the rollout broker hands it what its ROUTER received and sends what it answers. Every request may come
twice (a client that lost a reply asks again) and then gets the same answer: jobs carry their own ids, and results stay
until they are acknowledged. A client that dies before its reply costs nothing: a newer `Collect` of the same client
takes the place of the one that is held, and the results in a lost reply are given again.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from typing import TYPE_CHECKING, Any

from ...errors import DuplicateJob, InternalError, JournalFailed, MalformedMessage, ProrlError, VersionMismatch
from ...security.rights import ANYBODY
from ...wire import codec
from ...wire.messages.base import MAX_FRAMES, PROTOCOL_VERSION
from ...wire.messages.front_door import (
    Accepted,
    Cancel,
    Cancelled,
    Collect,
    Collected,
    FrontDoorRequest,
    Hello,
    Refused,
    ServiceStatus,
    Status,
    Submit,
    Trace,
    Welcome,
)
from ...wire.sockets import split_envelope
from ..batches.request_handler import BatchRequest, BatchRequestHandler
from ..journal.journal import JobState, StoredBlock
from ..request_routing import FRONT_DOOR, convert_request
from .job_frame import read_job
from .job_record import Place
from .result_store import job_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...config import RolloutBrokerSettings
    from ...security.rights import Sender
    from ...wire.messages.front_door import FrontDoorReply, JobTrace
    from ...wire.messages.jobs import Job
    from ...wire.sockets import Frame
    from ..batches.batch_runner import BatchRunner
    from ..journal.write_ahead import WriteAhead
    from .actions import Action
    from .job_history import JobHistory
    from .job_table import JobTable
    from .quota import Quota
    from .result_store import Finished, ResultStore
    from .task_catalog import TaskCatalog


log = logging.getLogger("prorl.rollout_broker")


@dataclass(frozen=True, slots=True)
class _HeldPoll:
    envelope: Sequence[Frame]
    request: Collect
    sender: Sender
    until: float


class FrontDoor:
    """Answers the requests of trainers.

    Args:
        settings: limits.
        backend_broker: the endpoint that clients are told.
        table: the jobs that have not ended.
        outbox: the results that were not acknowledged.
        history: what each job went through.
        catalog: the tasks that are served.
        quota: what each session may hold.
        writes: has what is new written down before it is told to anybody.
        perform: does what the job table decides.
        reply: sends frames to the client behind an envelope; false if there is none any more.
        look_again: says whether a sender's key was revoked since.
        batches: the batches of all sessions.
        started_at: when the service started, on the clock of `now`.
    """

    def __init__(
        self,
        settings: RolloutBrokerSettings,
        backend_broker: str,
        table: JobTable,
        outbox: ResultStore,
        history: JobHistory,
        catalog: TaskCatalog,
        quota: Quota,
        writes: WriteAhead,
        perform: Callable[[list[Action]], None],
        reply: Callable[[Sequence[Frame]], bool],
        look_again: Callable[[Sender], Sender],
        batches: BatchRunner,
        started_at: float,
    ) -> None:
        self._settings = settings
        self._backend_broker = backend_broker
        self._table = table
        self._outbox = outbox
        self._history = history
        self._catalog = catalog
        self._quota = quota
        self._writes = writes
        self._perform = perform
        self._reply = reply
        self._look_again = look_again
        self._polls: dict[tuple[str, str], _HeldPoll] = {}
        """By session and client."""
        self._batches = batches
        self._batch_desk = BatchRequestHandler(batches, writes, self._answer, look_again)
        self._started_at = started_at

    def handle(self, frames: list[bytes], now: float, sender: Sender = ANYBODY) -> None:
        """Answer one request: `frames` as the ROUTER received them, from `sender`."""
        try:
            envelope, message = split_envelope(frames)
        except MalformedMessage:
            return  # without a delimiter there is no telling where an answer would go
        request_id = "unknown"
        try:
            if len(message) > MAX_FRAMES:
                raise MalformedMessage(f"a message of {len(message)} frames is over the limit of {MAX_FRAMES}")
            header, *rest = message
            content = codec.unpack(header)
            request_id = codec.request_id(content)
            request: FrontDoorRequest = convert_request(content, FrontDoorRequest, FRONT_DOOR)
            sender.check(request)
            self._dispatch(envelope, request, rest, sender, now)
        except ProrlError as error:
            self._answer(envelope, Refused(request_id, error.info()))
        except Exception as error:
            log.exception("request %s failed", request_id)
            self._answer(envelope, Refused(request_id, InternalError(f"{type(error).__name__}: {error}").info()))

    def next_deadline(self) -> float | None:
        """Give the time at which the first held reply is due."""
        deadlines = (self._batch_desk.next_deadline(), *(poll.until for poll in self._polls.values()))
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def answer_held(self, sessions: set[str], now: float) -> None:
        """Answer the held polls of sessions with new results, those whose time is up, and those of revoked keys."""
        self._batch_desk.answer_held(now)
        for key, poll in tuple(self._polls.items()):
            if poll.sender.user_id and self._look_again(poll.sender).revoked:
                del self._polls[key]
                self._answer(poll.envelope, Refused(poll.request.request_id, poll.sender.revocation().info()))
            elif poll.request.session in sessions or poll.until <= now:
                try:
                    self._collect(poll.envelope, poll.request, poll.sender, now, final=poll.until <= now)
                except JournalFailed as error:
                    self._answer(poll.envelope, Refused(poll.request.request_id, error.info()))
                if self._polls.get(key) is poll and poll.until <= now:
                    del self._polls[key]

    # Requests ---------------------------------------------------------------------------------------------------------

    def _dispatch(
        self, envelope: Sequence[Frame], request: FrontDoorRequest, rest: list[bytes], sender: Sender, now: float
    ) -> None:
        if isinstance(request, BatchRequest):
            self._batch_desk.handle(envelope, request, rest, sender, now)
            return
        if rest and not isinstance(request, Submit):
            raise MalformedMessage(f"{len(rest)} unexpected frames behind the header")
        match request:
            case Collect():
                dropped = self._acknowledge(request)
                if request.goodbye:
                    self._outbox.take_leave(request.client_id)
                self._collect(envelope, request, sender, now, final=request.wait_s == 0)
                del dropped  # large blocks take a while to free: not before the reply
            case Submit():
                self._answer(envelope, self._submit(request, rest, now))
            case Cancel():
                self._cancel(envelope, request, now)
            case Status():
                self._answer(envelope, self._status(request, now))
            case Hello():
                self._answer(envelope, self._hello(request))
            case Trace():
                self._answer(envelope, self._trace(request))

    def _hello(self, request: Hello) -> Welcome:
        if request.protocol != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"the client speaks protocol {request.protocol}, the service {PROTOCOL_VERSION}; install the same "
                "version of prorl-zmq on both sides",
                ours=PROTOCOL_VERSION,
                theirs=request.protocol,
            )
        return Welcome(
            request.request_id,
            protocol=PROTOCOL_VERSION,
            version=version("prorl-zmq"),
            backend_broker=self._backend_broker,
            job_limit_bytes=self._settings.job_limit_bytes,
        )

    def _submit(self, request: Submit, frames: list[bytes], now: float) -> Accepted:
        new: dict[str, tuple[Job, bytes]] = {}
        for frame in frames:
            job = read_job(frame, self._settings.job_limit_bytes)
            known = job_digest(new[job.job_id][1]) if job.job_id in new else self._known(request.session, job.job_id)
            if known is None:
                self._catalog.check(job)
                new[job.job_id] = (job, frame)
            elif known != job_digest(frame):
                raise DuplicateJob(f"another job is called {job.job_id}; ids must be unique", job_id=job.job_id)
        self._quota.check(request.session, len(new), sum(len(packed) for _, packed in new.values()))
        if new:
            numbers = count(self._table.last_sequence + 1)
            states = [
                JobState(next(numbers), request.session, job.job_id, job.task, job.stage_wait_s, packed)
                for job, packed in new.values()
            ]
            self._writes.accept(states, now)
        for job, packed in new.values():
            self._quota.submitted(request.session, job.job_id, len(packed))
            self._perform(self._table.submit(request.session, job, packed, now))
        return Accepted(request.request_id, new=len(new), journal_id=self._writes.journal_id)

    def _known(self, session: str, job_id: str) -> bytes | None:
        """Give the digest of the job of that id, if there is one; of another session's, one that fits no job."""
        if job_id in self._table:
            return job_digest(self._table.packed(job_id)) if self._table.session(job_id) == session else b""
        ended = self._outbox.get(job_id)
        if ended is None:
            return None
        return ended.job_digest if ended.session == session else b""

    def _acknowledge(self, request: Collect) -> list[Finished]:
        """Drop what the client says it has; give it to the caller, who lets go of the memory when it suits."""
        dropped = self._outbox.acknowledge(request.session, request.acknowledge)
        if dropped:
            job_ids = [finished.result.job_id for finished in dropped]
            self._writes.acknowledge(dropped)
            self._quota.collected(dropped)
            self._history.collected(job_ids, time.time())
        return dropped

    def _collect(self, envelope: Sequence[Frame], request: Collect, sender: Sender, now: float, *, final: bool) -> None:
        """Answer a poll if there is a result, or if it is `final`; hold it otherwise."""
        key = (request.session, request.client_id)
        finished = self._outbox.take(request.session, request.client_id, request.max_results, now)
        if not finished and not final:
            if key not in self._polls or self._polls[key].request is not request:
                self._polls[key] = _HeldPoll(envelope, request, sender, now + request.wait_s)
            return
        self._polls.pop(key, None)
        reply = Collected(
            request.request_id,
            results=tuple(item.result for item in finished),
            remaining=self._table.unfinished(request.session) + self._outbox.waiting(request.session) - len(finished),
            journal_id=self._writes.journal_id,
        )
        try:
            sent = self._answer(envelope, reply, [self._block(item) for item in finished if item.result.tokens])
        except JournalFailed:
            self._outbox.put_back(finished)
            raise
        if not sent:
            self._outbox.put_back(finished)

    def _block(self, finished: Finished) -> Frame:
        block: Frame | StoredBlock = finished.block
        return self._writes.block(block) if isinstance(block, StoredBlock) else block

    def _cancel(self, envelope: Sequence[Frame], request: Cancel, now: float) -> None:
        jobs: dict[str, Any] = {}
        for job_id in request.job_ids:
            if job_id in self._table:
                self._perform(self._table.cancel(job_id, now))
                jobs[job_id] = "cancelled"
            else:
                jobs.setdefault(job_id, "finished" if self._outbox.get(job_id) is not None else "unknown")
        self._writes.then(lambda: self._answer(envelope, Cancelled(request.request_id, jobs=jobs)))

    def _status(self, request: Status, now: float) -> ServiceStatus:
        return ServiceStatus(
            request.request_id,
            stages=self._table.stages.status(),
            queued=self._table.count(Place.QUEUED),
            running=self._table.count(Place.HELD),
            outcomes=dict(self._table.outcomes),
            uncollected=len(self._outbox),
            redelivered=self._table.redelivered,
            tasks=tuple(sorted(self._table.stages.tasks())),
            batches=self._batches.statuses(),
            uptime_s=now - self._started_at,
        )

    def _trace(self, request: Trace) -> JobTrace:
        return self._history.trace(request.request_id, self._history.find(request.job_id), time.time())

    def _answer(self, envelope: Sequence[Frame], reply: FrontDoorReply, blocks: Sequence[Frame] = ()) -> bool:
        return self._reply([*envelope, codec.encode(reply), *blocks])
