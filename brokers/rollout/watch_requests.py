"""`WatchRequestHandler`: answers watchers about jobs, results, batches and nodes, without changing any job."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from typing import TYPE_CHECKING

from ...errors import UnknownJob
from ...wire.messages.jobs import Phase
from ...wire.messages.nodes import NodeList, NodeState, NodeStatus
from ...wire.messages.watching import ListSteps, Peek, Peeked, ViewBatch, Watch, Watched

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...wire.messages.nodes import ListNodes
    from ...wire.messages.watching import WatchingReply
    from ...wire.sockets import Frame
    from .batch_runner import BatchRunner
    from .jobs import Jobs
    from .stage_pool import StagePool

DRAINED_LAST = (Phase.EVAL, Phase.SCORE)
"""They finish the jobs that RUN began."""
NODES = 1000
"""Most nodes per reply."""


class WatchRequestHandler:
    def __init__(self, jobs: Jobs, batches: BatchRunner) -> None:
        self._jobs = jobs
        self._batches = batches

    def answer(
        self, request: Watch | Peek | ViewBatch | ListSteps, now: float
    ) -> tuple[WatchingReply, Sequence[Frame]]:
        """Return the reply and the frames behind it.

        Raises:
            UnknownJob, UnknownBatch, JournalFailed: the request is refused.
        """
        match request:
            case Watch():
                return self._watched(request), ()
            case Peek():
                return self._peeked(request)
            case ListSteps():
                return self._batches.steps(request, now, time.time()), ()
            case ViewBatch():
                return self._batches.view(request, now, time.time()), ()

    def _watched(self, request: Watch) -> Watched:
        log = self._jobs.transitions
        same = request.broker_id == log.broker_id
        since, before = (request.since, request.before) if same else (0, 0)
        changed = log.changed(since, before, request.limit)
        rows = (log.row(job_id, *self._jobs.names(job_id)) for job_id in changed.job_ids)
        return Watched(
            request.request_id,
            broker_id=log.broker_id,
            until=log.until,
            first=changed.first,
            more=changed.more,
            forgotten_until=log.forgotten_until,
            jobs=tuple(row for row in rows if row is not None),
            ended=log.ended_jobs() if request.counts_ended else (),
        )

    def _peeked(self, request: Peek) -> tuple[Peeked, Sequence[Frame]]:
        jobs, job_id = self._jobs, request.job_id
        if job_id in jobs.table:
            raise UnknownJob(f"job {job_id} has not ended; ask for its trace and its turns so far", job_id=job_id)
        if (finished := jobs.results.get(job_id)) is not None:
            result, blocks = jobs.delivery(finished)
        elif (recent := jobs.recent.get(job_id)) is not None:
            result, blocks = recent.result, [recent.block] if recent.block is not None else []
        else:
            raise UnknownJob(
                f"the result of job {job_id} is not here: it was never submitted here, or it was collected so long ago "
                "that it is forgotten (see keep_collected_bytes)",
                job_id=job_id,
            )
        return Peeked(request.request_id, result, has_block=bool(blocks)), () if request.only_result else blocks


def list_nodes(request: ListNodes, stages: StagePool, now: float) -> NodeList:
    """Return a page of the present nodes, and the last lost ones."""
    after = request.after or ""
    names = heapq.nsmallest(NODES + 1, (name for name in stages.nodes() if name > after))
    nodes = tuple(_status(name, stages, now) for name in names[:NODES])
    return NodeList(request.request_id, nodes=nodes, more=len(names) > NODES, lost=stages.losses.told(now))


def _status(node: str, stages: StagePool, now: float) -> NodeStatus:
    slots: Counter[Phase] = Counter()
    busy: Counter[Phase] = Counter()
    own = sorted(stages.of_node(node), key=lambda stage: stage.lease.heard_at, reverse=True)
    for stage in own:
        slots[stage.role] += stage.slots
        busy[stage.role] += len(stage.claims)
    state = NodeState.READY
    if all(stage.lease.quiet for stage in own):
        state = NodeState.SILENT
    elif all(stage.leaving for stage in [one for one in own if one.role not in DRAINED_LAST] or own):
        state = NodeState.DRAINING
    return NodeStatus(
        node=node,
        state=state,
        slots=dict(slots),
        busy=dict(busy),
        lease_s=stages.lease_s,
        silent_s=max(0.0, now - own[0].lease.heard_at),
        facts=next((stage.lease.facts for stage in own if stage.lease.facts is not None), None),
    )
