"""`FrontDoor`: checks and answers the requests of trainers and operators, and holds long polls. It owns no socket.

A client that lost a reply resends its request and gets the same answer: jobs have their own ids, and results stay until
they are acknowledged. A newer `Collect` of a client replaces its held one, and the results of a lost reply are
delivered again.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ...errors import (
    Busy,
    DuplicateJob,
    InternalError,
    JournalFailed,
    MalformedMessage,
    ProrlError,
    UnknownJob,
)
from ...security.rights import ANYBODY
from ...wire import codec
from ...wire.connection_guard import crowding
from ...wire.messages.base import MAX_FRAMES, PROTOCOL_VERSION, Done, Refused
from ...wire.messages.front_door import (
    Accepted,
    Cancel,
    Cancelled,
    Collect,
    Collected,
    EndSession,
    FrontDoorRequest,
    Hello,
    ListSessions,
    RelayBlocks,
    ServiceStatus,
    Status,
    Submit,
    Trace,
    Welcome,
)
from ...wire.messages.nodes import ListNodes
from ...wire.messages.watching import PeekTurns, WatchingRequest
from ...wire.request_routing import FRONT_DOOR, convert_request
from ...wire.sockets import split_envelope
from ..job_frame import read_job
from ..journal.records import SUBMISSIONS, Submission, job_digest
from .batch_requests import BatchRequest, BatchRequestHandler
from .job_record import JobStatus
from .sessions import Sessions
from .turn_requests import TurnRequests
from .watch_requests import WatchRequestHandler, list_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ...config import RolloutBrokerSettings
    from ...security.rights import Sender
    from ...wire.messages.front_door import FrontDoorReply, JobTrace
    from ...wire.messages.jobs import Job
    from ...wire.messages.stages import StageCommand
    from ...wire.sockets import Frame
    from .batch_runner import BatchRunner
    from .jobs import Jobs
    from .task_catalog import TaskCatalog


log = logging.getLogger("prorl.rollout_broker")
TRACES_LIMIT = 16_384
"""Most requests held until rollouts have addresses."""


@dataclass(frozen=True, slots=True)
class _HeldPoll:
    envelope: Sequence[Frame]
    request: Collect
    sender: Sender
    until: float


@dataclass(frozen=True, slots=True)
class _HeldTrace:
    envelope: Sequence[Frame]
    request: Trace
    job_id: str
    sender: Sender
    until: float


class FrontDoor:
    """Answers requests.

    `reply` sends frames to the client of an envelope and returns False if the client is gone; `look_again` returns a
    sender with its key's current state; `tell` sends a command to a stage process.
    """

    def __init__(
        self,
        settings: RolloutBrokerSettings,
        backend_broker: str,
        jobs: Jobs,
        catalog: TaskCatalog,
        batches: BatchRunner,
        reply: Callable[[Sequence[Frame]], bool],
        look_again: Callable[[Sender], Sender],
        tell: Callable[[str, StageCommand], None],
        *,
        started_at: float,
    ) -> None:
        self._settings = settings
        self._backend_broker = backend_broker
        self._jobs = jobs
        self._catalog = catalog
        self._reply = reply
        self._look_again = look_again
        self._submissions: OrderedDict[tuple[str, str], int] = OrderedDict()
        """Number of new jobs in each of the last submissions, by session and request id."""
        self._polls: dict[tuple[str, str], _HeldPoll] = {}
        """By session and client."""
        self._traces: dict[str, _HeldTrace] = {}
        """Requests that wait for a rollout's address, by request id."""
        self._batches = batches
        self._batch_requests = BatchRequestHandler(batches, jobs, self._answer, look_again)
        self.watching = WatchRequestHandler(jobs, batches)
        self.turns = TurnRequests(jobs, self._answer, tell)
        self.sessions = Sessions(jobs, batches)
        self._started_at = started_at

    def handle(self, frames: list[bytes], now: float, sender: Sender = ANYBODY) -> None:
        """Answer one request: `frames` as the ROUTER received them, from `sender`."""
        try:
            envelope, message = split_envelope(frames)
        except MalformedMessage:
            return  # without a delimiter, the sender's envelope is unknown
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
        except Exception as error:  # a bug must cost only this request
            log.exception("request %s failed", request_id)
            self._answer(envelope, Refused(request_id, InternalError(f"{type(error).__name__}: {error}").info()))

    def next_deadline(self) -> float | None:
        polls = (poll.until for poll in self._polls.values())
        traces = (held.until for held in self._traces.values())
        deadlines = (self._batch_requests.next_deadline(), self.turns.next_deadline(), *polls, *traces)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def answer_held(self, sessions: set[str], now: float) -> None:
        """Answer held requests that have news, have expired, or have a revoked key; `sessions` have new results."""
        self._batch_requests.answer_held(now)
        self.turns.refuse_late(now)
        for request_id, held in tuple(self._traces.items()):
            if held.sender.user_id and self._look_again(held.sender).revoked:
                del self._traces[request_id]
                self._answer(held.envelope, Refused(request_id, held.sender.revocation().info()))
            elif held.until <= now or not self._jobs.transitions.waits_for_address(held.job_id):
                del self._traces[request_id]
                self._answer(held.envelope, self._traced(request_id, held.job_id))
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
        self.sessions.asks(request, now)
        if isinstance(request, ListSessions | EndSession):
            self._answer_operator(envelope, request, now)
            return
        if isinstance(request, BatchRequest):
            self._batch_requests.handle(envelope, request, rest, sender, now)
            return
        if rest and not isinstance(request, Submit):
            raise MalformedMessage(f"{len(rest)} unexpected frames behind the header")
        if isinstance(request, WatchingRequest):
            self._show(envelope, request, now)
            return
        match request:
            case Collect():
                dropped = self._jobs.acknowledge(request.session, request.acknowledge)
                if request.goodbye:
                    self._jobs.results.take_leave(request.client_id)
                self._collect(envelope, request, sender, now, final=request.wait_s == 0)
                del dropped  # freeing large blocks takes time: after the reply
            case Submit():
                self._answer(envelope, self._submit(request, rest, now))
            case RelayBlocks():
                self._relay(request)
                self._answer(envelope, Done(request.request_id))
            case Cancel():
                self._cancel(envelope, request, now)
            case Status():
                self._answer(envelope, self._status(request, now))
            case ListNodes():
                self._answer(envelope, list_nodes(request, self._jobs.table.stages, now))
            case Hello():
                self._answer(envelope, self._hello(request))
            case Trace():
                self._trace(envelope, request, sender, now)

    def _show(self, envelope: Sequence[Frame], request: WatchingRequest, now: float) -> None:
        if isinstance(request, PeekTurns):
            self.turns.handle(envelope, request, now)
        else:
            self._answer(envelope, *self.watching.answer(request, now))

    def _answer_operator(self, envelope: Sequence[Frame], request: ListSessions | EndSession, now: float) -> None:
        reply = self.sessions.answer(request, now)
        if isinstance(request, EndSession):
            self._refuse_held(request.session)
        self._jobs.writes.then(lambda: self._answer(envelope, reply))

    def _refuse_held(self, session: str) -> None:
        """Refuse the held polls of a session that was ended."""
        keys = [key for key in self._polls if key[0] == session]
        held = [(poll.envelope, poll.request.request_id) for poll in map(self._polls.pop, keys)]
        held += self._batch_requests.take_held(session)
        if held and (error := self.sessions.take_ended(session)) is not None:
            for envelope, request_id in held:
                self._answer(envelope, Refused(request_id, error.info()))

    def _hello(self, request: Hello) -> Welcome:
        if crowded := crowding():
            raise Busy(crowded, retry_after_s=5.0)
        return Welcome(
            request.request_id,
            protocol=PROTOCOL_VERSION,
            version=version("prorl-zmq"),
            backend_broker=self._backend_broker,
            job_limit_bytes=self._settings.job_limit_bytes,
        )

    def _submit(self, request: Submit, frames: list[bytes], now: float) -> Accepted:
        before = self._submissions.get((request.session, request.request_id))
        if before is not None:  # the reply was lost; the jobs may be acknowledged
            return Accepted(request.request_id, new=before, journal_id=self._jobs.writes.journal_id)
        new: dict[str, tuple[Job, bytes]] = {}
        for frame in frames:
            job = read_job(frame, self._settings.job_limit_bytes)
            known = job_digest(new[job.job_id][1]) if job.job_id in new else self._known(request.session, job.job_id)
            if known is None:
                self._catalog.check(job)
                new[job.job_id] = (job, frame)
            elif known != job_digest(frame):
                raise DuplicateJob(f"another job is called {job.job_id}; ids must be unique", job_id=job.job_id)
        jobs = [(request.session, job, packed) for job, packed in new.values()]
        self._jobs.quota.check(request.session, len(jobs), sum(len(packed) for _, _, packed in jobs))
        if jobs:
            self.sessions.submits(request.session, request.lease_s, now)
            submission = Submission(request.session, request.request_id, len(jobs))
            self._jobs.submit(jobs, now, submission)
            self.remember([submission])
        return Accepted(request.request_id, new=len(jobs), journal_id=self._jobs.writes.journal_id)

    def remember(self, submissions: Iterable[Submission]) -> None:
        """Record submissions that are answered without effect when resent."""
        for one in submissions:
            self._submissions[one.session, one.request_id] = one.new
        while len(self._submissions) > SUBMISSIONS:
            self._submissions.popitem(last=False)

    def _known(self, session: str, job_id: str) -> bytes | None:
        """Return the digest of a known job, empty if it is another session's, or None if unknown."""
        table = self._jobs.table
        if job_id in table:
            record = table.record(job_id)
            return job_digest(record.packed) if record.holder == session else b""
        ended = self._jobs.results.get(job_id)
        if ended is None:
            return None
        return ended.job_digest if ended.holder == session else b""

    def _collect(self, envelope: Sequence[Frame], request: Collect, sender: Sender, now: float, *, final: bool) -> None:
        """Answer a poll if there is a result or if `final`; hold it otherwise."""
        key = (request.session, request.client_id)
        results = self._jobs.results
        if request.job_ids:
            finished = results.named(request.session, request.job_ids, request.max_results)
        else:
            finished = results.take(request.session, request.client_id, request.max_results, now)
        if not finished and not final:
            if key not in self._polls or self._polls[key].request is not request:
                self._polls[key] = _HeldPoll(envelope, request, sender, now + request.wait_s)
            return
        self._polls.pop(key, None)
        held = self._jobs.table.unfinished(request.session) + self._jobs.results.waiting(request.session)
        try:
            given = [self._jobs.delivery(item) for item in finished]
        except JournalFailed:
            results.put_back([] if request.job_ids else finished)
            raise
        reply = Collected(
            request.request_id,
            results=tuple(result for result, _ in given),
            remaining=held - len(finished),
            journal_id=self._jobs.writes.journal_id,
        )
        if not self._answer(envelope, reply, [block for _, blocks in given for block in blocks]):
            results.put_back([] if request.job_ids else finished)

    def _relay(self, request: RelayBlocks) -> None:
        """Hold back results whose blocks cannot be fetched until the broker has the blocks."""
        results, wanted = self._jobs.results, []
        for job_id in request.job_ids:
            finished = results.get(job_id)
            if finished is not None and finished.session == request.session and finished.result.kept is not None:
                results.hold_back(finished)
                wanted.append(job_id)
        self._jobs.blocks.relay(wanted)

    def _cancel(self, envelope: Sequence[Frame], request: Cancel, now: float) -> None:
        jobs: dict[str, Any] = {}
        for job_id in request.job_ids:
            if request.session and self._holder(job_id) != request.session:
                jobs[job_id] = "unknown"
            elif self._jobs.cancel(job_id, now):
                jobs[job_id] = "cancelled"
            else:
                known = self._jobs.results.get(job_id) is not None or self._jobs.transitions.packed(job_id)
                jobs.setdefault(job_id, "finished" if known else "unknown")
        self._jobs.writes.then(lambda: self._answer(envelope, Cancelled(request.request_id, jobs=jobs)))

    def _status(self, request: Status, now: float) -> ServiceStatus:
        return ServiceStatus(
            request.request_id,
            stages=self._jobs.table.stages.status(),
            queued=self._jobs.table.count(JobStatus.QUEUED),
            running=self._jobs.table.count(JobStatus.HELD),
            outcomes=dict(self._jobs.transitions.outcomes),
            uncollected=len(self._jobs.results),
            redelivered=self._jobs.table.redelivered,
            lost_blocks=self._jobs.blocks.lost,
            tasks=tuple(sorted(self._jobs.table.stages.tasks())),
            batches=self._batches.statuses(),
            uptime_s=now - self._started_at,
        )

    def _holder(self, job_id: str) -> str:
        """Return the holder of a job that was not collected yet; empty if unknown."""
        if job_id in self._jobs.table:
            return self._jobs.table.record(job_id).holder
        ended = self._jobs.results.get(job_id)
        return ended.holder if ended is not None else ""

    def _trace(self, envelope: Sequence[Frame], request: Trace, sender: Sender, now: float) -> None:
        """Answer at once, or hold the request until the rollout has an address."""
        if request.session and self._holder(request.job_id) != request.session:
            raise UnknownJob(
                f"session {request.session} has no job {request.job_id}, or its result was acknowledged",
                job_id=request.job_id,
                matches=0,
            )
        job_id = self._jobs.transitions.find(request.job_id, whole=request.wait_s > 0)
        if request.wait_s and self._jobs.transitions.waits_for_address(job_id):
            if len(self._traces) >= TRACES_LIMIT:
                raise Busy(f"{TRACES_LIMIT} clients wait for the addresses of rollouts", retry_after_s=5.0)
            until = now + request.wait_s
            self._traces[request.request_id] = _HeldTrace(envelope, request, job_id, sender, until)
        else:
            self._answer(envelope, self._traced(request.request_id, job_id))

    def _traced(self, request_id: str, job_id: str) -> JobTrace:
        trace = self._jobs.transitions.trace(request_id, job_id, time.time())
        if trace.outcome is not None:
            return trace
        task, group_id = self._jobs.names(job_id)
        return replace(trace, task=task, group_id=group_id)

    def _answer(self, envelope: Sequence[Frame], reply: FrontDoorReply, blocks: Sequence[Frame] = ()) -> bool:
        return self._reply([*envelope, codec.encode(reply), *blocks])
