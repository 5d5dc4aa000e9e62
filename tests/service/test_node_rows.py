from __future__ import annotations

from prorl_zmq.service.node_rows import losses, node_rows
from prorl_zmq.wire.messages.jobs import Outcome, Phase
from prorl_zmq.wire.messages.nodes import LostNode, NodeFacts, NodeList, NodeState, NodeStatus

FACTS = NodeFacts(host="h1", allocation="7_1", version="1.0")


def node(name: str, state: NodeState, busy: int, silent_s: float, facts: NodeFacts | None = None) -> NodeStatus:
    slots, used = {Phase.INIT: 2, Phase.RUN: 8}, {Phase.RUN: busy}
    return NodeStatus(node=name, state=state, slots=slots, busy=used, silent_s=silent_s, facts=facts)


def test_slots_and_jobs_of_all_brokers_are_added_up() -> None:
    ready = NodeState.READY
    first = NodeList("a", nodes=(node("n", ready, 3, 0.5, FACTS), node("only-there", ready, 1, 0.1)))
    rows = node_rows({"rollout-0": first, "rollout-1": NodeList("b", nodes=(node("n", ready, 5, 2.0),))})
    assert [row.node for row in rows] == ["n", "only-there"]
    row = rows[0]
    assert (row.host, row.allocation, row.state, row.said_by) == ("h1", "7_1", "ready", ())
    assert (row.slots, row.used) == ({Phase.INIT: 4, Phase.RUN: 16}, {Phase.RUN: 8})
    assert (row.held, row.silent_s) == (8, 2.0)


def test_the_worst_state_is_told_with_who_says_so() -> None:
    seen = NodeList("a", nodes=(node("n", NodeState.READY, 0, 0.5),))
    gone = NodeList("b", lost=(LostNode(node="n", host="h1", died=True, ago_s=4.0, jobs=2),))
    (row,) = node_rows({"rollout-0": seen, "rollout-1": gone})
    assert (row.state, row.said_by, row.silent_s) == ("lost", ("rollout-1",), 4.0)
    back = NodeList("b", lost=(LostNode(node="n", host="h1", died=True, ago_s=4.0, jobs=2, is_back=True),))
    (row,) = node_rows({"rollout-0": seen, "rollout-1": back})
    assert (row.state, row.said_by) == ("ready", ())


def test_what_brokers_say_of_one_loss_is_added_up_and_earlier_ones_are_left_out() -> None:
    def lost(ago_s: float, jobs: int, completed: dict[str, int]) -> LostNode:
        ended = {Outcome.TIMEOUT: 1}
        return LostNode(node="n", died=False, ago_s=ago_s, jobs=jobs, completed=completed, ended=ended)

    first = NodeList("a", lost=(lost(3.0, 4, {"x": 1}), lost(4000.0, 9, {})))
    (one,) = losses([first, NodeList("b", lost=(lost(2.0, 5, {"x": 2, "y": 1}),))])
    assert one == lost(2.0, 9, {"x": 3, "y": 1}).__class__(
        node="n", died=False, ago_s=2.0, jobs=9, completed={"x": 3, "y": 1}, ended={Outcome.TIMEOUT: 2}
    )
