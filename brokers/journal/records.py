"""What a journal keeps of jobs: those that have not ended, and the results that no client has acknowledged."""

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
    """Name who holds a job and its result: a session, or the batches of one. Neither counts or fetches the other's."""
    return f"{session}/batches" if in_batch else session


class JobState(NamedTuple):
    """One job that has not ended: all that another job table needs to continue with it."""

    sequence: int
    """Numbers the jobs of a journal in the order in which they were accepted; never used twice."""
    session: str
    job_id: str
    task: str
    stage_wait_s: float
    packed: bytes
    """The job as submitted."""
    phase: Phase = Phase.INIT
    stage_id: str = ""
    """Who holds the phase; empty: it is queued."""
    attempt: int = 1
    attempts_given_back: int = 0
    sandbox: SandboxHandle | None = None
    phase_data: dict[str, Any] = {}  # noqa: RUF012 - never written to
    run: PhaseDone | PhaseFailed | None = None
    """RUN's event, once it has come."""
    block: Any = None
    """RUN's trajectory: a frame, or a `StoredBlock`."""
    metrics: dict[str, float] = {}  # noqa: RUF012 - never written to
    timings: dict[str, float] = {}  # noqa: RUF012 - never written to
    history: bytes = b""
    """Its transitions, packed (see `brokers.rollout.transitions`)."""
    in_batch: bool = False
    """It belongs to a batch of the session."""

    @property
    def holder(self) -> str:
        return holder_of(self.session, in_batch=True) if self.in_batch else self.session


class Finished(NamedTuple):
    session: str
    result: Result
    block: Any
    """The trajectory's block as received (bytes or a frame), or a `StoredBlock`; None if it has no tokens."""
    job_digest: bytes = b""
    """Tells whether a job that is submitted again is this one."""
    sequence: int = 0
    """The job's number in the journal."""
    history: bytes = b""
    """Its transitions, packed (see `brokers.rollout.transitions`)."""
    in_batch: bool = False
    packed: bytes = b""
    """The job as submitted, should it have to run again since its block is kept by a node."""

    @property
    def holder(self) -> str:
        return holder_of(self.session, in_batch=True) if self.in_batch else self.session


class Submission(NamedTuple):
    """A request that brought jobs: sent again it is answered, and runs nothing, even when they are long forgotten."""

    session: str
    request_id: str
    new: int
    """How many jobs it brought."""


class Recovered(NamedTuple):
    """What a journal has at a broker's start."""

    unfinished: Sequence[JobState]
    """The jobs that have not ended, oldest first."""
    uncollected: Sequence[Finished]
    """The results that were not acknowledged, those of the oldest jobs first."""
    last_sequence: int
    """The largest number of a job here."""
    notes: Mapping[str, bytes] = {}
    """The notes of the batches (see `batch_notes`)."""
    submissions: Sequence[Submission] = ()
    """The last ones, oldest first."""


TRACEPARENT = b"traceparent"

SUBMISSIONS = 4096
"""How many are remembered. A client sends one again within its `timeout_s`."""


class StoredBlock(NamedTuple):
    """A trajectory's block that is in the journal and not in memory."""

    sequence: int
    size_bytes: int

    def __len__(self) -> int:
        return self.size_bytes


def job_digest(packed: bytes) -> bytes:
    """Return what stands for a packed job once its bytes are gone, 16 bytes: the same, whichever trace it is in."""
    if TRACEPARENT in packed:
        with suppress(MalformedMessage, AttributeError):  # of a damaged journal
            fields = codec.unpack(packed, len(packed)).items()
            packed = codec.pack({name: value for name, value in fields if name != "traceparent"})
    return blake2b(packed, digest_size=16).digest()
