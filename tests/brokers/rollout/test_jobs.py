"""What a session may hold while a node keeps its blocks or loses them, and what stays of collected results."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from prorl_zmq.brokers.journal.journal import Journal
from prorl_zmq.brokers.journal.records import Finished, StoredBlock
from prorl_zmq.brokers.rollout.job_table import JobTable
from prorl_zmq.brokers.rollout.jobs import FIXED_BYTES, Jobs
from prorl_zmq.brokers.rollout.kept_blocks import KeptBlocks
from prorl_zmq.brokers.rollout.quota import Quota
from prorl_zmq.brokers.rollout.result_store import ResultStore
from prorl_zmq.brokers.rollout.sized_cache import SizedCache
from prorl_zmq.brokers.rollout.transition_log import TransitionLog
from prorl_zmq.brokers.rollout.write_ahead import WriteAhead
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.jobs import BlockHandle, Job, Outcome, Result

JOB = Job(task="math", instance={"n": 1}, job_id="a")
PACKED = codec.encode(JOB)
HANDLE = BlockHandle(node="n", block_id="b", checksum=0, endpoint="tcp://127.0.0.1:5")
LIMIT_BYTES = 1000
BLOCK = bytes(LIMIT_BYTES)


def made() -> tuple[Jobs, Finished]:
    """A session with one result, whose block its node keeps."""
    table, results, history = JobTable(10.0, 10, 1.0), ResultStore(), TransitionLog()
    quota = Quota(2, LIMIT_BYTES, 1.0)
    writes = WriteAhead(Journal(), table, results, history, lambda _: None)
    jobs = Jobs(table, results, history, quota, writes, KeptBlocks(10.0), SizedCache(2**20))
    result = Result(job_id="a", task="math", outcome=Outcome.COMPLETED, tokens=1, kept=HANDLE)
    finished = Finished("s", result, None, sequence=1, packed=PACKED)
    results.put(finished)
    quota.recovered(finished)
    jobs.blocks.add("a", HANDLE)
    return jobs, finished


def test_a_block_that_came_counts_until_it_is_collected() -> None:
    jobs, finished = made()
    jobs.take_block(finished, BLOCK + b"more")
    jobs.writes.settle(0.0)
    assert jobs.quota.room("s") == 0  # it holds too many bytes
    (taken,) = jobs.results.take("s", "client", 10, 0.0)
    assert (taken.block, taken.result) == (BLOCK + b"more", replace(finished.result, kept=None))
    jobs.acknowledge("s", ["a"])
    assert jobs.quota.room("s") == 2


def test_a_job_that_runs_again_takes_the_place_of_its_result() -> None:
    jobs, finished = made()
    jobs.run_again(finished, 0.0)
    assert jobs.table.unfinished("s") == 1
    assert len(jobs.results) == 0
    assert jobs.blocks.job_of("n", "b") is None
    assert jobs.quota.room("s") == 1
    jobs.writes.settle(0.0, everything=True)


def collected(jobs: Jobs, job_id: str, block: object = None, **more: Any) -> list[str]:
    """Have a result collected; return the jobs whose results are evicted."""
    result = Result(job_id=job_id, task="math", outcome=Outcome.COMPLETED, **more)
    finished = Finished("s", result, block, packed=PACKED)
    jobs.results.put(finished)
    jobs.quota.recovered(finished)
    return [one.result.job_id for one in jobs.acknowledge("s", [job_id])]


def test_collected_results_stay_within_their_limit_in_bytes_notes_included() -> None:
    jobs, _ = made()
    jobs.recent = SizedCache(2 * FIXED_BYTES + 1100)
    block = bytes(1000)
    assert collected(jobs, "b", block) == []
    kept = jobs.recent.get("b")
    assert kept is not None
    assert (kept.block is block, kept.packed) == (True, b"")
    assert collected(jobs, "c") == []
    assert collected(jobs, "c", notes={"patch": "x" * 200}) == ["c", "b"]


def test_of_a_block_that_was_not_in_memory_only_the_result_stays() -> None:
    jobs, _ = made()
    collected(jobs, "stored", StoredBlock(2, 13), tokens=1)
    collected(jobs, "a", kept=HANDLE, tokens=1)
    for job_id in ("stored", "a"):
        one = jobs.recent.get(job_id)
        assert one is not None
        assert (one.block, one.result.kept, one.result.tokens) == (None, None, 1)  # its node forgets the block now
