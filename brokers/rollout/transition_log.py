"""`TransitionLog`: records every change of every job's state, and derives histories, counts and logs.

    history    what each job went through, packed (see `transitions`): for the journal, `prorl job`, spans
    changes    in which order jobs changed last, for watchers
    counts     how jobs ended: since the broker started, by 10 seconds of the last hour, and as metrics
    losses     what became of the jobs of lost nodes
    logging    one line per transition at DEBUG; at INFO one per job that did not complete

Its inputs are the job table's actions and the broker's wall clock. It stores the histories of unfinished jobs and of
the last ended ones. Adding a transition takes 1 to 3 µs.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from ...errors import UnknownJob
from ...metrics.catalog import JOBS_ENDED, QUEUE_SECONDS, RECORDS_DROPPED
from ...metrics.metric import Metric
from ...system.logs import of_job
from ...wire.messages.base import POLICY, new_id
from ...wire.messages.jobs import Outcome, Phase
from ...wire.messages.watching import ENDED_INTERVAL_S, EndedJobs
from .actions import End, Queued, Start
from .job_story import job_row, job_trace
from .node_losses import NodeLosses
from .sized_cache import SizedCache
from .transitions import (
    LIMIT_BYTES,
    OfModel,
    Recovered,
    ToBackend,
    ToClient,
    ToEnd,
    ToQueue,
    ToStage,
    Traced,
    pack,
    read,
    undamaged,
    without_middle,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ...errors import ErrorInfo
    from ...wire.messages.front_door import JobTrace
    from ...wire.messages.jobs import Job, Result
    from ...wire.messages.watching import JobRow
    from .job_tracer import JobTracer
    from .transitions import Transition

ENDED_LIMIT = 10_000
"""Most histories of ended jobs."""
ENDED_LIMIT_BYTES = 16 * 2**20
"""Approximate memory limit of those histories."""
ENTRY_BYTES = 300
"""Memory of an ended job's history in addition to its bytes."""
MESSAGE_LIMIT = 300
"""Most characters of an error's message in a history."""
NAME_LIMIT = 128
MATCHES = 4
"""Most ids in the answer to an ambiguous request."""
INTERVALS = 360
QUEUES = tuple((f"{phase}_queue", phase.value) for phase in Phase)
"""The timing of each phase's queue."""

log = logging.getLogger("prorl.rollout_broker")


class Changed(NamedTuple):
    job_ids: list[str]
    """Newest first."""
    first: int
    """The number of the last of them."""
    more: bool
    """Whether there are older ones."""


@dataclass(slots=True)
class _Job:
    """An unfinished job."""

    packed: bytes = b""
    backend: tuple[int, str] = (0, "")
    """The last assignment with its attempt; each report repeats it."""
    address: tuple[int, str] | None = None
    """Where outside programs reach its RUN, with the attempt; None while it may still get an address."""


class TransitionLog:
    def __init__(
        self,
        losses: NodeLosses | None = None,
        tracer: JobTracer | None = None,
        ended_limit: int = ENDED_LIMIT,
        ended_limit_bytes: int = ENDED_LIMIT_BYTES,
    ) -> None:
        self.tracer = tracer
        """Makes spans of ended jobs; None without traces."""
        self.outcomes: Counter[Outcome] = Counter()
        """Of the jobs that ended since the broker started."""
        self.broker_id = new_id()
        """Id of this run of the broker, in which changes are numbered."""
        self.until = 0
        """Number of the newest change."""
        self.forgotten_until = 0
        """Number of the newest change of a job whose history was evicted."""
        self._losses = losses or NodeLosses()
        self._ended_limit = ended_limit
        self._live: dict[str, _Job] = {}
        self._ended: SizedCache[bytes] = SizedCache(ended_limit_bytes, ended_limit)
        self._numbers: OrderedDict[str, int] = OrderedDict()
        """Number of each job's last change, newest last."""
        self._intervals: deque[tuple[float, Counter[Outcome]]] = deque(maxlen=INTERVALS)
        """Outcomes by the start of their interval."""

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

    # What happens -----------------------------------------------------------------------------------------------------

    def accepted(self, job: Job, at: float) -> None:
        """Record the trace and the model of a new job, before its other transitions."""
        if self.tracer is not None and (traced := self.tracer.accepted(job)) is not None:
            self._append(job.job_id, Traced(at, *traced))
        if job.model != POLICY:
            self._append(job.job_id, OfModel(at, job.model))

    def note(self, action: Queued | Start | End, at: float) -> None:
        """Record an action of the job table."""
        if log.isEnabledFor(logging.DEBUG):
            _say(action, logging.DEBUG)
        match action:
            case Queued(job_id, attempt, phase, error):
                job = self._append(job_id, ToQueue(at, attempt, phase, *_short(error)))
                job.address = (0, "") if phase in (Phase.EVAL, Phase.SCORE) else None
                if error is not None:
                    self._losses.restarted(job_id, error)
            case Start(stage_id, command, _, node):
                self._append(command.job_id, ToStage(at, command.attempt, command.phase, stage_id, node))
                if command.job_id in self._losses.of_jobs:
                    self._losses.started(command.job_id, node)
            case End(finished):
                if finished.result.outcome != Outcome.COMPLETED and not log.isEnabledFor(logging.DEBUG):
                    _say(action, logging.INFO)
                self._end(finished.result, at)

    def _end(self, result: Result, at: float) -> None:
        ended = ToEnd(
            at,
            result.task,
            result.group_id,
            result.outcome,
            result.reward,
            result.stop_reason[:NAME_LIMIT],
            result.tokens,
            result.turns,
            result.backend[:NAME_LIMIT],
            *_short(result.error),
        )
        packed = self._append(result.job_id, ended).packed
        del self._live[result.job_id]
        self._keep(result.job_id, packed)
        self._count(result, at)
        if result.error is not None or result.job_id in self._losses.of_jobs:
            self._losses.ended(result.job_id, result.outcome, result.error)
        if self.tracer is not None:
            self.tracer.ended(result.job_id, packed)

    def _count(self, result: Result, at: float) -> None:
        self.outcomes[result.outcome] += 1
        start = at - at % ENDED_INTERVAL_S
        while self._intervals and self._intervals[-1][0] > start:
            self._intervals.pop()  # the clock was set back
        if not self._intervals or self._intervals[-1][0] < start:
            self._intervals.append((start, Counter()))
        self._intervals[-1][1][result.outcome] += 1
        if Metric.counting:
            JOBS_ENDED.add(result.task, result.outcome, result.error.code if result.error is not None else "")
            for record in result.records_dropped:
                RECORDS_DROPPED.add(record)
            for name, phase in QUEUES:
                if (waited_s := result.timings.get(name)) is not None:
                    QUEUE_SECONDS.observe(waited_s, phase)

    def assigned(self, job_id: str, attempt: int, backend: str, at: float) -> None:
        """Record the backend of an attempt's RUN; repetitions change nothing."""
        job = self._live.get(job_id)
        if job is not None and job.backend != (attempt, backend):
            job.backend = attempt, backend
            self._append(job_id, ToBackend(at, attempt, backend[:NAME_LIMIT]))

    def opened(self, addresses: Mapping[str, tuple[int, str]]) -> None:
        """Record the addresses at which outside programs reach the RUNs of attempts."""
        for job_id, where in addresses.items():
            if (job := self._live.get(job_id)) is not None:
                job.address = where

    def collected(self, job_ids: Iterable[str], at: float) -> None:
        added = pack(ToClient(at))
        for job_id in job_ids:
            if (packed := self._ended.get(job_id)) is not None:
                self._ended.change(job_id, packed + added)

    def restore(self, job_id: str, packed: bytes, at: float) -> None:
        """Continue the history of an unfinished job from the journal."""
        self._live[job_id] = _Job(undamaged(packed, at))
        self._append(job_id, Recovered(at))
        if self.tracer is not None:
            self.tracer.restored(job_id, self.traceparent(job_id))

    def restore_ended(self, job_id: str, packed: bytes) -> None:
        """Store the history of an ended job, if the journal's is readable."""
        if packed := undamaged(packed, None):
            self._number(job_id)
            self._keep(job_id, packed)

    def _append(self, job_id: str, item: Transition) -> _Job:
        job = self._live.get(job_id)
        if job is None:
            self._ended.drop(job_id)  # an ended job's id may be reused
            job = self._live[job_id] = _Job()
        before = job.packed if len(job.packed) < LIMIT_BYTES else without_middle(job.packed)
        job.packed = before + pack(item)
        self._number(job_id)
        return job

    def _number(self, job_id: str) -> None:
        self.until += 1
        self._numbers[job_id] = self.until
        self._numbers.move_to_end(job_id)

    def _keep(self, job_id: str, packed: bytes) -> None:
        for gone, _ in self._ended.put(job_id, packed, len(packed) + ENTRY_BYTES):
            if gone not in self._ended:
                self.forgotten_until = max(self.forgotten_until, self._numbers.pop(gone, 0))

    # Questions --------------------------------------------------------------------------------------------------------

    def packed(self, job_id: str) -> bytes:
        """Return a job's history as the journal stores it; empty if the job is unknown."""
        job = self._live.get(job_id)
        return job.packed if job is not None else self._ended.get(job_id) or b""

    def find(self, beginning: str, *, whole: bool = False) -> str:
        """Return the id of the one job whose id is `beginning` or begins with it; with `whole`, it must be the id.

        Raises:
            UnknownJob: no job or several jobs match.
        """
        if beginning in self._live or beginning in self._ended:
            return beginning
        both = () if whole else (self._live, self._ended)
        found = [job_id for ids in both for job_id in ids if job_id.startswith(beginning)]
        if len(found) == 1:
            return found[0]
        if found:
            some = ", ".join(found[:MATCHES]) + (", …" if len(found) > MATCHES else "")
            message = f"{len(found)} jobs have an id that begins with {beginning}: {some}; give more of it"
        else:
            message = (
                f"no job {beginning}: it was never submitted here, or it ended so long ago that it is forgotten "
                f"(the newest {self._ended_limit} are remembered, and none over a restart once they were collected)"
            )
        raise UnknownJob(message, job_id=beginning, matches=len(found))

    def waits_for_address(self, job_id: str) -> bool:
        """Return whether an unfinished job may still get an address."""
        job = self._live.get(job_id)
        return job is not None and job.address is None

    def traceparent(self, job_id: str) -> str:
        """Return the trace context of a known job; empty if it is not traced."""
        first = next(read(self.packed(job_id)), None)
        return first.traceparent if isinstance(first, Traced) else ""

    def trace(self, request_id: str, job_id: str, at: float) -> JobTrace:
        """Return the trace of a known job until `at`."""
        trace = job_trace(request_id, job_id, self.packed(job_id), at)
        job, now = self._live.get(job_id), trace.spans[-1] if trace.spans else None
        if job is None or job.address is None or now is None:
            return trace
        attempt, address = job.address
        here = (now.phase, now.place, now.attempt) == (Phase.RUN, "held", attempt)
        return replace(trace, address=address) if here else trace

    def row(self, job_id: str, task: str, group_id: str) -> JobRow | None:
        """Return a job's line of a table; None if its history is unreadable."""
        return job_row(job_id, self.packed(job_id), task, group_id)

    def changed(self, since: int, before: int, limit: int) -> Changed:
        """Return the newest jobs whose last change is after `since` and, unless that is 0, before `before`."""
        found: list[str] = []
        first = self.until + 1
        for job_id, number in reversed(self._numbers.items()):
            if number <= since:
                break
            if before and number >= before:
                continue
            if len(found) == limit:
                return Changed(found, first, more=True)
            found.append(job_id)
            first = number
        return Changed(found, first, more=False)

    def ended_jobs(self) -> tuple[EndedJobs, ...]:
        """Return the number of ended jobs per non-empty interval of the last hour, oldest first."""
        return tuple(EndedJobs(start, ENDED_INTERVAL_S, dict(counts)) for start, counts in self._intervals)


def _short(error: ErrorInfo | None) -> tuple[str, str]:
    return ("", "") if error is None else (error.code[:NAME_LIMIT], error.message[:MESSAGE_LIMIT])


def _say(action: Queued | Start | End, level: int) -> None:
    match action:
        case Queued(job_id, attempt, phase, error):
            lost = f"; the attempt before was lost: {error.message}" if error is not None else ""
            log.log(level, "queued for %s%s", phase, lost, extra=of_job(job_id, attempt, phase))
        case Start(stage_id, command):
            fields = of_job(command.job_id, command.attempt, command.phase, stage_id=stage_id)
            log.log(level, "%s given to %s", command.phase, stage_id, extra=fields)
        case End(finished):
            result = finished.result
            why = f": {result.error.code}: {result.error.message}" if result.error is not None else ""
            log.log(level, "ended as %s%s", result.outcome, why, extra=of_job(result.job_id, result.attempt))
