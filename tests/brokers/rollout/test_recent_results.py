"""What stays to be looked at once it was collected, and how much of it."""

from __future__ import annotations

from prorl_zmq.brokers.journal.records import Finished, StoredBlock
from prorl_zmq.brokers.rollout.recent_results import FIXED_BYTES, RecentResults
from prorl_zmq.wire.messages.jobs import BlockHandle, Outcome, Result

HANDLE = BlockHandle(node="n", block_id="b", checksum=0, endpoint="tcp://127.0.0.1:5")


def finished(job_id: str, block: object = None, **more: object) -> Finished:
    return Finished("s", Result(job_id=job_id, task="math", outcome=Outcome.COMPLETED, **more), block)  # type: ignore[arg-type]


def test_the_oldest_go_when_all_take_more_than_the_limit() -> None:
    recent = RecentResults(3 * (FIXED_BYTES + 1000))
    blocks = [bytes(1000) for _ in range(4)]
    for number, block in enumerate(blocks):
        gone = recent.keep([finished(f"job-{number}", block)])
        assert [one.block for one in gone] == ([blocks[0]] if number == 3 else [])
    assert recent.get("job-0") is None
    kept = recent.get("job-3")
    assert kept is not None
    assert kept.block is blocks[3]  # not a copy


def test_one_that_is_larger_than_the_limit_goes_at_once_and_so_do_all_where_the_limit_is_nothing() -> None:
    recent = RecentResults(0)
    (gone,) = recent.keep([finished("a", b"block")])
    assert (gone.block, recent.get("a")) == (b"block", None)
    recent = RecentResults(FIXED_BYTES + 10)
    recent.keep([finished("a", b"small")])
    gone_ids = [one.result.job_id for one in recent.keep([finished("b", bytes(100))])]
    assert gone_ids == ["a", "b"]


def test_notes_count_too_and_a_job_that_comes_again_counts_once() -> None:
    recent = RecentResults(2 * FIXED_BYTES + 100)
    for _ in range(5):
        recent.keep([finished("again", b"block")])
    recent.keep([finished("b")])
    assert recent.get("again") is not None
    recent.keep([finished("b", notes={"patch": "x" * 200})])
    assert recent.get("again") is None


def test_of_a_block_that_was_not_in_memory_only_the_result_stays() -> None:
    recent = RecentResults(2**20)
    recent.keep([finished("stored", StoredBlock(1, 13), tokens=1), finished("kept", None, tokens=1, kept=HANDLE)])
    for job_id in ("stored", "kept"):
        one = recent.get(job_id)
        assert one is not None
        assert (one.block, one.result.kept, one.result.tokens) == (None, None, 1)  # its node forgets the block now
