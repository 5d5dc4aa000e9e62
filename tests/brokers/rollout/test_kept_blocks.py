from __future__ import annotations

from prorl_zmq.brokers.journal.records import Finished
from prorl_zmq.brokers.rollout.kept_blocks import ASK_AGAIN_S, KeptBlocks
from prorl_zmq.wire.messages.jobs import BlockHandle, Outcome, Phase, Result
from prorl_zmq.wire.messages.stages import ForgetBlocks, SendBlocks, StageReport

LEASE_S = 10.0


def handle(block_id: str, node: str = "n") -> BlockHandle:
    return BlockHandle(node=node, block_id=block_id, checksum=0, endpoint="tcp://127.0.0.1:5")


def report(*kept: str, stage_id: str = "run-n", node: str = "n") -> StageReport:
    return StageReport(
        stage_id=stage_id, role=Phase.RUN, node=node, slots=1, endpoint="tcp://127.0.0.1:5", tasks=(), kept=kept
    )


def ended(job_id: str) -> Finished:
    return Finished("s", Result(job_id=job_id, task="t", outcome=Outcome.COMPLETED), None)


def lost(blocks: KeptBlocks) -> list[str]:
    return [finished.result.job_id for finished, _ in blocks.take_lost(ended)]


def made(*block_ids: str) -> KeptBlocks:
    """A node that keeps the blocks of jobs `job-…`, and has reported them."""
    blocks = KeptBlocks(LEASE_S)
    for block_id in block_ids:
        blocks.add(f"job-{block_id}", handle(block_id))
    blocks.reported(report(*block_ids))
    return blocks


def test_what_nobody_needs_is_forgotten_with_the_second_tick() -> None:
    blocks = made("a", "b")
    blocks.release("job-a")
    assert blocks.tick(0.0) == []
    assert blocks.tick(1.0) == [("run-n", ForgetBlocks(("a",)))]
    assert blocks.tick(2.0) == []
    blocks.release("job-a")  # again
    assert (blocks.job_of("n", "a"), blocks.job_of("n", "b")) == (None, "job-b")


def test_a_block_that_becomes_a_jobs_before_its_node_is_informed_stays() -> None:
    blocks = made()
    blocks.reported(report("b"))  # its end came to a broker that died with it
    assert blocks.tick(0.0) == []
    blocks.add("job-b", handle("b"))  # the end was sent again
    assert blocks.tick(1.0) == []
    assert blocks.tick(2.0) == []
    blocks.release("job-b")
    assert blocks.tick(3.0) == []
    assert blocks.tick(4.0) == [("run-n", ForgetBlocks(("b",)))]


def test_a_node_forgets_what_it_has_beyond_ours_and_what_it_lacks_is_lost() -> None:
    blocks = made("a", "b")
    blocks.reported(report("b", "c"))
    assert lost(blocks) == ["job-a"]
    blocks.tick(0.0)
    assert blocks.tick(1.0) == [("run-n", ForgetBlocks(("c",)))]


def test_a_report_without_blocks_says_nothing_of_them() -> None:
    blocks = made("a")
    blocks.reported(StageReport(stage_id="x", role=Phase.RUN, node="n", slots=1, endpoint="ipc:///x", tasks=()))
    assert lost(blocks) == []


def test_a_jobs_block_is_lost_with_its_node_and_only_with_the_life_that_spoke_last() -> None:
    blocks = made("a")
    blocks.reported(report("a", stage_id="run-n-again"))
    blocks.gone(["run-n", "eval-n"], 0.0)
    blocks.tick(LEASE_S)
    assert lost(blocks) == []
    blocks.gone(["run-n-again"], 0.0)
    blocks.tick(LEASE_S - 1)
    assert lost(blocks) == []
    blocks.tick(LEASE_S)
    assert lost(blocks) == ["job-a"]


def test_a_node_that_reports_within_a_lease_keeps_its_blocks() -> None:
    blocks = made("a", "b")
    blocks.gone(["run-n"], 0.0)
    blocks.reported(report("b"))
    assert lost(blocks) == ["job-a"]
    blocks.tick(LEASE_S)
    assert lost(blocks) == []


def test_a_block_that_comes_back_with_its_node_is_not_lost_unless_it_was_damaged() -> None:
    blocks = made("a", "b")
    blocks.lose(["job-b"])
    blocks.gone(["run-n"], 0.0)
    blocks.tick(LEASE_S)
    assert blocks.take_lost(lambda _: None) == [], "neither job has ended yet"
    blocks.reported(report("a", "b", stage_id="run-n-again"))
    assert lost(blocks) == ["job-b"]


def test_a_job_that_has_not_ended_waits_with_its_loss_and_one_that_began_anew_has_none() -> None:
    blocks = made("a", "b")
    blocks.gone(["run-n"], 0.0)
    blocks.tick(LEASE_S)
    assert blocks.take_lost(lambda _: None) == []
    blocks.release("job-a")
    assert lost(blocks) == ["job-b"]
    assert lost(blocks) == []


def test_after_a_restart_a_node_has_a_lease_to_report() -> None:
    blocks = KeptBlocks(LEASE_S)
    blocks.restore("job-a", handle("a"), 0.0)
    blocks.restore("job-b", handle("b", "other"), 0.0)
    blocks.tick(LEASE_S - 1)
    blocks.reported(report("a"))
    blocks.tick(LEASE_S)
    assert lost(blocks) == ["job-b"]


def test_a_relay_is_asked_for_again_until_the_block_has_come() -> None:
    blocks = made("a")
    blocks.relay(["job-a", "unknown"])
    assert blocks.tick(0.0) == [("run-n", SendBlocks(("a",)))]
    assert blocks.tick(1.0) == []
    assert blocks.tick(ASK_AGAIN_S) == [("run-n", SendBlocks(("a",)))]
    assert blocks.job_of("n", "a") == "job-a"
    blocks.release("job-a")
    assert blocks.tick(2 * ASK_AGAIN_S) == []


def test_the_relay_of_a_node_that_is_gone_is_a_loss() -> None:
    blocks = made("a")
    blocks.gone(["run-n"], 0.0)
    blocks.tick(LEASE_S)
    assert lost(blocks) == ["job-a"]
    blocks.relay(["job-a"])  # by a client that was given the result before
    blocks.tick(0.0)
    assert lost(blocks) == ["job-a"]
