"""Blocks that cannot be read: now, which costs nothing, or never again, which costs the scores."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from prorl_zmq.brokers.journal.journal import Journal
from prorl_zmq.brokers.journal.records import Finished, StoredBlock
from prorl_zmq.brokers.journal.segment_store import BlockLost
from prorl_zmq.brokers.rollout.batch_runner import BatchRunner
from prorl_zmq.brokers.rollout.event_blocks import checked_block, stored_end, token_ids
from prorl_zmq.brokers.rollout.jobs import Jobs
from prorl_zmq.brokers.rollout.kept_blocks import KeptBlocks
from prorl_zmq.brokers.rollout.quota import Quota
from prorl_zmq.brokers.rollout.result_store import ResultStore
from prorl_zmq.brokers.rollout.sized_cache import SizedCache
from prorl_zmq.brokers.rollout.transition_log import TransitionLog
from prorl_zmq.brokers.rollout.write_ahead import WriteAhead
from prorl_zmq.data.records import records_bytes
from prorl_zmq.data.trajectory import records_at
from prorl_zmq.errors import JournalFailed, MalformedMessage
from prorl_zmq.wire.messages.jobs import ArrayForm, Outcome, Phase, RecordForm, Result
from prorl_zmq.wire.messages.stages import PhaseDone

from .test_job_counts import bring_to, made

if TYPE_CHECKING:
    from prorl_zmq.brokers.rollout.job_record import JobRecord

SCORES = RecordForm(
    "teacher",
    1,
    (
        ArrayForm("teacher_logprobs", "float32", (1,)),
        ArrayForm("teacher_top_ids", "int32", (1, 0)),
        ArrayForm("teacher_top_logprobs", "float32", (1, 0)),
    ),
)
SCORES_BLOCK = np.array([0, 1], "<i4").tobytes().ljust(128, b"\0")
"""Of the first token."""
EXPERTS = RecordForm("experts", 1, (ArrayForm("experts", "uint8", (2, 1, 1)),))
RAN = PhaseDone(
    stage_id="run", job_id="job-0", attempt=1, phase=Phase.RUN, tokens=3, turns=1, segments=(2,), records=(EXPERTS,)
)
SCORED = PhaseDone(stage_id="score", job_id="job-0", attempt=1, phase=Phase.SCORE, records=(SCORES,))


def in_score(monkeypatch: pytest.MonkeyPatch, error: Exception) -> tuple[Jobs, JobRecord]:
    """A job in SCORE whose block is in a journal that raises an error."""
    table, results, history = made(), ResultStore(), TransitionLog()
    bring_to(table, Phase.SCORE, 1)
    writes = WriteAhead(Journal(), table, results, history, lambda _: None)
    quota = Quota(100, 2**20, 1.0)
    jobs = Jobs(table, results, history, quota, writes, KeptBlocks(10.0), SizedCache(2**20))
    record = table.records["job-0"]
    record.block = StoredBlock(1, 5)

    def read(_: Any) -> Any:
        raise error

    monkeypatch.setattr(writes, "block", read)
    return jobs, record


def test_scoring_waits_for_a_trajectory_that_cannot_be_read_now(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, record = in_score(monkeypatch, JournalFailed("it cannot be read", path="/journal"))
    with pytest.raises(JournalFailed):
        token_ids(jobs, record.start_command())
    with pytest.raises(JournalFailed):  # so the end is not noted, and comes again
        stored_end(jobs, SCORED, bytes(records_bytes((SCORES,))))


def test_a_lost_trajectory_costs_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, record = in_score(monkeypatch, BlockLost("it is damaged"))
    assert token_ids(jobs, record.start_command()) == (b"",)
    end, block = stored_end(jobs, SCORED, bytes(records_bytes((SCORES,))))
    assert (end.records, end.records_dropped, block) == ((), {"teacher": "the trajectory is lost"}, None)


def test_scores_under_another_name_are_refused() -> None:
    assert checked_block(SCORED, [SCORES_BLOCK]) == SCORES_BLOCK
    for records in ((replace(SCORES, name="experts"),), (SCORES, SCORES)):
        frame = bytes(records_bytes(records))
        with pytest.raises(MalformedMessage, match="PhaseDone of job job-0: expected the record teacher, got"):
            checked_block(replace(SCORED, records=records), [frame])


def test_a_block_of_another_size_or_number_is_refused_with_both_numbers() -> None:
    with pytest.raises(MalformedMessage, match="PhaseDone of job job-0: expected 1 block frames, got 0"):
        checked_block(SCORED, [])
    with pytest.raises(MalformedMessage, match="the block has 12 bytes; its header announces 128"):
        checked_block(SCORED, [bytes(12)])


@pytest.mark.parametrize(
    ("changes", "runs", "said"),
    [
        ({}, [0, 2], ""),
        ({}, [2, 4], "the record experts has rows of tokens beyond 3, or in another order"),
        ({}, [0, 1], "the record experts has 2 rows of experts, not 1"),
        ({"records": (replace(EXPERTS, name="teacher"),)}, [0, 2], "the record teacher has the arrays experts"),
        ({"segments": (3,)}, [0, 2], r"segments cannot begin at \(3,\) in 3 tokens"),
        ({"segments": (2, 1)}, [0, 2], r"segments cannot begin at \(2, 1\) in 3 tokens"),
    ],
)
def test_a_trajectory_that_cannot_be_read_is_refused_with_its_jobs_id(
    changes: dict[str, Any], runs: list[int], said: str
) -> None:
    event = replace(RAN, **changes)
    at = records_at(event.tokens, event.turns, event.records)
    block = bytes(at) + np.array(runs, "<i4").tobytes().ljust(128, b"\0")
    if said:
        with pytest.raises(MalformedMessage, match=f"^PhaseDone of job job-0: {said}$"):
            checked_block(event, [block])
    else:
        assert checked_block(event, [block]) is block


def test_scores_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(MalformedMessage, match="PhaseDone of job job-0: the record teacher has 1 rows of teacher_log"):
        checked_block(SCORED, [bytes(128)])


def test_a_batch_learns_of_an_end_whose_trajectory_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """SCORE failed, so the trajectory that RUN gave is in the journal only."""
    jobs, _ = in_score(monkeypatch, JournalFailed("it cannot be read", path="/journal"))
    result = Result(job_id="job-0", task="t", outcome=Outcome.COMPLETED, reward=1.0, tokens=2)
    finished = Finished("s", result, StoredBlock(1, 5), in_batch=True)
    runner: Any = SimpleNamespace(_jobs=jobs)
    assert BatchRunner._oldest(runner, finished, 3) is None
