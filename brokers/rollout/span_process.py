"""The process that makes spans from the histories of ended jobs, for a rollout broker's `JobTracer`.

    stdin, a socket   ← rollout broker: ids and packed histories of ended jobs, some in each datagram

When the broker closes the socket or dies, the process exports its spans (within `traces.CLOSE_S`) and exits. It does
not read while the SDK's queue is half full, so the broker drops whole jobs rather than single spans. If the process
dies, unexported spans are lost; jobs are not affected.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ...system.logs import start_logging
from ...system.traces import SpanExport, read_traceparent, set_error
from .job_story import job_trace
from .job_tracer import SPAN_ID, phase_traceparent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...system.traces import Attributes, SpanKind
    from ...wire.messages.front_door import JobTrace, Span

DATAGRAM_BYTES = 2**18
"""Larger than `job_tracer.BATCH` histories."""
NICENESS = 15
"""Other processes have priority."""

log = logging.getLogger("prorl.traces")


class SpanRecord(NamedTuple):
    name: str
    span_id: int
    parent: str
    """A `traceparent`; empty for the first span of a trace."""
    start_s: float
    end_s: float
    """Seconds since 1970."""
    attributes: Attributes
    error: str
    """The error's code; empty if there was none."""
    kind: SpanKind = "internal"


def spans_of(trace: JobTrace) -> Iterator[SpanRecord]:
    """Yield the spans of an ended job, its own first."""
    yield _job_span(trace)
    for span in trace.spans:
        name = f"{span.phase} queue" if span.place == "queued" else str(span.phase)
        context = phase_traceparent(trace.traceparent, span.attempt, span.phase, span.place)
        start_s, end_s = (trace.accepted_at + at for at in (span.start_s, span.end_s or span.start_s))
        error = span.error.code if span.error is not None else ""
        attributes = _attributes(span, trace.job_id)
        yield SpanRecord(name, span_id(context), trace.traceparent, start_s, end_s, attributes, error)


def span_id(traceparent: str) -> int:
    return int(traceparent[SPAN_ID], 16)


def _job_span(trace: JobTrace) -> SpanRecord:
    attributes: dict[str, Any] = {
        "messaging.system": "prorl_zmq",
        "messaging.operation.type": "process",
        "messaging.message.id": trace.job_id,
        "gen_ai.conversation.id": trace.job_id,
        "prorl.job.id": trace.job_id,
        "prorl.task": trace.task,
        "prorl.outcome": str(trace.outcome),
        "prorl.attempts": trace.spans[-1].attempt if trace.spans else 0,
        "prorl.messages": trace.turns,
        "prorl.tokens": trace.tokens,
        "prorl.broker_restarts": len(trace.restarts),
    }
    known = {"prorl.group.id": trace.group_id, "prorl.stop_reason": trace.stop_reason}
    attributes |= {name: value for name, value in known.items() if value}
    if trace.reward is not None:
        attributes["prorl.reward"] = trace.reward
    parent = ""
    if trace.parent_span:
        version, trace_id, _, flags = trace.traceparent.split("-")
        parent = f"{version}-{trace_id}-{trace.parent_span}-{flags}"
    end_s = trace.accepted_at + (trace.ended_s or 0.0)
    error = trace.error.code if trace.error is not None else ""
    own = span_id(trace.traceparent)
    return SpanRecord(f"job {trace.task}", own, parent, trace.accepted_at, end_s, attributes, error, "consumer")


def _attributes(span: Span, job_id: str) -> dict[str, Any]:
    attributes = {"prorl.job.id": job_id, "prorl.phase": str(span.phase), "prorl.attempt": span.attempt}
    known = {"prorl.stage.id": span.stage_id, "prorl.node": span.node, "prorl.backend": ", ".join(span.backends)}
    return attributes | {name: value for name, value in known.items() if value}


class _GivenIds:
    """An id generator that returns the spans' existing ids."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id

    def is_trace_id_random(self) -> bool:
        return False


class SpanMaker:
    """Makes spans of histories and exports them."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        self._ids = _GivenIds()
        instance = f"{socket.gethostname()}:{os.getppid()}"
        self.export = SpanExport("rollout-broker", instance, sampler=ALWAYS_ON, id_generator=self._ids)

    def make(self, job_id: str, packed: bytes) -> None:
        """Make the spans of a job."""
        trace = job_trace("", job_id, packed, 0.0)
        self._ids.trace_id = int(trace.traceparent.split("-")[1], 16)
        for one in spans_of(trace):
            self._ids.span_id = one.span_id
            context = read_traceparent(one.parent)
            span = self.export.begin(one.name, one.attributes, one.kind, context, int(one.start_s * 1e9))
            if one.error:
                set_error(span, one.error)
            span.end(int(one.end_s * 1e9))


def main() -> None:
    """Make spans until the broker closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICENESS)
    start_logging(*sys.argv[1:])  # type: ignore[arg-type]
    maker = SpanMaker()
    with socket.socket(fileno=0) as inbox:
        while datagram := inbox.recv(DATAGRAM_BYTES):
            for job_id, packed in msgspec.msgpack.decode(datagram, type=list[tuple[str, bytes]]):
                maker.export.wait_for_room()
                try:
                    maker.make(job_id, packed)
                except Exception:  # an error in one job must not lose the others' spans
                    log.exception("no spans can be made of the history of job %s", job_id)
    maker.export.close()


if __name__ == "__main__":
    main()
