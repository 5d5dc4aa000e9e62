"""`JobCounts`: numbers of jobs by phase and status, by flow, and of batches' jobs by task. Pure."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from ...wire.messages.jobs import Phase
from ...wire.messages.stages import SlotDemand
from ..journal.records import holder_of
from .fair_queue import Flow, Shares, setting_of
from .job_record import JobStatus
from .stage_pool import Requirement

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .job_record import JobRecord
    from .stage_pool import StagePool


class JobCounts:
    """Args: weights and priorities of sessions, by name pattern."""

    def __init__(self, weights: Mapping[str, float], priorities: Mapping[str, int]) -> None:
        self._weights = weights
        self._priorities = priorities
        self._batch_weights: dict[str, float] = {}
        """Total weight of the open batches, by session."""
        self._flows: dict[str, Flow] = {}
        """By the holder of the jobs."""
        self._shares = Shares()
        self._by_status: Counter[tuple[Phase, JobStatus]] = Counter()
        self._batched: Counter[tuple[Phase, str]] = Counter()
        self._to_score = 0
        """Jobs in EVAL that have a teacher."""

    def accepted(self, record: JobRecord) -> None:
        holder = record.holder
        flow = self._flows.get(holder)
        if flow is None:
            priority = setting_of(record.session, self._priorities, 0)
            weight = self._weight(record.session, in_batch=record.in_batch)
            flow = self._flows[holder] = Flow(holder, self._shares, weight, priority)
        flow.unfinished += 1
        record.flow = flow

    def ended(self, record: JobRecord) -> None:
        flow = record.flow
        flow.unfinished -= 1
        if not flow.unfinished:
            del self._flows[flow.name]
            flow.leave()
            if not self._flows:
                self._shares.weight = 0.0  # drops rounding errors

    def weigh_batches(self, weights: Mapping[str, float]) -> None:
        """Set the total weight of the open batches, by session; 1 for a session without any."""
        changed = {*weights, *self._batch_weights}
        self._batch_weights = dict(weights)
        for session in changed:
            flow = self._flows.get(holder_of(session, in_batch=True))
            if flow is not None:
                flow.weigh(self._weight(session, in_batch=True))

    def _weight(self, session: str, *, in_batch: bool) -> float:
        weight = setting_of(session, self._weights, 1.0)
        return weight * self._batch_weights.get(session, 1.0) if in_batch else weight

    def moved(self, record: JobRecord, change: int) -> None:
        """Count a job that entered its record's phase and status (1), or is about to leave them (-1)."""
        self._by_status[record.phase, record.status] += change
        record.flow.moved(record.phase, change, held=record.status == JobStatus.HELD)
        if record.phase == Phase.EVAL and record.run is not None and record.run.chat is not None:
            self._to_score += change
        if record.in_batch:
            self._batched[record.phase, record.task] += change
            if not self._batched[record.phase, record.task]:
                del self._batched[record.phase, record.task]

    def unfinished(self, session: str) -> int:
        flow = self._flows.get(session)
        return flow.unfinished if flow is not None else 0

    def of(self, phase: Phase, status: JobStatus) -> int:
        return self._by_status[phase, status]

    def demand(self, nodes: int) -> SlotDemand:
        """Return how many slots of each stage the jobs could use soon, per node, rounded up.

        Jobs in the stage before count too; for SCORE, those that have a teacher. Each of `nodes` nodes is asked for the
        same number.
        """
        init, run, evaluate, score = (
            sum(self._by_status[phase, status] for status in (JobStatus.QUEUED, JobStatus.HELD)) for phase in Phase
        )
        wanted = {Phase.INIT: init, Phase.RUN: init + run, Phase.EVAL: run + evaluate}
        wanted[Phase.SCORE] = self._to_score + score
        slots = {phase: math.ceil(count / max(1, nodes)) for phase, count in wanted.items()}
        return SlotDemand(slots, self._shares.weight or 1.0)

    def room(self, task: str, stages: StagePool) -> int:
        """Return how many more jobs of a task batches may submit: as many are in INIT and RUN as both have slots.

        Slots of RUN thus never wait for INIT, and few sandboxes wait for RUN. Backlogs before EVAL and SCORE count too.
        Without slots, one job is allowed, whose end reports that.
        """
        init, run, *later = (stages.slots(Requirement(phase, task, None)) for phase in Phase)
        backlogs = zip((Phase.EVAL, Phase.SCORE), later, strict=True)
        waiting = sum(max(0, self._batched[phase, task] - slots) for phase, slots in backlogs)
        return max(1, init + run) - self._batched[Phase.INIT, task] - self._batched[Phase.RUN, task] - waiting
