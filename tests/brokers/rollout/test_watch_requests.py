"""What watchers are told at the front door."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from prorl_zmq.brokers.journal.records import Finished
from prorl_zmq.security.rights import Sender
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.base import KeyRole, Refused
from prorl_zmq.wire.messages.batches import BatchOptions, Feed, OpenBatch
from prorl_zmq.wire.messages.front_door import Trace
from prorl_zmq.wire.messages.jobs import BlockHandle, Outcome, Phase, Result
from prorl_zmq.wire.messages.stages import StageReport
from prorl_zmq.wire.messages.watching import BatchView, Peek, Peeked, PeekTurns, ViewBatch, Watch, Watched

from .test_front_door import MATH, Door, collect, job

HANDLE = BlockHandle(node="n", block_id="b", checksum=0, endpoint="tcp://127.0.0.1:5")


def watch(door: Door, last: Watched | None = None, **more: Any) -> Watched:
    known = {"broker_id": last.broker_id, "since": last.until} if last is not None else {}
    reply = door.ask(Watch("watch", **{**known, **more}))
    assert isinstance(reply, Watched)
    return reply


def join(door: Door, slots: int = 4) -> None:
    report = StageReport(
        stage_id="init-1", role=Phase.INIT, node="node-1", slots=slots, endpoint="ipc://stage", tasks=(MATH,)
    )
    door.perform(door.table.stage_reported(report, door.now))


def test_a_watcher_is_told_of_each_job_once_as_it_is_now_and_then_only_what_is_new() -> None:
    door = Door()
    grouped = replace(job("a"), group_id="g")
    door.submit(grouped, job("b"))
    first = watch(door)
    assert [(row.job_id, row.task, row.group_id, row.place) for row in first.jobs] == [
        ("b", "math", "", "queued"),
        ("a", "math", "g", "queued"),
    ]
    assert (first.more, first.forgotten_until) == (False, 0)
    assert watch(door, first).jobs == ()
    join(door, slots=1)
    (row,) = watch(door, first).jobs
    assert (row.job_id, row.place, row.node, row.stage_id) == ("a", "held", "node-1", "init-1")
    assert [(trace.task, trace.group_id, trace.outcome) for trace in [door.ask(Trace("trace", "a"))]] == [
        ("math", "g", None)
    ]
    door.perform(door.table.cancel("b", 0.0))
    second = watch(door, first)
    assert [(row.job_id, row.place, row.outcome) for row in second.jobs] == [
        ("b", "ended", Outcome.CANCELLED),
        ("a", "held", None),
    ]
    assert watch(door, second, limit=1).jobs == ()


def test_what_ended_is_counted_and_reported_to_watchers_that_ask() -> None:
    door = Door()
    door.submit(job("a"), job("b"))
    assert watch(door, counts_ended=True).ended == ()
    door.perform(door.table.cancel("a", 0.0), at=1_000_005.0)
    door.perform(door.table.cancel("b", 0.0), at=1_000_015.0)
    assert watch(door).ended == ()
    first, second = watch(door, counts_ended=True).ended
    assert (first.at, second.at) == (1_000_000.0, 1_000_010.0)
    assert first.outcomes == second.outcomes == {"cancelled": 1}


def test_numbers_of_another_life_of_the_broker_count_as_nothing() -> None:
    door = Door()
    door.submit(job("a"))
    told = watch(door)
    assert [row.job_id for row in watch(door, told, broker_id="another", since=10**9, before=1).jobs] == ["a"]
    assert watch(door, told, since=10**9).jobs == ()


def peek(door: Door, job_id: str) -> Any:
    return door.ask(Peek("peek", job_id))


def test_what_a_job_brought_can_be_looked_at_before_and_after_it_is_collected() -> None:
    door = Door()
    door.end("a", block=b"block")
    for acknowledge in ((), ("a",)):
        door.ask(collect(*acknowledge))
        reply = peek(door, "a")
        assert isinstance(reply, Peeked)
        assert (reply.result.job_id, reply.result.reward, reply.has_block, door.blocks) == ("a", 1.0, True, [b"block"])
    assert len(door.results) == 0
    assert door.ask(collect()).results == ()  # looking has changed nothing


def test_of_a_block_that_its_node_keeps_a_watcher_is_told_where_it_is() -> None:
    door = Door()
    result = Result(job_id="a", task="math", outcome=Outcome.COMPLETED, tokens=1, kept=HANDLE)
    door.results.put(Finished("s", result, None))
    reply = peek(door, "a")
    assert (reply.result.kept, reply.has_block, door.blocks) == (HANDLE, False, [])


def test_only_what_has_ended_and_is_still_here_can_be_looked_at() -> None:
    door = Door()
    door.submit(job("a"))
    for job_id, message in (("a", "has not ended"), ("b", "never submitted here")):
        reply = peek(door, job_id)
        assert isinstance(reply, Refused)
        assert (reply.error.code, reply.error.fields["job_id"]) == ("unknown_job", job_id)
        assert message in reply.error.message


def test_a_batch_of_any_session_can_be_looked_at() -> None:
    door = Door()
    join(door)
    door.ask(OpenBatch("open", "s", "batch", BatchOptions(target_groups=1, group_size=2)))
    door.ask(Feed("feed", "s", "batch", 0), codec.encode(job("p")))
    door.batches.launch(0.0)
    door.perform([])
    door.now = 5.0
    view = door.ask(ViewBatch("view", "batch"))
    assert isinstance(view, BatchView)
    assert (view.status.session, view.status.in_flight, view.report.launched) == ("s", 2, 2)
    (group,) = view.groups
    assert [(cell.state, cell.seconds, cell.staleness) for cell in group.cells] == [("running", 5.0, 0)] * 2
    assert group.cells[0].job_id in door.table
    reply = door.ask(ViewBatch("view", "another"))
    assert (reply.error.code, reply.error.fields) == ("unknown_batch", {"batch_id": "another", "matches": 0})


@pytest.mark.parametrize(
    "request_",
    [Watch("r"), Peek("r", "a"), PeekTurns("r", "a"), ViewBatch("r", "b")],
    ids=lambda one: type(one).__name__,
)
def test_trainers_may_not_watch_and_operators_may(request_: Any) -> None:
    door = Door()
    for role, refused in ((KeyRole.TRAINER, True), (KeyRole.STAGE, True), (KeyRole.OPERATOR, False)):
        door.send(codec.encode(request_), sender=Sender(role, "name", "key"))
        reply = door.reply()
        assert (isinstance(reply, Refused) and reply.error.code == "not_allowed") == refused
    door.send(codec.encode(request_), b"more")
    assert door.refusal(door.reply())[0] == "malformed_message"
