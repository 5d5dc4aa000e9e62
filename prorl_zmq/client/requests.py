"""Cuts jobs into requests, reads replies, and remembers what must be acknowledged; no sockets, no clock.

`CollectState` makes delivery exactly-once for a live client: it drops results that it has seen, and acknowledges a
result only with the next request, after the caller has had it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import JobsLost, JobTooLarge, MalformedMessage, UnknownJob, from_info, shortened
from ..wire import codec
from ..wire.messages.backends import AnyBackendReply
from ..wire.messages.base import JobIdentifier, Refused, new_id
from ..wire.messages.engines import AnyEngineReply
from ..wire.messages.front_door import Collect, Collected, FrontDoorReply, Submit
from ..wire.messages.jobs import Job

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import zmq

    from ..data.trajectory import TokenArrays, Trajectory
    from ..wire.messages.jobs import Result
    from .mapped_block import MappedBlock

    Received = bytes | zmq.Frame | MappedBlock
    """A frame of a reply."""

JOBS_PER_REQUEST = 512
IDS_PER_REQUEST = 10_000
REQUEST_BYTES = 32 * 2**20
"""Packed jobs in one request, about."""
SEEN_LIMIT = 20_000
"""Ids of received results that a client remembers: many more than can be unacknowledged."""
POLL_S = 10.0
"""Longest that one `Collect` is held by the broker; a longer wait is several of them."""
NAMELESS_S = 600.0
"""How long the jobs and results of a session without a name stay when its client is gone."""

REPLIES: Any = FrontDoorReply | AnyBackendReply | AnyEngineReply


def submissions(
    session: str, jobs: Iterable[Job], limit_bytes: int, lease_s: float | None = None
) -> Iterator[tuple[Submit, list[bytes], tuple[str, ...]]]:
    """Cut jobs into requests: the header of each, its packed jobs, and their ids.

    Raises:
        TypeError: one is no `Job`.
    """
    packed_jobs: list[bytes] = []
    ids: list[str] = []
    size = 0
    for job in jobs:
        packed = pack_job(job, limit_bytes)
        if packed_jobs and (len(packed_jobs) == JOBS_PER_REQUEST or size + len(packed) > REQUEST_BYTES):
            yield Submit(new_id(), session, lease_s), packed_jobs, tuple(ids)
            packed_jobs, ids, size = [], [], 0
        packed_jobs.append(packed)
        ids.append(job.job_id)
        size += len(packed)
    if packed_jobs:
        yield Submit(new_id(), session, lease_s), packed_jobs, tuple(ids)


def pack_job(job: Job, limit_bytes: int, what: str = "job") -> bytes:
    """Pack a job or prompt; raise `JobTooLarge` or, for an instance that is not plain data, `MalformedMessage`.

    Raises:
        TypeError: it is no `Job`.
    """
    if not isinstance(job, Job):
        given = shortened(repr(job))
        raise TypeError(
            f"a {what} must be a prorl_zmq.Job, such as Job(task='math', instance={{…}}), and not a "
            f"{type(job).__name__}: {given}; of a dict it is made by msgspec.convert(given, Job)"
        )
    packed = codec.encode(job)
    if len(packed) > limit_bytes:
        raise JobTooLarge(
            f"{what} {job.job_id} has {len(packed)} bytes, the limit is {limit_bytes}; let INIT fetch large files",
            job_id=job.job_id,
            size_bytes=len(packed),
            limit_bytes=limit_bytes,
        )
    return packed


def check_job_ids(job_ids: Iterable[str]) -> None:
    """Raise `UnknownJob` unless each of these could be a job's id."""
    for job_id in job_ids:
        try:
            msgspec.convert(job_id, JobIdentifier)
        except msgspec.ValidationError:
            raise UnknownJob(
                f"no job is called {shortened(job_id)!r}: a job id is 1 to 64 letters, digits and `._-`, and begins "
                "with a letter, a digit or `_`",
                job_id=job_id,
                matches=0,
            ) from None


def read_reply(frames: Sequence[Received]) -> Any:
    """Return the reply in a message's first frame, or raise the error that it refuses the request with."""
    header = frames[0]
    reply = codec.decode(header if isinstance(header, bytes) else header.bytes, REPLIES)
    if isinstance(reply, Refused):
        raise from_info(reply.error)
    return reply


class CollectState:
    """What one client has received, handed to its caller, and acknowledged."""

    def __init__(self, session: str, client_id: str) -> None:
        self.session = session
        self._client_id = client_id
        self._received: deque[Trajectory] = deque()
        self._handed_over: list[str] = []
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._expected: dict[str, str] = {}
        self._lost: list[str] = []
        self._aside: dict[str, Trajectory | None] = {}
        """Those that have a receiver of their own, by job, once they are here."""
        self._journal_id = ""
        self.remaining = 0
        """Jobs of the session whose results this client did not have at the last reply."""

    @property
    def waiting(self) -> int:
        """Trajectories received and not handed over; no request is made while there are any."""
        return len(self._received)

    def begin(self, job_ids: Iterable[str]) -> list[str]:
        """Forget results of jobs that are about to be submitted: the id of an ended job may be reused. Return those."""
        return [job_id for job_id in job_ids if self._seen.pop(job_id, "") is None]

    def refused(self, begun: Iterable[str]) -> None:
        """Take `begin` back."""
        self._seen.update(dict.fromkeys(begun))

    def expect(self, job_ids: Iterable[str], journal_id: str) -> None:
        """Note jobs that were accepted, and the journal that has them; some may be here, if the reply was lost."""
        for job_id in job_ids:
            if job_id not in self._seen:
                self._expected[job_id] = journal_id
        self._journal_id = ""  # so that the next reply is compared with all of `_expected`

    def set_aside(self, job_id: str) -> None:
        """Keep this job's trajectory for who asks for it by name."""
        self._aside[job_id] = None

    def aside(self, job_id: str) -> Trajectory | None:
        """Return what was kept, if it is here."""
        return self._aside.get(job_id)

    def forget_aside(self, job_id: str) -> None:
        """Its receiver has it, or wants it no more."""
        self._aside.pop(job_id, None)
        self._expected.pop(job_id, None)
        self._lost = [each for each in self._lost if each != job_id]
        self._seen[job_id] = None  # what was on its way is acknowledged

    def is_lost(self, job_id: str) -> bool:
        """Return whether the journal is gone that had this job."""
        return job_id in self._lost

    def check_lost(self) -> None:
        """Raise `JobsLost` once for jobs whose journal is gone, after all results have been handed over."""
        if self._lost and not self._received:
            lost, self._lost = self._lost, []
            raise JobsLost(
                f"{len(lost)} accepted jobs are gone: the rollout broker was restarted without the journal that had "
                "them (cleared, or in memory); submit them again if they are still wanted",
                count=len(lost),
                job_ids=" ".join(lost),
            )

    def take(self, most: int) -> list[Trajectory]:
        taken = [self._received.popleft() for _ in range(min(most, len(self._received)))]
        self._handed_over += [trajectory.job_id for trajectory in taken]
        return taken

    def request(self, max_results: int, wait_s: float, *, goodbye: bool = False) -> Collect:
        """Return the next request; it acknowledges all that was handed over."""
        return Collect(
            new_id(),
            self.session,
            self._client_id,
            tuple(self._handed_over),
            max_results=max_results,
            wait_s=wait_s,
            goodbye=goodbye,
        )

    def receive(self, request: Collect, frames: Sequence[Received]) -> None:
        reply = read_reply(frames)
        if not isinstance(reply, Collected):
            raise MalformedMessage(f"the service answered a collect with {type(reply).__name__}")
        blocks = iter(frames[1:])
        new = [read_trajectory(result, blocks) for result in reply.results]
        acknowledged = set(request.acknowledge)
        self._handed_over = [job_id for job_id in self._handed_over if job_id not in acknowledged]
        self.remaining = reply.remaining
        if reply.journal_id != self._journal_id:
            self._journal_id = reply.journal_id
            self._lost += [job_id for job_id, journal_id in self._expected.items() if journal_id != reply.journal_id]
            self._expected = {key: value for key, value in self._expected.items() if value == reply.journal_id}
        for trajectory in new:
            self._expected.pop(trajectory.job_id, None)
            if trajectory.job_id in self._aside:
                self._aside[trajectory.job_id] = trajectory
            elif trajectory.job_id in self._seen:
                self._handed_over.append(trajectory.job_id)  # a second delivery: its acknowledgement was lost
            else:
                self._seen[trajectory.job_id] = None
                self._received.append(trajectory)
        while len(self._seen) > SEEN_LIMIT:
            self._seen.popitem(last=False)


def read_trajectory(result: Result, blocks: Iterator[Received]) -> Trajectory:
    """Make a trajectory of a result and, if it has tokens, the next block."""
    block = next(blocks, None) if result.tokens else b""
    if block is None:
        raise MalformedMessage(f"the trajectory of job {result.job_id} is missing from the reply")
    from ..data.trajectory import Trajectory  # with numpy, which commands without results can do without

    return Trajectory.from_frame(result, block if isinstance(block, bytes) else block.buffer)


def read_arrays(blocks: Sequence[Received], tokens: int, turns: int) -> TokenArrays:
    """Return the arrays of so many tokens in the one block of a reply.

    Raises:
        MalformedMessage: there is no such block.
    """
    if len(blocks) != 1:
        raise MalformedMessage(f"a reply with {tokens} tokens has {len(blocks)} blocks")
    from ..data.trajectory import array_views

    (block,) = blocks
    return array_views(block if isinstance(block, bytes) else block.buffer, tokens, turns)
