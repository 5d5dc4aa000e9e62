"""How many jobs ended when, from what brokers have counted since they were started."""

from __future__ import annotations

import pytest

from prorl_zmq.watching.ended_counts import INTERVAL_S, INTERVALS, EndedCounts
from prorl_zmq.wire.messages.front_door import ServiceStatus
from prorl_zmq.wire.messages.jobs import Outcome


def status(completed: int, uptime_s: float, failed: int = 0) -> ServiceStatus:
    return ServiceStatus("r", outcomes={Outcome.COMPLETED: completed, Outcome.FAILED: failed}, uptime_s=uptime_s)


def counted(counts: EndedCounts, at: float) -> list[dict[Outcome, int]]:
    return [one.outcomes for one in counts.told(at)]


def test_what_a_broker_had_counted_before_somebody_looked_is_not_of_now() -> None:
    counts = EndedCounts()
    counts.add("a", status(1000, 500.0), 100.0, 100.0)
    counts.add("a", status(1003, 501.0, failed=1), 101.0, 101.0)
    assert counted(counts, 102.0) == [{Outcome.COMPLETED: 3, Outcome.FAILED: 1}]
    assert counts.per_s(102.0) == pytest.approx(2.0)
    counts.begin()  # nobody looked for a while
    counts.add("a", status(9000, 900.0), 500.0, 500.0)
    assert counted(counts, 501.0) == [{Outcome.COMPLETED: 3, Outcome.FAILED: 1}, {}]


def test_brokers_are_added_up_and_one_that_was_restarted_counts_from_nothing() -> None:
    counts = EndedCounts()
    for name in ("a", "b"):
        counts.add(name, status(10, 50.0), 100.0, 100.0)
    counts.add("a", status(12, 51.0), 101.0, 101.0)
    counts.add("b", status(3, 0.5), 101.0, 101.0)
    assert counted(counts, 101.0) == [{Outcome.COMPLETED: 5}]


def test_intervals_are_of_ten_seconds_and_only_the_last_are_kept() -> None:
    counts = EndedCounts()
    for second in range(2 * int(INTERVAL_S) * INTERVALS):
        counts.add("a", status(2 * second, float(second)), float(second), float(second))
        assert len(counts.told(float(second))) <= INTERVALS
    told = counts.told(float(second))
    assert [sum(one.outcomes.values()) for one in told[:-1]] == [20] * (INTERVALS - 1)
    assert {one.seconds for one in told[:-1]} == {INTERVAL_S}
    assert counts.per_s(float(second)) == pytest.approx(2.0, rel=0.1)
    assert counts.told(float(second) + 601.0) == ()
    assert counts.per_s(float(second) + 601.0) == 0.0


def test_a_clock_that_is_set_counts_nothing_twice_and_stops_no_rate() -> None:
    counts = EndedCounts()
    for second in range(3):
        counts.add("a", status(1000 + second, 50.0 + second), 5000.0 + second, float(second))
    counts.add("a", status(1003, 53.0), 9000.0, 3.0)  # set forward by more than the broker's life
    assert counted(counts, 9000.0)[-1] == {Outcome.COMPLETED: 1}
    for second in range(4, 10):
        counts.add("a", status(1000 + second, 50.0 + second), 2000.0 + second, float(second))  # and back
    assert counts.per_s(2010.0) == pytest.approx(1.0)
