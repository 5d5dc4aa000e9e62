"""How many jobs ended when, at all brokers together."""

from __future__ import annotations

import pytest

from prorl_zmq.watching.overview import EndedSums
from prorl_zmq.wire.messages.jobs import Outcome
from prorl_zmq.wire.messages.watching import EndedJobs


def intervals(**counts: int) -> tuple[EndedJobs, ...]:
    """Intervals by their start, as `t1000=3`."""
    return tuple(EndedJobs(float(name[1:]), 10.0, {Outcome.COMPLETED: count}) for name, count in counts.items())


def counted(sums: EndedSums, at: float) -> list[tuple[float, float, int]]:
    return [(one.at, one.seconds, sum(one.outcomes.values())) for one in sums.ended(at)]


def test_brokers_are_added_up_and_what_earlier_lives_reported_stays() -> None:
    sums = EndedSums()
    sums.take("a", "first", intervals(t1000=3), 1001.0)
    sums.take("a", "first", intervals(t1000=5, t1010=1), 1012.0)
    sums.take("b", "first", intervals(t1010=10), 1012.0)
    sums.take("a", "second", intervals(t1010=100), 1015.0)
    assert counted(sums, 1015.0) == [(1000.0, 10.0, 5), (1010.0, 10.0, 111)]


def test_what_is_older_than_ten_minutes_is_added_up_to_minutes_and_after_an_hour_it_is_gone() -> None:
    sums = EndedSums()
    sums.take("a", "first", intervals(t6000=1, t6010=2, t6060=4, t9000=8), 9010.0)
    assert counted(sums, 9010.0) == [(6000.0, 60.0, 3), (6060.0, 60.0, 4), (9000.0, 10.0, 8)]
    assert counted(sums, 9605.0) == [(6010.0 - 10.0, 60.0, 2), (6060.0, 60.0, 4), (9000.0, 10.0, 8)]
    assert counted(sums, 9670.0) == [(9000.0, 60.0, 8)]
    sums.take("a", "second", (), 99_000.0)
    assert counted(sums, 99_000.0) == []


def test_the_rate_is_of_the_last_half_minute_or_of_all_that_brokers_have_counted() -> None:
    sums = EndedSums()
    sums.take("a", "first", intervals(t980=1000, t1000=10, t1010=20, t1020=5), 1025.0)
    assert sums.per_s(1025.0, 500.0) == pytest.approx(35 / 25)
    assert sums.per_s(1025.0, 5.0) == pytest.approx(7.0)
    assert sums.per_s(1025.0, 0.5) == 0.0
    assert sums.per_s(1100.0, 500.0) == 0.0


def test_an_interval_in_the_future_is_not_shown() -> None:
    sums = EndedSums()
    sums.take("a", "first", intervals(t1000=1, t9000=1), 1005.0)
    assert counted(sums, 1005.0) == [(1000.0, 10.0, 1)]
