from __future__ import annotations

from prorl_zmq.brokers.rollout.node_losses import LIMIT, NodeLosses
from prorl_zmq.errors import LeaseLost, NoStage
from prorl_zmq.wire.messages.jobs import Outcome
from prorl_zmq.wire.messages.nodes import LostNode, NodeFacts

FACTS = NodeFacts(host="h1")


def lose(losses: NodeLosses, node: str, now: float = 0.0, *, jobs: tuple[str, ...] = ()) -> None:
    losses.lost(node, f"run-{node}", FACTS, now, died=True, is_whole=True)
    for job_id in jobs:
        losses.restarted(job_id, LeaseLost("lost", stage_id=f"run-{node}", cause="died").info())


def test_it_is_told_what_a_node_had_and_where_that_went() -> None:
    losses = NodeLosses()
    lose(losses, "n", 10.0, jobs=("a", "b", "c"))
    losses.restarted("waiting", NoStage("gone", role="run", node="n", waited_s=0.0).info())
    for job_id, node in (("a", "x"), ("b", "x"), ("b", "y"), ("c", "x")):
        losses.started(job_id, node)
    losses.ended("a", Outcome.COMPLETED, None)
    losses.ended("b", Outcome.COMPLETED, None)
    losses.ended("c", Outcome.TIMEOUT, None)
    losses.ended("d", Outcome.INFRASTRUCTURE_ERROR, LeaseLost("lost", stage_id="run-n", cause="died").info())
    losses.ended("elsewhere", Outcome.COMPLETED, None)
    assert losses.told(15.0) == (
        LostNode(
            node="n",
            host="h1",
            died=True,
            ago_s=5.0,
            jobs=5,
            completed={"x": 1, "y": 1},
            ended={Outcome.TIMEOUT: 1, Outcome.INFRASTRUCTURE_ERROR: 1},
        ),
    )


def test_a_job_that_is_lost_again_counts_with_the_newer_loss() -> None:
    losses = NodeLosses()
    lose(losses, "n", jobs=("a",))
    losses.started("a", "m")
    lose(losses, "m", 1.0, jobs=("a",))
    newer, older = losses.told(1.0)
    assert (newer.node, newer.jobs, newer.lost_again) == ("m", 1, 0)
    assert (older.node, older.jobs, older.lost_again) == ("n", 1, 1)


def test_a_job_that_is_restarted_twice_for_one_loss_counts_once() -> None:
    losses = NodeLosses()
    lose(losses, "n", jobs=("a", "a"))
    losses.restarted("a", NoStage("gone", role="eval", node="n", waited_s=0.0).info())
    assert losses.told(0.0)[0].jobs == 1


def test_processes_of_one_node_are_one_loss_and_a_node_of_which_one_lives_is_none() -> None:
    losses = NodeLosses()
    losses.lost("n", "init-n", None, 0.0, died=True, is_whole=False)
    assert losses.told(0.0) == ()
    losses.restarted("a", LeaseLost("lost", stage_id="init-n", cause="died").info())
    lose(losses, "n", 1.0, jobs=("b",))
    (lost,) = losses.told(1.0)
    assert lost.jobs == 2


def test_after_a_node_is_back_nothing_counts_for_its_loss_any_more() -> None:
    losses = NodeLosses()
    lose(losses, "n", jobs=("a",))
    losses.joined("n")
    losses.restarted("b", LeaseLost("lost", stage_id="run-n", cause="unreported").info())
    losses.restarted("c", NoStage("gone", role="eval", node="n", waited_s=60.0).info())
    losses.ended("a", Outcome.COMPLETED, None)
    (lost,) = losses.told(0.0)
    assert (lost.is_back, lost.jobs, sum(lost.completed.values())) == (True, 1, 1)


def test_only_the_last_losses_are_kept() -> None:
    losses = NodeLosses()
    for number in range(LIMIT + 1):
        lose(losses, f"n{number}", float(number), jobs=(f"job-{number}",))
    assert [lost.node for lost in losses.told(99.0)] == [f"n{number}" for number in range(LIMIT, 0, -1)]
    losses.ended("job-0", Outcome.COMPLETED, None)
    losses.restarted("job-0", LeaseLost("lost", stage_id="run-n0", cause="died").info())
    assert sum(lost.jobs for lost in losses.told(99.0)) == LIMIT
