"""`NodeLosses`: the last lost nodes and the fate of their jobs; in memory only. Pure.

A node is lost when the leases of all its stage processes have expired. Its jobs are those it held and those that waited
there for a stage; each counts when it restarts or ends with that error. A job that is lost again counts for the newer
loss. The stage pool reports nodes, and the transition log reports jobs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import LeaseLost, NoStage
from ...wire.messages.jobs import Outcome
from ...wire.messages.nodes import LostNode

if TYPE_CHECKING:
    from ...errors import ErrorInfo
    from ...wire.messages.nodes import NodeFacts

LIMIT = 32
"""Most losses remembered."""
TOGETHER_S = 15.0
"""Leases of one node that expire within this many seconds are one loss."""


@dataclass(slots=True)
class _Loss:
    node: str
    facts: NodeFacts | None
    died: bool
    at: float
    stage_ids: set[str] = field(default_factory=set)
    is_whole: bool = False
    """Whether no stage process of the node was left."""
    is_back: bool = False
    jobs: int = 0
    going: dict[str, str] = field(default_factory=dict)
    """Unfinished jobs, with the node of each one's last start."""
    completed: Counter[str] = field(default_factory=Counter)
    ended: Counter[Outcome] = field(default_factory=Counter)
    lost_again: int = 0


class NodeLosses:
    def __init__(self) -> None:
        self._losses: list[_Loss] = []
        """Oldest first."""
        self._of_node: dict[str, _Loss] = {}
        """The last loss of each node that has not returned."""
        self.of_jobs: dict[str, _Loss] = {}
        """The loss of each lost, unfinished job."""

    def lost(
        self, node: str, stage_id: str, facts: NodeFacts | None, now: float, *, died: bool, is_whole: bool
    ) -> None:
        """Record the expired lease of a stage process; `is_whole`: no other process of its node is left."""
        loss = self._of_node.get(node)
        if loss is None or now - loss.at > TOGETHER_S:
            loss = _Loss(node, facts, died, now)
            self._losses.append(loss)
            self._of_node[node] = loss
            if len(self._losses) > LIMIT:
                self._forget(self._losses.pop(0))
        loss.is_whole |= is_whole
        loss.stage_ids.add(stage_id)

    def joined(self, node: str) -> None:
        """Record a stage process's first report, which ends its node's loss."""
        loss = self._of_node.pop(node, None)
        if loss is not None:
            loss.is_back = True

    def restarted(self, job_id: str, error: ErrorInfo) -> None:
        """Count a restarted job if its error is the loss of a node."""
        stage_id, node = (error.fields.get(name) for name in ("stage_id", "node"))
        if error.code == LeaseLost.code:
            loss = next((one for one in self._of_node.values() if stage_id in one.stage_ids), None)
        elif error.code == NoStage.code:
            loss = self._of_node.get(str(node))
        else:
            return
        before = self.of_jobs.get(job_id)
        if loss is None or loss is before:
            return
        if before is not None:
            del before.going[job_id]
            before.lost_again += 1
        self.of_jobs[job_id] = loss
        loss.going[job_id] = ""
        loss.jobs += 1

    def started(self, job_id: str, node: str) -> None:
        """Record the node on which a job's phase starts."""
        loss = self.of_jobs.get(job_id)
        if loss is not None:
            loss.going[job_id] = node

    def ended(self, job_id: str, outcome: Outcome, error: ErrorInfo | None) -> None:
        if error is not None:
            self.restarted(job_id, error)  # a lost job without attempts left ends instead of restarting
        loss = self.of_jobs.pop(job_id, None)
        if loss is not None:
            where = loss.going.pop(job_id)
            if outcome == Outcome.COMPLETED:
                loss.completed[where] += 1
            else:
                loss.ended[outcome] += 1

    def told(self, now: float) -> tuple[LostNode, ...]:
        """Return the lost nodes, newest first."""
        return tuple(
            LostNode(
                node=loss.node,
                host=loss.facts.host if loss.facts is not None else "",
                died=loss.died,
                ago_s=now - loss.at,
                is_back=loss.is_back,
                jobs=loss.jobs,
                completed=dict(loss.completed),
                ended=dict(loss.ended),
                lost_again=loss.lost_again,
            )
            for loss in reversed(self._losses)
            if loss.is_whole
        )

    def _forget(self, loss: _Loss) -> None:
        for job_id in loss.going:
            del self.of_jobs[job_id]
        if self._of_node.get(loss.node) is loss:
            del self._of_node[loss.node]
