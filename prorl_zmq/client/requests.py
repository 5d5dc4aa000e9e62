"""Splits jobs into requests, and reads replies. No sockets, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..errors import JobTooLarge, MalformedMessage, UnknownJob, from_info, shortened
from ..wire import codec
from ..wire.messages.backends import AnyBackendReply
from ..wire.messages.base import JobIdentifier, Refused, new_id
from ..wire.messages.engines import AnyEngineReply
from ..wire.messages.front_door import FrontDoorReply, Submit
from ..wire.messages.jobs import Job

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import zmq

    from ..data.trajectory import TokenArrays, Trajectory
    from ..wire.messages.jobs import Result

JOBS_PER_REQUEST = 512
IDS_PER_REQUEST = 10_000
REQUEST_BYTES = 32 * 2**20
"""Approximate limit of the packed jobs in one request."""
POLL_S = 10.0
"""Longest time that the broker holds one `Collect`; a longer wait takes several."""
NAMELESS_S = 600.0
"""How long the jobs and results of an unnamed session are kept after its client is gone."""

REPLIES: Any = FrontDoorReply | AnyBackendReply | AnyEngineReply


class MappedBlock(NamedTuple):
    """A trajectory's block, mapped from the disk of a node on this machine; has a frame's attributes."""

    buffer: memoryview

    @property
    def bytes(self) -> bytes:
        return bytes(self.buffer)

    def __len__(self) -> int:
        return len(self.buffer)


if TYPE_CHECKING:
    Received = bytes | zmq.Frame | MappedBlock
    """A frame of a reply."""


def submissions(
    session: str, jobs: Iterable[Job], limit_bytes: int, lease_s: float | None = None
) -> Iterator[tuple[Submit, list[bytes], tuple[str, ...]]]:
    """Split jobs into requests: the header of each, its packed jobs, and their ids.

    Raises:
        TypeError: one is not a `Job`.
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
    """Pack a job or prompt; raise `JobTooLarge` or, for values other than plain data, `MalformedMessage`.

    Raises:
        TypeError: it is not a `Job`.
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
    """Raise `UnknownJob` if an id is malformed."""
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
    """Return the reply in a message's first frame, or raise the error with which it refuses the request."""
    header = frames[0]
    reply = codec.decode(header if isinstance(header, bytes) else header.bytes, REPLIES)
    if isinstance(reply, Refused):
        raise from_info(reply.error)
    return reply


def read_trajectory(result: Result, block: Received) -> Trajectory:
    from ..data.trajectory import Trajectory  # imports numpy, which commands without results do not need

    return Trajectory.from_frame(result, block if isinstance(block, bytes) else block.buffer)


def read_arrays(blocks: Sequence[Received], tokens: int, turns: int) -> TokenArrays:
    """Return the arrays of `tokens` tokens in the one block of a reply.

    Raises:
        MalformedMessage: the reply does not have exactly one block.
    """
    if len(blocks) != 1:
        raise MalformedMessage(f"a reply with {tokens} tokens has {len(blocks)} blocks")
    from ..data.trajectory import array_views

    (block,) = blocks
    return array_views(block if isinstance(block, bytes) else block.buffer, tokens, turns)
