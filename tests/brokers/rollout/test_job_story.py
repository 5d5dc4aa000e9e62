"""A job's history as a line of a table."""

from __future__ import annotations

import pytest

from prorl_zmq.brokers.rollout.job_story import job_row
from prorl_zmq.errors import ErrorInfo
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.front_door import FrontDoorReply
from prorl_zmq.wire.messages.jobs import Outcome, Phase
from prorl_zmq.wire.messages.watching import JobRow, Watched

from .test_transition_log import BEGAN, LOST, History, pass_all


def row_of(history: History) -> JobRow:
    row = job_row("a", history.packed("a"), "math", "g")
    assert row is not None
    reply = Watched("r", broker_id="b", until=1, first=1, more=False, jobs=(row,))
    assert codec.decode(codec.encode(reply), FrontDoorReply) == reply
    return row


def test_the_row_of_a_job_follows_it() -> None:
    history = History()
    history.queue(Phase.INIT, 0.0)
    row = row_of(history)
    assert (row.phase, row.place, row.attempt) == (Phase.INIT, "queued", 1)
    assert (row.accepted_at, row.entered_at) == (BEGAN, BEGAN)
    history.start(Phase.INIT, 1.0)
    history.queue(Phase.RUN, 2.0)
    history.start(Phase.RUN, 3.0)
    history.assigned("a", 1, "engine-0", BEGAN + 4.0)
    row = row_of(history)
    assert (row.phase, row.place, row.entered_at) == (Phase.RUN, "held", BEGAN + 3.0)
    assert (row.task, row.group_id, row.node, row.stage_id, row.backend) == ("math", "g", "node-1", "run-1", "engine-0")
    history.queue(Phase.INIT, 5.0, attempt=2, error=LOST)
    row = row_of(history)
    assert (row.phase, row.place, row.attempt, row.code, row.outcome) == (Phase.INIT, "queued", 2, "lease_lost", None)


def test_the_row_of_an_ended_job_says_what_it_brought_and_whose_it_was() -> None:
    history = History()
    pass_all(history, reward=0.5, group_id="own", tokens=7, turns=2, backend="engine-1")
    row = row_of(history)
    assert (row.place, row.phase, row.ended_at, row.outcome) == ("ended", Phase.EVAL, BEGAN + 6.0, Outcome.COMPLETED)
    assert (row.group_id, row.reward, row.tokens, row.turns, row.backend) == ("own", 0.5, 7, 2, "engine-1")
    failed = History()
    failed.queue(Phase.INIT, 0.0)
    failed.end(1.0, Outcome.FAILED, error=ErrorInfo("handler_failed", "no"))
    assert (row_of(failed).code, row_of(failed).node) == ("handler_failed", "")


@pytest.mark.parametrize("packed", [b"", b"\xc1\xff", codec.pack([[1], 2]), codec.pack([0, "x"]), codec.pack("text")])
def test_a_history_in_which_nothing_can_be_read_has_no_row(packed: bytes) -> None:
    assert job_row("a", packed, "math", "") is None


def test_of_a_damaged_history_the_row_says_what_can_be_read() -> None:
    history = History()
    history.queue(Phase.INIT, 0.0)
    history.start(Phase.INIT, 1.0)
    row = job_row("a", codec.pack([0, BEGAN, 2**40, "init"]) + codec.pack([[], 1]) + history.packed("a"), "math", "")
    assert row is not None
    assert (row.place, row.accepted_at) == ("held", BEGAN)
