"""How many jobs are where: by phase and status, by session, and those of batches by task. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ...wire.messages.jobs import Phase
from .job_record import JobStatus
from .stage_pool import Requirement

if TYPE_CHECKING:
    from .job_record import JobRecord
    from .stage_pool import StagePool


class JobCounts:
    def __init__(self) -> None:
        self._unfinished: Counter[str] = Counter()
        self._by_status: Counter[tuple[Phase, JobStatus]] = Counter()
        self._batched: Counter[tuple[Phase, str]] = Counter()

    def accepted(self, record: JobRecord) -> None:
        self._unfinished[record.holder] += 1

    def ended(self, record: JobRecord) -> None:
        self._unfinished[record.holder] -= 1
        if not self._unfinished[record.holder]:
            del self._unfinished[record.holder]

    def moved(self, record: JobRecord, change: int) -> None:
        """A job came to where its record says that it is (1), or is about to leave it (-1)."""
        self._by_status[record.phase, record.status] += change
        if record.in_batch:
            self._batched[record.phase, record.task] += change
            if not self._batched[record.phase, record.task]:
                del self._batched[record.phase, record.task]

    def unfinished(self, session: str) -> int:
        return self._unfinished[session]

    def of(self, phase: Phase, status: JobStatus) -> int:
        return self._by_status[phase, status]

    def demand(self) -> dict[Phase, int]:
        """Return how many slots of each stage the jobs could use soon: those that come from the stage before too."""
        init, run, evaluate = (
            sum(self._by_status[phase, status] for status in (JobStatus.QUEUED, JobStatus.HELD)) for phase in Phase
        )
        return {Phase.INIT: init, Phase.RUN: init + run, Phase.EVAL: run + evaluate}

    def room(self, task: str, stages: StagePool) -> int:
        """Return how many more jobs of a task batches may submit now: as many are in INIT and RUN as both have slots.

        So no slot of RUN waits for INIT, few sandboxes wait for RUN, and none is chosen before its time. What piles up
        before EVAL counts too. Without any slot it is one, whose end tells of that.
        """
        init, run, evaluate = (stages.slots(Requirement(phase, task, None)) for phase in Phase)
        waiting = max(0, self._batched[Phase.EVAL, task] - evaluate)
        return max(1, init + run) - self._batched[Phase.INIT, task] - self._batched[Phase.RUN, task] - waiting
