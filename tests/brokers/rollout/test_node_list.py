from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from prorl_zmq.brokers.rollout import watch_requests
from prorl_zmq.brokers.rollout.stage_pool import Requirement, SlotClaim, StagePool
from prorl_zmq.brokers.rollout.watch_requests import list_nodes
from prorl_zmq.wire.messages.jobs import Phase
from prorl_zmq.wire.messages.nodes import ListNodes, NodeFacts, NodeStatus
from prorl_zmq.wire.messages.stages import StageReport, Task

if TYPE_CHECKING:
    import pytest

LEASE_S, QUIET_S = 10.0, 2.0
FACTS = NodeFacts(host="h")


def report(node: str, role: Phase = Phase.RUN, slots: int = 4, *, draining: bool = False) -> StageReport:
    name, told = f"{role}-{node}", {"tasks": (Task("math"),), "facts": FACTS, "draining": draining}
    return StageReport(stage_id=name, member=node, role=role, node=node, slots=slots, endpoint="e", **told)


def pool(*nodes: str) -> StagePool:
    stages = StagePool(LEASE_S, QUIET_S)
    for node in nodes:
        for role in (Phase.INIT, Phase.RUN):
            stages.heard(report(node, role), 0.0)
    return stages


def nodes(stages: StagePool, now: float) -> tuple[NodeStatus, ...]:
    return list_nodes(ListNodes("r"), stages, now).nodes


def test_a_node_is_told_with_what_it_does() -> None:
    stages = pool("n")
    stages.take(Requirement(Phase.RUN, "math", None), SlotClaim("a", 1))
    (node,) = nodes(stages, 1.0)
    assert (node.node, node.state, node.silent_s, node.lease_s, node.facts) == ("n", "ready", 1.0, LEASE_S, FACTS)
    assert node.slots == {Phase.INIT: 4, Phase.RUN: 4}
    assert node.busy == {Phase.INIT: 0, Phase.RUN: 1}


def test_the_facts_of_several_members_are_those_of_who_was_heard_last() -> None:
    stages = StagePool(LEASE_S, QUIET_S)
    for at, role in enumerate((Phase.RUN, Phase.EVAL, Phase.INIT)):
        told = replace(report("n", role), member=f"{role}-n", facts=NodeFacts(host="h", sandboxes=at))
        stages.heard(told, float(at))
    stages.lives(stages.of_node("n")[1].lease, 1, 3.0)
    (node,) = nodes(stages, 4.0)
    assert (node.silent_s, node.facts) == (1.0, NodeFacts(host="h", sandboxes=1))


def test_states_change_as_a_node_drains_falls_silent_and_is_lost() -> None:
    stages = pool("n", "m")
    stages.heard(report("m", Phase.EVAL), 0.0)
    for role in (Phase.INIT, Phase.RUN):
        stages.leave(f"{role}-m")
    assert [node.state for node in nodes(stages, 0.0)] == ["draining", "ready"]
    stages.heard(report("m", draining=True), 3.0)
    stages.expire(3.0)
    assert [node.state for node in nodes(stages, 3.0)] == ["draining", "silent"]
    stages.expire(LEASE_S)
    listed = list_nodes(ListNodes("r"), stages, LEASE_S + 1.0)
    assert [node.node for node in listed.nodes] == ["m"]
    assert [(lost.node, lost.host, lost.died, lost.ago_s, lost.is_back) for lost in listed.lost] == [
        ("n", "h", False, 1.0, False)
    ]
    stages.heard(report("n"), 12.0)
    assert list_nodes(ListNodes("r"), stages, 12.0).lost[0].is_back


def test_a_node_whose_connection_has_ended_is_lost_before_its_lease_is_over() -> None:
    stages = pool("n")
    stages.disconnected("n", 1.0)
    assert [node.state for node in nodes(stages, 1.0)] == ["silent"]
    stages.expire(1.0 + QUIET_S)
    assert list_nodes(ListNodes("r"), stages, 3.0).lost[0].died


def test_many_nodes_are_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_requests, "NODES", 2)
    stages, told, after = pool("d", "a", "c", "b", "e"), [], None
    while True:
        part = list_nodes(ListNodes("r", after), stages, 0.0)
        told.append([node.node for node in part.nodes])
        if not part.more:
            break
        after = told[-1][-1]
    assert told == [["a", "b"], ["c", "d"], ["e"]]
