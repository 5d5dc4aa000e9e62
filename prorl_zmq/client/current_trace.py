"""The trace that a trainer is in: jobs that it submits or feeds go on with it.

Only what the trainer's own OpenTelemetry has: a span that is current when jobs are given to the client. Without
OpenTelemetry in the trainer's program, nothing of it is imported here.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..system.traces import SCOPE, current_traceparent
from ..wire.messages.jobs import Job

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager


def in_current_trace(jobs: Iterable[Job]) -> Iterable[Job]:
    """Return jobs whose spans will be below the one that is current now, unless they name another one."""
    return in_trace(jobs, current_traceparent())


def in_trace(jobs: Iterable[Job], traceparent: str) -> Iterable[Job]:
    """Return jobs whose spans will be below the one of a `traceparent`, unless that is empty or they name another."""
    if not traceparent:
        return jobs
    return (replace(job, traceparent=traceparent) if _is_free(job) else job for job in jobs)


def _is_free(job: Any) -> bool:
    return isinstance(job, Job) and not job.traceparent  # what is no job is refused where it is packed


def submit_span(count: int) -> AbstractContextManager[Any]:
    """Return a span of the trainer's own tracer around a request that submits so many jobs, if one is current."""
    if not current_traceparent():
        return nullcontext()
    from opentelemetry import trace

    attributes: dict[str, Any] = {
        "messaging.system": "prorl_zmq",
        "messaging.operation.type": "send",
        "messaging.batch.message_count": count,
    }
    tracer = trace.get_tracer(SCOPE)
    return tracer.start_as_current_span("submit", kind=trace.SpanKind.PRODUCER, attributes=attributes)
