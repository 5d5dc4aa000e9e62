"""The names of all metrics, as `promtool check metrics` would have them, and what the documents say of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from prorl_zmq.metrics.catalog import METRICS

if TYPE_CHECKING:
    from prorl_zmq.metrics.metric import Metric

ROOT = Path(__file__).resolve().parents[2]
NO_UNITS = {"milliseconds", "ms", "minutes", "hours", "kilobytes", "megabytes", "kb", "mb", "percent"}
OF_PROMETHEUS = {"job", "instance", "le", "quantile", "pid"}
PANELS: list[dict[str, Any]] = json.loads((ROOT / "docs" / "grafana.json").read_text("utf-8"))["panels"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel.get("targets", ())]


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_names_and_units_are_as_prometheus_asks(metric: Metric) -> None:
    words = metric.name.split("_")
    assert re.fullmatch(r"prorl(_[a-z]+)+", metric.name)
    assert (words[-1] == "total") == (metric.kind == "counter")
    assert words[-1] not in {"count", "sum", "bucket"}
    assert not {"counter", "gauge", "histogram", "summary"} & set(words)
    assert not NO_UNITS & set(words)
    assert re.fullmatch(r"[A-Z1].*\.", metric.help_text)
    for label in metric.labels:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", label)
        assert label not in OF_PROMETHEUS
    assert len({*metric.labels}) == len(metric.labels) <= 3
    assert list(metric.buckets) == sorted({*metric.buckets})


def test_the_page_has_all_metrics() -> None:
    subprocess.run([sys.executable, ROOT / ".ci" / "generate_metrics.py", "--check"], check=True)
    page = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    assert [name for name in METRICS if f"| `{name}` |" not in page] == []


def exposed(metric: Metric) -> set[str]:
    """The names of a metric's samples."""
    if metric.kind == "histogram":
        return {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
    return {metric.name}


BY_SAMPLE = {name: metric for metric in METRICS.values() for name in exposed(metric)}


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=[f"{title}-{one['refId']}" for title, one in TARGETS])
def test_the_dashboard_asks_for_what_there_is(title: str, target: dict[str, str]) -> None:
    expression = target["expr"]
    names = re.findall(r"prorl_\w+", expression)
    assert names
    assert [name for name in names if name not in BY_SAMPLE] == []
    for name, selector in re.findall(r"(prorl_\w+)\{([^}]*)\}", expression):
        labels = set(re.findall(r"(\w+)(?:=|!)", selector))
        assert labels - {"instance"} <= {*BY_SAMPLE[name].labels}
    labels_of_all = set.intersection(*({*BY_SAMPLE[name].labels, "instance"} for name in names))
    grouped = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
    assert grouped - {"le"} <= labels_of_all
    assert set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", ""))) <= grouped
    for name in names:
        is_rate = f"rate({name}{{" in expression
        assert is_rate == (BY_SAMPLE[name].kind != "gauge"), "of counters the rate, of gauges the value"
        assert ("le" in grouped) == name.endswith("_bucket")


def test_the_dashboard_s_panels_have_places_and_numbers_of_their_own() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    cells = [
        (place["x"] + right, place["y"] + down)
        for place in (panel["gridPos"] for panel in PANELS)
        for right in range(place["w"])
        for down in range(place["h"])
    ]
    assert len({*cells}) == len(cells)
    assert max(x for x, _ in cells) < 24
