from __future__ import annotations

import pytest

from prorl_zmq.client.kept_reply import completed, handles_in
from prorl_zmq.client.requests import read_reply
from prorl_zmq.data.trajectory import block_bytes
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.batches import BatchReport, BatchStatus, GroupGiven, NextGroup
from prorl_zmq.wire.messages.front_door import Collect, Collected
from prorl_zmq.wire.messages.jobs import BlockHandle, Outcome, Result

COLLECT = Collect("r", "session", "client")
NEXT = NextGroup("r", "session", "batch", "client")
STATUS = BatchStatus(
    batch_id="batch",
    session="session",
    state="open",
    target_groups=1,
    group_size=2,
    **dict.fromkeys(("kept", "under_way", "in_flight", "prompts"), 0),
)


def result(name: str, *, kept: bool, tokens: int = 10) -> Result:
    handle = BlockHandle(node="n", block_id=f"block-{name}", checksum=0, endpoint="tcp://127.0.0.1:5") if kept else None
    return Result(job_id=name, task="t", outcome=Outcome.COMPLETED, tokens=tokens, turns=1, kept=handle)


def block(number: int, tokens: int = 10) -> bytes:
    return bytes([number]) * block_bytes(tokens, 1)


def collected(*results: Result, blocks: tuple[bytes, ...] = ()) -> list[bytes]:
    return [codec.encode(Collected("r", results=results, remaining=3)), *blocks]


def test_blocks_come_into_their_places() -> None:
    frames = collected(
        result("a", kept=False),
        result("b", kept=True),
        result("c", kept=False, tokens=0),
        result("d", kept=False),
        blocks=(block(1), block(4)),
    )
    assert {key: handle.block_id for key, handle in handles_in(COLLECT, frames).items()} == {"b": "block-b"}
    assert completed(frames, {"b": block(2)}) == ([frames[0], block(1), block(2), block(4)], [])


@pytest.mark.parametrize("blocks", [{}, {"b": b"too short"}])
def test_a_result_without_its_block_is_left_out_and_remains(blocks: dict[str, bytes]) -> None:
    frames = collected(result("a", kept=False), result("b", kept=True), blocks=(block(1),))
    whole, lacking = completed(frames, blocks)
    reply = read_reply(whole)
    assert [one.job_id for one in reply.results] == ["a"]
    assert reply.remaining == 4
    assert whole[1:] == [block(1)]
    assert lacking == ["b"]


def test_a_group_is_whole_or_not_given() -> None:
    given = GroupGiven("r", batch=STATUS, report=BatchReport(), group_id="g", prompt_id="p", rollouts=2)
    results = [codec.encode(result("a", kept=False)), codec.encode(result("b", kept=True))]
    frames = [codec.encode(given), results[0], block(1), results[1]]
    assert list(handles_in(NEXT, frames)) == ["b"]
    assert completed(frames, {"b": block(2)}) == ([frames[0], results[0], block(1), results[1], block(2)], [])
    ((header,), lacking) = completed(frames, {})
    assert lacking == ["b"]
    reply = read_reply([header])
    assert (reply.group_id, reply.rollouts) == ("", 0)


def test_replies_that_name_none_stay_as_they_are() -> None:
    assert handles_in(COLLECT, collected(result("a", kept=False), blocks=(block(1),))) == {}
