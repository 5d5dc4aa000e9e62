"""Delivery to the caller of a client: each result and group once, acknowledged only after the caller has it."""

from __future__ import annotations

from prorl_zmq.client.batch_progress import BatchProgress
from prorl_zmq.client.requests import CollectState
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.batches import BatchOptions, BatchReport, BatchStatus, GroupGiven
from prorl_zmq.wire.messages.front_door import Collected
from prorl_zmq.wire.messages.jobs import Outcome, Result


def result(job_id: str) -> Result:
    return Result(job_id=job_id, task="math", outcome=Outcome.COMPLETED, reward=1.0)


def poll(state: CollectState, *job_ids: str) -> tuple[str, ...]:
    """Have a client receive results; return what its request acknowledged."""
    request = state.request(10, 0.0)
    state.receive(request, [codec.encode(Collected(request.request_id, tuple(map(result, job_ids))))])
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
    status = BatchStatus(
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
    request = progress.group_request(0.0)
    reply = GroupGiven(request.request_id, batch=status, report=BatchReport(), group_id=group_id, rollouts=1)
    group = progress.receive(request, [codec.encode(reply), codec.encode(result("a"))])
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
