"""What is told of nodes to who asks: those that are here, in parts, and the last that were lost. Pure."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import TYPE_CHECKING

from ...wire.messages.jobs import Phase
from ...wire.messages.nodes import NodeList, NodeState, NodeStatus

if TYPE_CHECKING:
    from ...wire.messages.nodes import ListNodes
    from .stage_pool import StagePool

PART = 1000
"""Most nodes of one reply, which has a limit on what is in it."""


def list_nodes(request: ListNodes, stages: StagePool, now: float) -> NodeList:
    after = request.after or ""
    names = heapq.nsmallest(PART + 1, (name for name in stages.nodes() if name > after))
    nodes = tuple(_status(name, stages, now) for name in names[:PART])
    return NodeList(request.request_id, nodes=nodes, more=len(names) > PART, lost=stages.losses.told(now))


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
    elif all(stage.leaving for stage in [one for one in own if one.role != Phase.EVAL] or own):  # EVAL drains last
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
