"""`JobTracer`: assigns trace ids to jobs and sends histories of ended jobs to the process that makes spans.

The ids of a job's span are generated at acceptance and stored in the transition log, so they survive a restart. The ids
of its phases are computed from them (`phase_traceparent`) and sent to stage processes with the command. A niced process
(`span_process`) makes the spans: a job has seven or more, of 60 µs each. The tracer drops and counts the histories that
the process does not read in time, and all after it has died.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Self

import msgspec

from ...system import traces
from ...system.logs import log_settings
from ...system.processes import ISOLATED
from ...wire.messages.jobs import Phase

if TYPE_CHECKING:
    from ...wire.messages.jobs import Job
    from ...wire.messages.stages import StartPhase

BATCH = 8
"""Most histories per datagram; each has a few KiB at most."""
END_S = traces.CLOSE_S + 0.5
"""How many seconds the process may take to export its last spans."""
SPAN_ID, SPAN_ID_LIMIT = slice(36, 52), 2**64 - 1
"""Position of the span id in a `traceparent`, and the largest id."""
PLACES = {
    "held": {Phase.INIT: 0, Phase.RUN: 1, Phase.EVAL: 2, Phase.SCORE: 6},
    "queued": {Phase.INIT: 3, Phase.RUN: 4, Phase.EVAL: 5, Phase.SCORE: 7},
}
"""Offsets between the span ids of one attempt."""

log = logging.getLogger("prorl.rollout_broker")
_encode = msgspec.msgpack.Encoder().encode


class JobTracer:
    """Fed by the transition log; the caller must `close` it."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace import TracerProvider, sampling

        provider = TracerProvider(shutdown_on_exit=False)
        self._sampler: Any = provider.sampler
        self._samples_all = self._sampler is sampling.DEFAULT_ON
        """Whether the sampler samples everything by default, so jobs without a client's context need no call."""
        self._ids: Any = provider.id_generator
        self._traced: dict[str, str] = {}
        """The trace context of each sampled, unfinished job."""
        self._ended: list[tuple[str, bytes]] = []
        self._dropped = 0
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with theirs:
            command = (sys.executable, *ISOLATED, "-m", "prorl_zmq.brokers.rollout.span_process", *log_settings())
            self._process = subprocess.Popen(command, stdin=theirs.fileno())

    @classmethod
    def start(cls) -> Self | None:
        """Return a tracer if the environment enables traces."""
        return cls() if traces.is_possible() else None

    def accepted(self, job: Job) -> tuple[str, str] | None:
        """Return the `traceparent` of a new job's span and its parent's id; None if the job is not sampled."""
        context, trace_id, parent_span = None, 0, ""
        if job.traceparent:
            context = traces.read_traceparent(job.traceparent)
            above = _span_of(context)
            if above.is_valid:
                trace_id, parent_span = above.trace_id, f"{above.span_id:016x}"
        trace_id = trace_id or self._ids.generate_trace_id()
        if not self._is_sampled(context, trace_id):
            return None
        traceparent = traces.traceparent_of(trace_id, self._ids.generate_span_id(), sampled=True)
        self._traced[job.job_id] = traceparent
        return traceparent, parent_span

    def restored(self, job_id: str, traceparent: str) -> None:
        """Continue the trace of a job that an earlier broker accepted."""
        if _span_of(traces.read_traceparent(traceparent)).is_valid:  # a journal may be damaged
            self._traced[job_id] = traceparent

    def below(self, command: StartPhase) -> StartPhase:
        """Return a command with the trace context of its phase."""
        traceparent = self._traced.get(command.job_id)
        if traceparent is None:
            return command
        context = phase_traceparent(traceparent, command.attempt, command.phase)
        return msgspec.structs.replace(command, traceparent=context)

    def ended(self, job_id: str, packed: bytes) -> None:
        """Queue an ended job's history for span creation."""
        if self._traced.pop(job_id, None) is not None:
            self._ended.append((job_id, packed))
            if len(self._ended) == BATCH:
                self.flush()

    def flush(self) -> None:
        """Send queued histories to the process; drop them if the socket is full."""
        if not self._ended:
            return
        try:
            self._socket.send(_encode(self._ended))
        except OSError as error:
            if not self._dropped:
                log.warning("spans of jobs are dropped: the process that makes them takes no more now (%s)", error)
            self._dropped += len(self._ended)
        self._ended.clear()

    def close(self) -> None:
        self.flush()
        self._socket.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            log.warning("the process that makes spans has not exported its last ones in %g s, and is ended", END_S)
            self._process.kill()
            self._process.wait()
        if self._dropped:
            log.warning("the spans of %d jobs were dropped", self._dropped)

    def _is_sampled(self, context: Any, trace_id: int) -> bool:
        if self._samples_all and context is None:
            return True
        return bool(self._sampler.should_sample(context, trace_id, "job").decision.is_sampled())


def _span_of(context: Any) -> Any:
    from opentelemetry import trace

    return trace.get_current_span(context).get_span_context()


def phase_traceparent(traceparent: str, attempt: int, phase: Phase, place: str = "held") -> str:
    """Return the trace context of a job's time in a phase's queue, or in the phase."""
    number = (int(traceparent[SPAN_ID], 16) + (attempt << 3) + PLACES[place][phase]) & SPAN_ID_LIMIT
    return f"{traceparent[:36]}{number or 1:016x}{traceparent[52:]}"
