"""The trainer's current OpenTelemetry trace, which the jobs that it submits or feeds continue.

The parent is the span that is current when jobs are passed to the client. OpenTelemetry is only used if the trainer's
program has imported it.
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
    """Return the jobs with the current span as their parent, unless they name another one."""
    return in_trace(jobs, current_traceparent())


def in_trace(jobs: Iterable[Job], traceparent: str) -> Iterable[Job]:
    """Return the jobs with `traceparent` as their parent, unless it is empty or they name another one."""
    if not traceparent:
        return jobs
    return (replace(job, traceparent=traceparent) if _is_free(job) else job for job in jobs)


def _is_free(job: Any) -> bool:
    return isinstance(job, Job) and not job.traceparent  # other types are rejected when packed


def submit_span(count: int) -> AbstractContextManager[Any]:
    """Return a span of the trainer's tracer around a request that submits `count` jobs, if a span is current."""
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
