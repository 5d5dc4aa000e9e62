"""`MetricsCollector`: the sum of all reports of one run folder, in Prometheus' text form. No I/O, no clock.

Counters and histograms grow by reports, so an ended process subtracts nothing. Gauges are summed over living processes:
those of an ended one are dropped when its supervisor says so, or after `LEASE_S` without a report. Counters start at 0
with the collector. Unknown metrics are ignored.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from .catalog import METRICS
from .metric import LabelBound
from .report import LEASE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric as Family

    from .metric import Labels, Metric
    from .report import MetricsReport

PROCESSES_LIMIT = 10_000


@dataclass(slots=True)
class _Process:
    pid: int
    number: int = 0
    heard_at: float = 0.0
    gauges: dict[tuple[str, Labels], float] = field(default_factory=dict)


class MetricsCollector(Collector):
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._totals: defaultdict[str, dict[Labels, list[float]]] = defaultdict(dict)
        self._bounds = {name: LabelBound(len(metric.labels)) for name, metric in METRICS.items()}
        self._processes: dict[str, _Process] = {}

    def take(self, report: MetricsReport, now: float) -> None:
        process = self._processes.get(report.life)
        if process is None:
            if len(self._processes) >= PROCESSES_LIMIT:
                return
            process = self._processes[report.life] = _Process(report.pid)
        if report.number > process.number:
            process.number = report.number
            process.gauges = {}
        process.heard_at = now
        for name, labels, numbers in report.rows:
            metric = METRICS.get(name)
            if metric is None or not _fits(metric, labels, numbers):
                continue
            if metric.kind == "gauge":
                process.gauges[name, labels] = numbers[0]
            else:
                self._add(name, labels, numbers)

    def ended(self, pid: int) -> None:
        """Drop the gauges of a process."""
        for life in [life for life, process in self._processes.items() if process.pid == pid]:
            del self._processes[life]

    def text(self, now: float) -> bytes:
        for life in [life for life, process in self._processes.items() if process.heard_at + LEASE_S <= now]:
            del self._processes[life]
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Family]:
        gauges: defaultdict[str, defaultdict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        for process in self._processes.values():
            for (name, labels), value in process.gauges.items():
                gauges[name][labels] += value
        for name, metric in METRICS.items():
            match metric.kind:
                case "gauge":
                    gauge = GaugeMetricFamily(name, metric.help_text, labels=metric.labels)
                    for labels, value in gauges[name].items():
                        gauge.add_metric(labels, value)
                    yield gauge
                case "counter":
                    counter = CounterMetricFamily(name, metric.help_text, labels=metric.labels)
                    for labels, (total,) in self._totals[name].items():
                        counter.add_metric(labels, total)
                    yield counter
                case "histogram":
                    histogram = HistogramMetricFamily(name, metric.help_text, labels=metric.labels)
                    bounds = [*map(str, metric.buckets), "+Inf"]
                    for labels, (total, *counts) in self._totals[name].items():
                        histogram.add_metric(labels, list(zip(bounds, accumulate(counts), strict=True)), total)
                    yield histogram

    def _add(self, name: str, labels: Labels, numbers: list[float]) -> None:
        rows = self._totals[name]
        row = rows.get(labels)
        if row is None:
            row = rows.setdefault(self._bounds[name].bounded(labels), [0.0] * len(numbers))
        for place, number in enumerate(numbers):
            row[place] += number


def _fits(metric: Metric, labels: Labels, numbers: list[float]) -> bool:
    """Return whether a report's row fits a metric; the process may have another version of this package."""
    least = -math.inf if metric.kind == "gauge" else 0.0
    sound = all(math.isfinite(number) and number >= least for number in numbers)
    return len(labels) == len(metric.labels) and len(numbers) == metric.width and sound
