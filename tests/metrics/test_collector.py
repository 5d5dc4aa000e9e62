from __future__ import annotations

import math
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from prorl_zmq.metrics.catalog import METRICS, QUEUE_SECONDS
from prorl_zmq.metrics.collector import MetricsCollector
from prorl_zmq.metrics.metric import LABEL_LIMIT, VALUES_LIMIT
from prorl_zmq.metrics.report import LEASE_S, MetricsReport

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(collector: MetricsCollector, now: float = 0.0) -> Samples:
    families = text_string_to_metric_families(collector.text(now).decode())
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def sample(collector: MetricsCollector, name: str, now: float = 0.0, **labels: str) -> float | None:
    return samples(collector, now).get((name, frozenset(labels.items())))


def report(
    number: int, *rows: tuple[str, tuple[str, ...], list[float]], life: str = "one", pid: int = 1
) -> MetricsReport:
    return MetricsReport(life, pid, number, list(rows))


def test_every_metric_is_there_before_anything_is_counted() -> None:
    families = text_string_to_metric_families(MetricsCollector().text(0.0).decode())
    described = {family.name: (family.type, family.documentation) for family in families}
    assert described == {
        metric.name.removesuffix("_total"): (metric.kind, metric.help_text) for metric in METRICS.values()
    }


def test_counters_grow_over_the_lives_of_processes() -> None:
    collector = MetricsCollector()
    submitted = ("prorl_jobs_submitted_total", ("math",), [3.0])
    collector.take(report(1, submitted), 0.0)
    collector.take(report(2, submitted), 0.0)
    collector.ended(1)
    collector.take(report(1, submitted, life="next", pid=2), 0.0)
    assert sample(collector, "prorl_jobs_submitted_total", task="math") == 9.0


def test_gauges_are_summed_over_the_processes_that_live() -> None:
    collector = MetricsCollector()
    for pid in (1, 2):
        collector.take(report(1, ("prorl_slots", ("run",), [8.0]), life=str(pid), pid=pid), 0.0)
    assert sample(collector, "prorl_slots", role="run") == 16.0
    collector.ended(1)
    assert sample(collector, "prorl_slots", role="run") == 8.0
    assert sample(collector, "prorl_slots", LEASE_S - 0.1, role="run") == 8.0
    assert sample(collector, "prorl_slots", LEASE_S, role="run") is None


def test_a_gauge_that_a_process_no_longer_reports_is_gone() -> None:
    collector = MetricsCollector()
    collector.take(report(1, ("prorl_backend_jobs", ("old",), [1.0]), ("prorl_backend_jobs", ("new",), [1.0])), 0.0)
    collector.take(report(2, ("prorl_backend_jobs", ("new",), [2.0])), 0.0)
    assert sample(collector, "prorl_backend_jobs", backend="old") is None
    assert sample(collector, "prorl_backend_jobs", backend="new") == 2.0


def test_the_parts_of_one_report_hold_together() -> None:
    collector = MetricsCollector()
    for role in ("init", "run"):
        collector.take(report(7, ("prorl_slots", (role,), [4.0])), 0.0)
    assert [sample(collector, "prorl_slots", role=role) for role in ("init", "run")] == [4.0, 4.0]


def test_buckets_add_up() -> None:
    collector = MetricsCollector()
    counts = [1.0] * (len(QUEUE_SECONDS.buckets) + 1)
    collector.take(report(1, ("prorl_queue_seconds", ("run",), [12.5, *counts])), 0.0)
    assert sample(collector, "prorl_queue_seconds_bucket", phase="run", le="0.5") == 2.0
    assert sample(collector, "prorl_queue_seconds_bucket", phase="run", le="+Inf") == len(counts)
    assert sample(collector, "prorl_queue_seconds_count", phase="run") == len(counts)
    assert sample(collector, "prorl_queue_seconds_sum", phase="run") == 12.5


@pytest.mark.parametrize(
    "row",
    [
        ("prorl_of_another_version_total", (), [1.0]),
        ("prorl_jobs_submitted_total", (), [1.0]),
        ("prorl_jobs_submitted_total", ("math", "more"), [1.0]),
        ("prorl_jobs_submitted_total", ("math",), []),
        ("prorl_jobs_submitted_total", ("math",), [-1.0]),
        ("prorl_jobs_submitted_total", ("math",), [math.nan]),
        ("prorl_slots", ("run",), [math.inf]),
        ("prorl_queue_seconds", ("run",), [1.0, 1.0]),
    ],
)
def test_what_is_no_metric_of_ours_is_left_out_and_the_rest_counts(
    row: tuple[str, tuple[str, ...], list[float]],
) -> None:
    collector = MetricsCollector()
    collector.take(report(1, row, ("prorl_turns_total", ("math",), [1.0])), 0.0)
    assert samples(collector) == {("prorl_turns_total", frozenset({("task", "math")})): 1.0}


def test_labels_are_bounded_over_all_processes_and_escaped() -> None:
    collector = MetricsCollector()
    for number in range(3 * VALUES_LIMIT):
        name = f'"}} {number}\n' + "x" * LABEL_LIMIT
        collector.take(report(1, ("prorl_turns_total", (name,), [1.0]), life=str(number)), 0.0)
    found = samples(collector)
    assert len(found) == VALUES_LIMIT + 1
    assert sum(found.values()) == 3 * VALUES_LIMIT


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["math", "swe"]), st.integers(0, 99)), max_size=30))
def test_a_counter_is_the_sum_of_what_was_reported_whoever_died(reports: list[tuple[str, str, int]]) -> None:
    collector = MetricsCollector()
    expected: defaultdict[str, float] = defaultdict(float)
    before: Samples = {}
    for number, (life, task, amount) in enumerate(reports):
        collector.take(report(number, ("prorl_turns_total", (task,), [float(amount)]), life=life, pid=ord(life)), 0.0)
        expected[task] += amount
        if amount % 3 == 0:
            collector.ended(ord(life))
        now = samples(collector)
        assert all(now[key] >= value for key, value in before.items())
        before = now
    assert {dict(labels)["task"]: value for (_, labels), value in before.items()} == expected
