"""What a batch says that it took."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.brokers.batches.batch_stats import BatchStats, DiscardReason
from prorl_zmq.brokers.batches.rollout_group import Rollout
from prorl_zmq.wire.messages.base import GIVEN_UP_LIMIT
from prorl_zmq.wire.messages.batches import Distribution


def rollouts(rewards: list[float]) -> list[Rollout]:
    return [Rollout(f"j{n}", reward, 10 * n, 0, float(n)) for n, reward in enumerate(rewards)]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_spreads_are_those_of_the_numbers(rewards: list[float]) -> None:
    stats = BatchStats()
    stats.kept.add(rollouts(rewards), 0)
    distribution = stats.report().kept.reward
    ordered = sorted(rewards)
    assert distribution.count == len(rewards)
    assert (distribution.least, distribution.most) == (ordered[0], ordered[-1])
    assert abs(distribution.mean - sum(rewards) / len(rewards)) <= 1e-6 * max(1.0, abs(ordered[0]), abs(ordered[-1]))
    for found, share in ((distribution.p50, 0.5), (distribution.p90, 0.9)):
        exact = ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
        assert abs(found - exact) <= 0.051 * abs(exact) + 1e-9


def test_of_nothing_everything_is_zero() -> None:
    assert BatchStats().report().dropped.tokens == Distribution()


def test_it_outlives_its_process() -> None:
    stats = BatchStats()
    stats.kept.add(rollouts([0.0, 1.0]), 3)
    stats.drop(rollouts([1.0, 1.0]), 1)
    stats.waste(DiscardReason.STALE, [3.0, 4.0])
    stats.give_up("prompt", {"timeout": 2})
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=BatchStats)
    assert again.report() == stats.report()
    assert again.report().wasted_s == {"stale": 7.0}
    assert (again.report().kept.staleness.mean, again.report().dropped.staleness.most) == (3.0, 1.0)


def test_only_the_last_groups_that_were_given_up_are_named() -> None:
    stats = BatchStats()
    for number in range(GIVEN_UP_LIMIT + 5):
        stats.give_up(f"p{number}", {})
    report = stats.report()
    assert report.given_up_groups == GIVEN_UP_LIMIT + 5
    assert [group.prompt_id for group in report.given_up][:1] == ["p5"]
