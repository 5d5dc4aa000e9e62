"""The rollout broker's part in traces: each job gets its place in one, and what ended jobs went through becomes spans.

The ids of a job's span are drawn when it is accepted and noted in its history, so they survive a restart. Those of its
phases follow from them (`phase_traceparent`), and go to stage processes with the command. Spans are made by a process
of ours (`span_process`), niced: to make and encode one takes 60 µs, a job has seven or more, and a whole job takes
this broker 200 µs. It is handed histories over a socket; what it does not read in time is dropped and counted. When the
broker dies, the process reads what is there and ends. When the process dies, the broker goes on without.
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
    from .job_history import JobHistory

BATCH = 8
"""Most histories of one datagram, which the kernel takes whole: each has some KiB at the most."""
END_S = traces.CLOSE_S + 0.5
"""How long the process may take to export what it has."""
SPAN_ID, SPAN_ID_LIMIT = slice(36, 52), 2**64 - 1
"""Where the span's id is in a `traceparent`, and the largest one."""
PLACES = {"held": {Phase.INIT: 0, Phase.RUN: 1, Phase.EVAL: 2}, "queued": {Phase.INIT: 3, Phase.RUN: 4, Phase.EVAL: 5}}
"""What the ids of the spans of one attempt differ by."""

log = logging.getLogger("prorl.rollout_broker")
_encode = msgspec.msgpack.Encoder().encode


class JobTracer:
    """Notes the traces of new jobs in their histories; `close` it."""

    def __init__(self, history: JobHistory) -> None:
        from opentelemetry.sdk.trace import TracerProvider, sampling

        self._history = history
        provider = TracerProvider(shutdown_on_exit=False)
        self._sampler: Any = provider.sampler
        self._samples_all = self._sampler is sampling.DEFAULT_ON
        """All whose client does not say otherwise: then the sampler need not be asked."""
        self._ids: Any = provider.id_generator
        self._traced: dict[str, str] = {}
        """The trace context of each job that has not ended and is sampled."""
        self._ended: list[tuple[str, bytes]] = []
        self._dropped = 0
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with theirs:
            command = (sys.executable, *ISOLATED, "-m", "prorl_zmq.brokers.rollout.span_process", *log_settings())
            self._process = subprocess.Popen(command, stdin=theirs.fileno())

    @classmethod
    def start(cls, history: JobHistory) -> Self | None:
        """Return a tracer, if the environment asks for traces."""
        return cls(history) if traces.is_possible() else None

    def accepted(self, job: Job, at: float) -> None:
        """Note the trace of a job that was accepted, unless it is not sampled."""
        context, trace_id, parent_span = None, 0, ""
        if job.traceparent:
            context = traces.read_traceparent(job.traceparent)
            above = _span_of(context)
            if above.is_valid:
                trace_id, parent_span = above.trace_id, f"{above.span_id:016x}"
        trace_id = trace_id or self._ids.generate_trace_id()
        if self._is_sampled(context, trace_id):
            traceparent = traces.traceparent_of(trace_id, self._ids.generate_span_id(), sampled=True)
            self._history.traced(job.job_id, traceparent, parent_span, at)
            self._traced[job.job_id] = traceparent

    def restored(self, job_id: str) -> None:
        """Go on with the trace of a job that an earlier broker had accepted."""
        traceparent = self._history.traceparent(job_id)
        if _span_of(traces.read_traceparent(traceparent)).is_valid:  # a journal may be damaged
            self._traced[job_id] = traceparent

    def below(self, command: StartPhase) -> StartPhase:
        """Return a command with the trace context of its phase."""
        traceparent = self._traced.get(command.job_id)
        if traceparent is None:
            return command
        context = phase_traceparent(traceparent, command.attempt, command.phase)
        return msgspec.structs.replace(command, traceparent=context)

    def ended(self, job_id: str) -> None:
        """Have spans made of a job that has ended."""
        if self._traced.pop(job_id, None) is not None:
            self._ended.append((job_id, self._history.packed(job_id)))
            if len(self._ended) == BATCH:
                self.flush()

    def flush(self) -> None:
        """Hand over what is there, if the process has room for it."""
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
    """Return the trace context of a job's stay in a phase's queue, or in the phase itself."""
    number = (int(traceparent[SPAN_ID], 16) + (attempt << 3) + PLACES[place][phase]) & SPAN_ID_LIMIT
    return f"{traceparent[:36]}{number or 1:016x}{traceparent[52:]}"
