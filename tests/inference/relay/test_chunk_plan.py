"""What is asked of whom, as sources fall silent, lack chunks and lie."""

from __future__ import annotations

import random

from prorl_zmq.inference.relay.chunk_plan import ChunkPlan, SourceOrder

KEYS = [("f", 0, chunk) for chunk in range(5)]


def test_a_plan_asks_in_order_within_its_credit() -> None:
    plan = ChunkPlan(KEYS, credit=2)
    assert plan.ask() == KEYS[:2]
    assert plan.ask() == []
    plan.came(KEYS[1])
    assert plan.ask() == [KEYS[2]]
    assert plan.is_asked(KEYS[0])
    assert not plan.is_asked(KEYS[1])
    plan.left()
    assert plan.ask() == [KEYS[0], KEYS[2]]


def test_each_chunk_comes_once_whatever_happens() -> None:
    order = random.Random(3)
    for _ in range(50):
        plan, came = ChunkPlan(KEYS, credit=3), []
        asked: list[tuple[str, int, int]] = []
        while not plan.is_complete:
            asked += plan.ask()
            assert len(asked) <= 3
            if order.random() < 0.3:
                plan.left()
                asked.clear()
            elif asked:
                key = asked.pop(order.randrange(len(asked)))
                assert plan.is_asked(key)
                plan.came(key)
                came.append(key)
        assert sorted(came) == KEYS


def test_a_silent_source_is_asked_again_after_the_others() -> None:
    order = SourceOrder(3)
    asked = []
    for _ in range(4):
        asked.append(order.source)
        order.leave()
    assert asked == [0, 1, 2, 0]


def test_a_source_without_the_chunks_is_asked_for_the_next_ones() -> None:
    order = SourceOrder(2)
    order.leave(lacks=True)
    order.leave()
    assert order.source == 1
    order.leave(lacks=True)
    assert order.source is None
    order.begin()
    assert order.source is not None


def test_a_liar_is_never_asked_again() -> None:
    order = SourceOrder(2)
    order.leave(lied=True)
    order.leave()
    order.begin()
    assert order.source == 1
    order.leave(lied=True)
    order.begin()
    assert order.source is None
