from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prorl_zmq.metrics.metric import (
    LABEL_LIMIT,
    OTHER,
    ROWS_LIMIT,
    VALUES_LIMIT,
    Counter,
    Gauge,
    Histogram,
    LabelBound,
)


def test_without_a_collector_nothing_is_counted() -> None:
    counter, gauge, histogram = Counter("a_total", ""), Gauge("b", ""), Histogram("c", "", buckets=(1.0,))
    counter.add()
    counter.total(3)
    gauge.set(1)
    histogram.observe(1)
    assert [*counter.rows(), *gauge.rows(), *histogram.rows()] == []


@pytest.mark.usefixtures("counting")
class TestCounting:
    def test_what_was_delivered_is_not_counted_twice(self) -> None:
        counter = Counter("a_total", "", ("task",))
        counter.add("math")
        counter.add("math", amount=2.5)
        counter.add("swe")
        assert list(counter.rows()) == [("a_total", ("math",), [3.5]), ("a_total", ("swe",), [1.0])]
        counter.delivered(("math",))
        counter.add("math")
        assert list(counter.rows()) == [("a_total", ("swe",), [1.0]), ("a_total", ("math",), [1.0])]

    def test_a_total_of_somebody_else_is_counted_up_to(self) -> None:
        counter = Counter("a_total", "")
        counter.total(0)
        assert list(counter.rows()) == [("a_total", (), [0.0])]
        counter.total(5)
        counter.delivered(())
        counter.total(7)
        counter.total(7)
        assert list(counter.rows()) == [("a_total", (), [2.0])]

    def test_a_gauge_that_is_not_set_again_is_gone(self) -> None:
        gauge = Gauge("a", "", ("backend",))
        gauge.set(1, "old")
        gauge.clear()
        gauge.set(2, "new")
        assert list(gauge.rows()) == [("a", ("new",), [2.0])]

    def test_backends_that_come_and_go_do_not_use_up_the_labels_of_a_gauge(self) -> None:
        gauge = Gauge("a", "", ("backend",))
        for number in range(2 * VALUES_LIMIT):
            gauge.clear()
            gauge.set(1, f"engine-{number}")
        assert list(gauge.rows()) == [("a", (f"engine-{2 * VALUES_LIMIT - 1}",), [1.0])]

    def test_an_observation_is_in_the_first_bucket_that_holds_it(self) -> None:
        histogram = Histogram("a", "", buckets=(0.0, 1.0, 2.0))
        for value in (0.0, 0.5, 1.0, 1.5, 2.0, 99.0):
            histogram.observe(value)
        assert list(histogram.rows()) == [("a", (), [104.0, 1.0, 2.0, 2.0, 1.0])]


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)), max_size=3 * ROWS_LIMIT))
def test_labels_are_bounded_whatever_comes(pairs: list[tuple[int, int]]) -> None:
    bound = LabelBound(2)
    rows = {bound.bounded((f"{one}" * LABEL_LIMIT, f"{other}")) for one, other in pairs}
    assert len(rows) <= ROWS_LIMIT + 1
    for values in zip(*rows, strict=True):
        assert len(set(values)) <= VALUES_LIMIT + 1
        assert max(map(len, values)) <= LABEL_LIMIT


def test_a_row_that_is_known_stays_itself_when_there_are_too_many() -> None:
    bound = LabelBound(1)
    assert bound.bounded(("math",)) == ("math",)
    for number in range(VALUES_LIMIT):
        bound.bounded((str(number),))
    assert bound.bounded(("one more",)) == (OTHER,)
    assert bound.bounded(("math",)) == ("math",)
