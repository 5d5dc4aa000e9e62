"""Decode and check a packed job as a client sent it."""

from __future__ import annotations

from ..errors import InvalidJob, JobTooLarge, MalformedMessage
from ..wire import codec
from ..wire.messages.jobs import Job


def read_job(frame: bytes, limit_bytes: int) -> Job:
    """Decode a job.

    Raises:
        JobTooLarge: the frame is larger than `limit_bytes`.
        InvalidJob: a field is missing, unknown, or of a wrong type.
        MalformedMessage: the frame is not MessagePack.
    """
    if len(frame) > limit_bytes:
        raise JobTooLarge(
            f"a job of {len(frame)} bytes is over the limit of {limit_bytes}; let INIT fetch large files",
            size_bytes=len(frame),
            limit_bytes=limit_bytes,
        )
    try:
        job: Job = codec.decode(frame, Job, limit_bytes)
    except MalformedMessage as error:
        content = codec.unpack(frame, limit_bytes)  # raises if the frame is not MessagePack
        job_id = content.get("job_id") if isinstance(content, dict) else None
        name = job_id if isinstance(job_id, str) else ""
        raise InvalidJob(f"job {name}: {error.message}", job_id=name, field=error.field) from error
    return job
