"""Delivery to the caller of a client: each result and group once, acknowledged only after the caller has it."""

from __future__ import annotations

import msgspec
import pytest

from prorl_zmq.client.batch_progress import BatchProgress
from prorl_zmq.client.delivery import CollectState, Delivery
from prorl_zmq.data.trajectory import block_bytes
from prorl_zmq.errors import MalformedMessage
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.base import Done
from prorl_zmq.wire.messages.batches import BatchOptions, BatchReport, BatchStatus, GroupGiven, NextGroup
from prorl_zmq.wire.messages.front_door import Collect, Collected
from prorl_zmq.wire.messages.jobs import BlockHandle, Outcome, Result

COLLECT = Collect("r", "session", "client")
NEXT = NextGroup("r", "session", "batch", "client")
STATUS = BatchStatus(
    batch_id="b",
    session="s",
    state="open",
    target_groups=2,
    group_size=1,
    kept=1,
    under_way=0,
    in_flight=0,
    prompts=0,
)


def result(job_id: str, tokens: int = 0, *, kept: bool = False) -> Result:
    handle = BlockHandle(node="n", block_id=f"block-{job_id}", checksum=0, endpoint="tcp://127.0.0.1:5")
    return Result(
        job_id=job_id,
        task="math",
        outcome=Outcome.COMPLETED,
        reward=1.0,
        tokens=tokens,
        turns=min(tokens, 1),
        kept=handle if kept else None,
    )


def block(number: int, tokens: int = 8) -> bytes:
    return bytes([number]) * block_bytes(tokens, 1)


def collected(*frames: Result | bytes) -> Delivery:
    """What a client receives: results, and the blocks that are here."""
    results = tuple(frame for frame in frames if isinstance(frame, Result))
    blocks = [frame for frame in frames if isinstance(frame, bytes)]
    return Delivery(COLLECT, [codec.encode(Collected("r", results, remaining=3)), *blocks])


def given(*frames: Result | bytes, rollouts: int) -> Delivery:
    reply = GroupGiven("r", batch=STATUS, report=BatchReport(), group_id="g", prompt_id="p", rollouts=rollouts)
    packed = [frame if isinstance(frame, bytes) else codec.encode(frame) for frame in frames]
    return Delivery(NEXT, [codec.encode(reply), *packed])


def blocks_of(delivery: Delivery) -> dict[str, object]:
    return {trajectory.job_id: of_job for trajectory, of_job in delivery.trajectories()}


def poll(state: CollectState, *job_ids: str) -> tuple[str, ...]:
    """Have a client receive results; return what its request acknowledged."""
    request = state.request(10, 0.0)
    reply = Collected(request.request_id, tuple(map(result, job_ids)))
    state.receive(request, Delivery(request, [codec.encode(reply)]))
    return request.acknowledge


def test_a_result_is_acknowledged_only_after_its_caller_has_it() -> None:
    state = CollectState("s", "client")
    assert poll(state, "a", "b") == ()
    assert state.request(10, 0.0).acknowledge == ()
    assert [trajectory.job_id for trajectory in state.take(1)] == ["a"]
    assert poll(state) == ("a",)
    assert poll(state) == ()
    assert [trajectory.job_id for trajectory in state.take(1)] == ["b"]
    assert poll(state) == ("b",)


def test_a_second_delivery_is_acknowledged_again_and_not_handed_over() -> None:
    state = CollectState("s", "client")
    poll(state, "a")
    state.take(1)
    assert poll(state, "a") == ("a",)  # the acknowledgement was lost
    assert state.waiting == 0
    assert poll(state) == ("a",)


def give(progress: BatchProgress, group_id: str) -> tuple[str | None, tuple[str, ...]]:
    """Have a client receive a group; return what it hands over, and what its request acknowledged."""
    request = progress.group_request(0.0)
    reply = GroupGiven(request.request_id, batch=STATUS, report=BatchReport(), group_id=group_id, rollouts=1)
    group = progress.receive(request, Delivery(request, [codec.encode(reply), codec.encode(result("a"))]))
    return (group.group_id if group is not None else None), request.acknowledge


def test_a_group_is_handed_over_once_and_acknowledged_with_the_next_request() -> None:
    progress = BatchProgress("s", "b", BatchOptions(target_groups=2, group_size=1), 4096)
    assert give(progress, "g") == ("g", ())
    assert give(progress, "g") == (None, ("g",))  # the acknowledgement was lost
    assert give(progress, "h") == ("h", ("g",))


def test_a_batch_that_nobody_has_fed_is_asked_for_its_state_without_a_wait() -> None:
    """So that the caller learns at once that it must feed the batch; groups that were carried over are waited for."""
    options = BatchOptions(target_groups=2, group_size=1)
    unfed, carried, fed = (BatchProgress("s", name, options, 4096) for name in ("unfed", "carried", "fed"))
    give(carried, "g")
    fed.feed([], last=False)
    assert [progress.group_request(9.0).wait_s for progress in (unfed, carried, fed)] == [0.0, 9.0, 9.0]


def test_blocks_come_into_their_places() -> None:
    frames = (result("a", 8), block(1), result("b", 8, kept=True), result("c"), result("d", 8), block(4))
    delivery = collected(*frames)
    assert {job_id: handle.block_id for job_id, handle in delivery.handles.items()} == {"b": "block-b"}
    assert delivery.fill({"b": block(2)}) == []
    assert list(blocks_of(delivery).items()) == [("a", block(1)), ("b", block(2)), ("c", b""), ("d", block(4))]


@pytest.mark.parametrize("blocks", [{}, {"b": b"too short"}])
def test_a_result_without_its_block_is_left_out_and_remains(blocks: dict[str, bytes]) -> None:
    delivery = collected(result("a", 8), block(1), result("b", 8, kept=True))
    assert delivery.fill(blocks) == ["b"]
    assert blocks_of(delivery) == {"a": block(1)}
    assert delivery.reply.remaining == 4


def test_a_group_is_whole_or_not_given() -> None:
    frames = (result("a", 8), block(1), result("b", 8, kept=True))
    whole, lacking = (given(*frames, rollouts=2) for _ in range(2))
    assert list(whole.handles) == ["b"]
    assert whole.fill({"b": block(2)}) == []
    assert list(blocks_of(whole).items()) == [("a", block(1)), ("b", block(2))]
    assert lacking.fill({}) == ["b"]
    assert (lacking.reply.group_id, lacking.trajectories()) == ("", [])


def test_a_trajectory_that_cannot_be_read_does_not_keep_others_away() -> None:
    wrong = msgspec.structs.replace(result("a", 8), segments=(9,))
    state = CollectState("session", "client")
    state.receive(COLLECT, collected(wrong, block(1), result("b", 8), block(2)))
    unread, read = state.take(2)
    assert (unread.job_id, unread.outcome, unread.reward) == ("a", "infrastructure_error", None)
    assert unread.error is not None
    assert unread.error.message.endswith("cannot be read: segments cannot begin at (9,) in 8 tokens")
    assert (len(unread.token_ids), read.job_id, len(read.token_ids)) == (0, "b", 8)
    assert state.request(2, 0.0).acknowledge == ("a", "b")


def test_a_group_with_a_trajectory_that_cannot_be_read_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    progress = BatchProgress("s", "b", BatchOptions(target_groups=2, group_size=2), 4096)
    wrong = msgspec.structs.replace(result("b", 8), segments=(9,))
    unread = given(result("a", 8), block(1), wrong, block(2), rollouts=2)
    assert progress.receive(progress.group_request(0.0), unread) is None
    assert "group g is lost: the trajectories of its jobs ['b'] cannot be read" in caplog.text
    assert give(progress, "h") == ("h", ("g",)), "it is acknowledged, since it would never become readable"


def test_a_reply_that_lacks_a_frame_or_is_another_ones_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="the trajectory of job a is missing from the reply"):
        collected(result("a", 8))
    with pytest.raises(MalformedMessage, match="a rollout of the group is missing from the reply"):
        given(result("a"), rollouts=2)
    with pytest.raises(MalformedMessage, match="the service answered a Collect with Done"):
        Delivery(COLLECT, [codec.encode(Done("r"))])
