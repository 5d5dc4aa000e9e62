"""The records of a journal: unfinished jobs, and results that no client has acknowledged."""

from __future__ import annotations

from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import MalformedMessage
from ...wire import codec
from ...wire.messages.jobs import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...wire.messages.jobs import Result, SandboxHandle
    from ...wire.messages.stages import PhaseDone, PhaseFailed


def holder_of(session: str, *, in_batch: bool) -> str:
    """Return the holder of a job and its result: a session, or that session's batches, which are counted separately."""
    return f"{session}/batches" if in_batch else session


class JobState(NamedTuple):
    """An unfinished job, with everything that another job table needs to continue it."""

    sequence: int
    """The job's number in the journal, in order of acceptance; never reused."""
    session: str
    job_id: str
    task: str
    stage_wait_s: float
    packed: bytes
    """The job as submitted."""
    phase: Phase = Phase.INIT
    stage_id: str = ""
    """The stage process that holds the phase; empty if the phase is queued."""
    attempt: int = 1
    attempts_given_back: int = 0
    sandbox: SandboxHandle | None = None
    phase_data: dict[str, Any] = {}  # noqa: RUF012 - never written to
    run: PhaseDone | PhaseFailed | None = None
    """RUN's event, after RUN has ended."""
    block: Any = None
    """The trajectory, with its scores after SCORE: a frame or a `StoredBlock`."""
    metrics: dict[str, float] = {}  # noqa: RUF012 - never written to
    timings: dict[str, float] = {}  # noqa: RUF012 - never written to
    history: bytes = b""
    """Packed transitions (see `brokers.rollout.transitions`)."""
    in_batch: bool = False
    """Whether the job belongs to a batch of the session."""
    last: PhaseDone | PhaseFailed | None = None
    """In SCORE: the event with which the job ends."""

    @property
    def holder(self) -> str:
        return holder_of(self.session, in_batch=True) if self.in_batch else self.session


class Finished(NamedTuple):
    session: str
    result: Result
    block: Any
    """The trajectory's block as received (bytes or a frame), or a `StoredBlock`; None if there are no tokens."""
    job_digest: bytes = b""
    """Identifies the job when it is submitted again (see `job_digest`)."""
    sequence: int = 0
    """The job's number in the journal."""
    history: bytes = b""
    """Packed transitions (see `brokers.rollout.transitions`)."""
    in_batch: bool = False
    packed: bytes = b""
    """The job as submitted, in case it must run again because a node stores its block."""

    @property
    def holder(self) -> str:
        return holder_of(self.session, in_batch=True) if self.in_batch else self.session


class Submission(NamedTuple):
    """A request that submitted jobs; if resent, the broker answers it and runs nothing."""

    session: str
    request_id: str
    new: int
    """How many jobs were new."""


class Recovered(NamedTuple):
    """The content of a journal at a broker's start."""

    unfinished: Sequence[JobState]
    """Unfinished jobs, oldest first."""
    uncollected: Sequence[Finished]
    """Unacknowledged results, ordered by the age of their jobs, oldest first."""
    last_sequence: int
    """The largest job number."""
    notes: Mapping[str, bytes] = {}
    """Notes of batches and of session leases."""
    submissions: Sequence[Submission] = ()
    """The last submissions, oldest first."""


TRACEPARENT = b"traceparent"

SUBMISSIONS = 4096
"""How many submissions are stored. A client resends one within its `timeout_s`."""


class StoredBlock(NamedTuple):
    """Reference to a trajectory's block that is in the journal and not in memory."""

    sequence: int
    size_bytes: int

    def __len__(self) -> int:
        return self.size_bytes


def job_digest(packed: bytes) -> bytes:
    """Return a 16-byte digest of a packed job, independent of its `traceparent`."""
    if TRACEPARENT in packed:
        with suppress(MalformedMessage, AttributeError):  # packed bytes of a damaged journal
            fields = codec.unpack(packed, len(packed)).items()
            packed = codec.pack({name: value for name, value in fields if name != "traceparent"})
    return blake2b(packed, digest_size=16).digest()
