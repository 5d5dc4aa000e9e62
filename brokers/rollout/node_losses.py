"""`NodeLosses`: the last nodes that were lost, and what became of their jobs. Pure; in memory alone.

A node is lost when the leases of all of its stage processes have ended. Its jobs are those that it held and those that
waited there for a stage: each counts when it restarts or ends with that error. A job that is lost again counts for the
newer loss. The stage pool reports nodes, and the transition log reports jobs.
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
"""Losses that are remembered."""
TOGETHER_S = 15.0
"""Processes of one node whose leases end within so long are one loss."""


@dataclass(slots=True)
class _Loss:
    node: str
    facts: NodeFacts | None
    died: bool
    at: float
    stage_ids: set[str] = field(default_factory=set)
    is_whole: bool = False
    """No stage process of the node was left."""
    is_back: bool = False
    jobs: int = 0
    going: dict[str, str] = field(default_factory=dict)
    """The jobs that have not ended, with the node where each was started last."""
    completed: Counter[str] = field(default_factory=Counter)
    ended: Counter[Outcome] = field(default_factory=Counter)
    lost_again: int = 0


class NodeLosses:
    def __init__(self) -> None:
        self._losses: list[_Loss] = []
        """The oldest first."""
        self._of_node: dict[str, _Loss] = {}
        """The last loss of each node that is not back."""
        self.of_jobs: dict[str, _Loss] = {}
        """The loss of each job that was lost and has not ended."""

    def lost(
        self, node: str, stage_id: str, facts: NodeFacts | None, now: float, *, died: bool, is_whole: bool
    ) -> None:
        """The lease of a stage process has ended; `is_whole`: no other one of its node is left."""
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
        """A stage process of a node has reported for the first time."""
        loss = self._of_node.pop(node, None)
        if loss is not None:
            loss.is_back = True

    def restarted(self, job_id: str, error: ErrorInfo) -> None:
        """A job was lost to an error, and starts again; that counts if it is the loss of a node."""
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
        """A phase of a job starts on a node."""
        loss = self.of_jobs.get(job_id)
        if loss is not None:
            loss.going[job_id] = node

    def ended(self, job_id: str, outcome: Outcome, error: ErrorInfo | None) -> None:
        if error is not None:
            self.restarted(job_id, error)  # it would have been, but has no attempt left
        loss = self.of_jobs.pop(job_id, None)
        if loss is not None:
            where = loss.going.pop(job_id)
            if outcome == Outcome.COMPLETED:
                loss.completed[where] += 1
            else:
                loss.ended[outcome] += 1

    def told(self, now: float) -> tuple[LostNode, ...]:
        """Return the nodes that were lost, the newest first."""
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
