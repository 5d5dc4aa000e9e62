"""`NodeRow`: a node as seen by all rollout brokers together. Pure.

Its slots and jobs are sums over the brokers. If they disagree about its state, the row has the worst state and the
brokers that report it: a link is broken, or a broker has not seen the node again yet.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ..wire.messages.jobs import Phase  # noqa: TC001 - msgspec reads annotations at run time
from ..wire.messages.nodes import LostNode, NodeFacts, NodeState, NodeStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..wire.messages.nodes import NodeList

K = TypeVar("K")
STATES = tuple(NodeState)
TOGETHER_S = 60.0
"""Losses of a node that several brokers report within this time are one loss."""


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    node: str = ""
    """Empty: a job in a scheduler's queue, or one whose node has not joined."""
    host: str = ""
    allocation: str = ""
    state: str = ""
    """Empty: no broker has it."""
    said_by: tuple[str, ...] = ()
    """The brokers that report this state, if not all do."""
    slots: dict[Phase, int] = {}
    used: dict[Phase, int] = {}
    held: int = 0
    """Occupied slots."""
    silent_s: float | None = None
    """Since its last report; for a lost node, since the loss was noticed."""
    lease_s: float = 0.0
    """How long it may be silent before it counts as lost."""
    facts: NodeFacts = NodeFacts()
    slurm_job: str = ""
    slurm_state: str = ""
    """With the reason for waiting; `leaving` after a request to leave."""
    left_s: float | None = None
    """Remaining time of its allocation, if known."""


def node_rows(lists: Mapping[str, NodeList]) -> list[NodeRow]:
    """Return the brokers' nodes by name, including lost ones that are not back."""
    told: dict[str, dict[str, NodeStatus]] = {}
    for broker, one in lists.items():
        for status in (*one.nodes, *(_gone(lost) for lost in one.lost if not lost.is_back)):
            told.setdefault(status.node, {}).setdefault(broker, status)
    return [_row(node, told[node]) for node in sorted(told)]


def losses(lists: Iterable[NodeList]) -> list[LostNode]:
    """Return the last loss of each node, the newest first, with the fate of all brokers' jobs."""
    found: dict[str, LostNode] = {}
    for lost in sorted((lost for one in lists for lost in one.lost), key=lambda lost: lost.ago_s):
        newest = found.setdefault(lost.node, lost)
        if newest is not lost and lost.ago_s < newest.ago_s + TOGETHER_S:
            found[lost.node] = _both(newest, lost)
    return list(found.values())


def _both(one: LostNode, other: LostNode) -> LostNode:
    return msgspec.structs.replace(
        one,
        died=one.died or other.died,
        is_back=one.is_back and other.is_back,
        jobs=one.jobs + other.jobs,
        completed=total((one.completed, other.completed)),
        ended=total((one.ended, other.ended)),
        lost_again=one.lost_again + other.lost_again,
    )


def _gone(lost: LostNode) -> NodeStatus:
    facts = NodeFacts(host=lost.host)
    return NodeStatus(node=lost.node, state=NodeState.LOST, silent_s=lost.ago_s, facts=facts)


def _row(node: str, told: Mapping[str, NodeStatus]) -> NodeRow:
    worst = max((status.state for status in told.values()), key=STATES.index)
    said_by = tuple(broker for broker, status in told.items() if status.state == worst)
    used = total(status.busy for status in told.values())
    facts = next((status.facts for status in told.values() if status.facts is not None), NodeFacts())
    return NodeRow(
        node=node,
        host=facts.host,
        allocation=facts.allocation,
        state=worst,
        said_by=said_by if len(said_by) < len(told) else (),
        slots=total(status.slots for status in told.values()),
        used=used,
        held=sum(used.values()),
        silent_s=max(status.silent_s for status in told.values()),
        lease_s=min(status.lease_s for status in told.values()),
        facts=facts,
    )


def total(counts: Iterable[Mapping[K, int]]) -> dict[K, int]:
    """Return the sums of counts by key."""
    total: Counter[K] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)
