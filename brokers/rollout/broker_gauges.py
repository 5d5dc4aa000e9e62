"""The gauges of a rollout broker, set once a second, off the path of jobs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ...metrics import catalog
from ...wire.messages.jobs import Phase
from .job_record import JobStatus

if TYPE_CHECKING:
    from .batch_runner import BatchRunner
    from .jobs import Jobs


def set_gauges(jobs: Jobs, batches: BatchRunner) -> None:
    table = jobs.table
    for status in (JobStatus.QUEUED, JobStatus.HELD):
        for phase, count in table.count(status).items():
            catalog.JOBS.set(count, phase, status)
    for task in table.stages.tasks():  # start at 0: Prometheus misses the increase of a counter that starts higher
        catalog.JOBS_SUBMITTED.add(task, amount=0)
        catalog.JOBS_ENDED.add(task, "completed", "", amount=0)
    pools: Counter[Phase] = Counter()
    busy: Counter[Phase] = Counter()
    for stage in table.stages:
        pools[stage.role] += 1
        busy[stage.role] += len(stage.claims)
    for role in Phase:
        catalog.SLOTS.set(table.stages.role_slots(role), role)
        catalog.SLOTS_BUSY.set(busy[role], role)
        catalog.STAGE_POOLS.set(pools[role], role)
    catalog.RESULTS_UNCOLLECTED.set(len(jobs.results))
    catalog.RESULTS_MEMORY.set(jobs.results.memory_bytes)
    catalog.REDELIVERED.total(table.redelivered)
    catalog.BLOCKS_LOST.total(jobs.blocks.lost)
    catalog.JOURNAL_BYTES.set(jobs.writes.journal_bytes)
    catalog.JOURNAL_STUCK.set(jobs.writes.is_stuck)
    _set_batches(batches)


def _set_batches(batches: BatchRunner) -> None:
    states: Counter[str] = Counter()
    groups: Counter[str] = Counter()
    for batch in batches.statuses():
        states[batch.state] += 1
        groups.update(under_way=batch.under_way, kept=batch.kept, prompts=batch.prompts)
    for state in ("open", "met", "short", "failed"):
        catalog.BATCHES_OPEN.set(states[state], state)
    for state in ("under_way", "kept", "prompts"):
        catalog.BATCH_GROUPS.set(groups[state], state)
