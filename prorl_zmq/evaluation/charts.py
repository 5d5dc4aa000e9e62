"""The charts of a report, as SVG elements in the page's HTML that take its fonts and colours.

matplotlib draws in marker colours, which become CSS variables, so a chart is light or dark as the page is. Texts of
data files and models are drawn literally, never as mathtext.
"""

from __future__ import annotations

import io
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, MultipleLocator, NullLocator, PercentFormatter

from .display import short
from .passes import percentage
from .run_folder import is_solved

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.axes import Axes

    from .run_folder import Sample
    from .summary import Distribution, FailureRow, PassRow, Summary

WIDTH, HEIGHT = 6.4, 3.1
"""Inches; the page scales them."""
TEXT, GRID, MAIN, SECOND, BAD, FAINT = "#010203", "#010204", "#010205", "#010206", "#010207", "#010208"
VARIABLES = {
    TEXT: "currentColor",
    GRID: "var(--grid)",
    MAIN: "var(--main)",
    SECOND: "var(--second)",
    BAD: "var(--bad)",
    FAINT: "var(--faint)",
}
COLOURS = """\
:root {
  --page: #fbfbfa; --card: #ffffff; --text: #1c2430; --quiet: #5b6675; --line: #e1e4e8;
  --grid: #dfe3e8; --main: #2f6fb3; --second: #7fb0dd; --bad: #c4532d; --faint: #b9c0c9;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171c; --card: #1b2027; --text: #e4e8ee; --quiet: #9aa5b3; --line: #2d343e;
    --grid: #353d48; --main: #5fa3e6; --second: #37689a; --bad: #e58259; --faint: #5a6470;
  }
}"""
"""The values of the variables, in CSS, for the page and for a chart in its own file."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "text.color": TEXT,
    "axes.edgecolor": GRID,
    "axes.labelcolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "grid.color": GRID,
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}
REASONS, LABEL_LIMIT = 10, 48
BINS = 20
BAR_HEIGHT = 0.62


Charts = dict[str, str]


def charts_of(summary: Summary, samples: Sequence[Sample]) -> Charts:
    charts: Charts = {}
    _draw_passes(charts, summary.passes)
    _draw_rewards(charts, [row.reward for row in summary.problems if row.reward is not None])
    _draw_times(charts, summary.times)
    _draw_tokens(charts, samples, summary.threshold)
    _draw_failures(charts, summary.failures)
    return charts


def standing_alone(svg: str) -> str:
    style = f"{COLOURS}\nsvg {{ color: var(--text); font-family: sans-serif; }}"
    return svg.replace(">", f">\n<style>\n{style}\n</style>", 1)


def _draw_passes(charts: Charts, rows: Sequence[PassRow]) -> None:
    known = [(row.k, row.estimate) for row in rows if row.estimate is not None]
    if not known:
        return
    ks = [k for k, _ in known]
    values, lows, highs = ([getattr(one, name) for _, one in known] for name in ("value", "low", "high"))
    with _chart(charts, "passes") as axes:
        if len(ks) > 1:
            axes.set_xscale("log", base=2)
            axes.fill_between(ks, lows, highs, color=MAIN, alpha=0.18, linewidth=0)
        reach = [np.subtract(values, lows), np.subtract(highs, values)]
        axes.errorbar(ks, values, reach, color=MAIN, marker="o", linewidth=2, elinewidth=1.2, capsize=4)
        for k, value, high in zip(ks, values, highs, strict=True):
            axes.annotate(percentage(value), (k, high), (0, 5), textcoords="offset points", ha="center", fontsize=9)
        axes.xaxis.set_major_locator(FixedLocator(ks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda k, _: f"{k:g}"))
        axes.margins(x=0.1)
        axes.set(xlabel="k", ylabel="pass@k", ylim=(0, 1.12))
        axes.yaxis.set_major_locator(MultipleLocator(0.2))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.grid(axis="y")


def _draw_rewards(charts: Charts, rewards: Sequence[float]) -> None:
    if not rewards:
        return
    low, high = min(0.0, *rewards), max(1.0, *rewards)
    margin = 0.02 * (high - low)
    with _chart(charts, "rewards") as axes:
        axes.hist(rewards, np.linspace(low, high, BINS + 1).tolist(), color=MAIN, rwidth=0.88)
        axes.set(xlabel="mean reward of a problem", ylabel="problems", xlim=(low - margin, high + margin))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        axes.grid(axis="y")


def _draw_times(charts: Charts, rows: Sequence[Distribution]) -> None:
    if not rows:
        return
    labels = [("– " if row.within else "") + short(row.name.replace("_", " "), LABEL_LIMIT) for row in rows]
    with _bar_chart(charts, "times", labels) as axes:
        for y, row in zip(_bar_places(labels), rows, strict=True):
            colour = SECOND if row.within else FAINT if row.name.endswith("_queue") else MAIN
            axes.barh(y, row.p50, BAR_HEIGHT, color=colour)
            axes.plot([row.p50, row.p95], [y, y], color=TEXT, linewidth=1.2)
            axes.plot([row.p95, row.p95], [y - 0.18, y + 0.18], color=TEXT, linewidth=1.2)
            label = f"{row.p50:.3g} / {row.p95:.3g}"
            axes.annotate(label, (row.p95, y), (6, 0), textcoords="offset points", va="center", fontsize=9)
        axes.set(xlabel="seconds per rollout: bar p50, line to p95", xlim=(0, max(row.p95 for row in rows) * 1.22 or 1))


def _draw_tokens(charts: Charts, samples: Sequence[Sample], threshold: float) -> None:
    """Draw the tokens that the policy generated, in rollouts that solved their problem and in others."""
    solved: list[float] = []
    others: list[float] = []
    for sample in samples:
        tokens = sample.result.metrics.get("generated_tokens")
        if tokens is not None:
            (solved if is_solved(sample.result, threshold) else others).append(tokens)
    if not solved and not others:
        return
    most = max(*solved, *others, 1.0)
    bins = np.linspace(0, most * 1.0001, min(BINS, int(most)) + 1).tolist()
    with _chart(charts, "tokens") as axes:
        axes.hist([solved, others], bins, stacked=True, color=[MAIN, FAINT], rwidth=0.9, label=["solved", "not solved"])
        axes.set(xlabel="tokens generated in a rollout", ylabel="rollouts")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 1.16), ncols=2)
        axes.grid(axis="y")


def _draw_failures(charts: Charts, rows: Sequence[FailureRow]) -> None:
    if not rows:
        return
    bars = [
        (short(row.reason, LABEL_LIMIT), row.count, row.outcome == "infrastructure_error") for row in rows[:REASONS]
    ]
    if len(rows) > REASONS:
        bars.append((f"{len(rows) - REASONS} other reasons", sum(row.count for row in rows[REASONS:]), False))
    labels, counts, are_errors = zip(*bars, strict=True)
    with _bar_chart(charts, "failures", labels) as axes:
        colours = [BAD if is_error else MAIN for is_error in are_errors]
        axes.bar_label(
            axes.barh(_bar_places(labels), counts, BAR_HEIGHT, color=colours), fmt="%d", padding=5, fontsize=9
        )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axes.set(xlabel="rollouts", xlim=(0, max(counts) * 1.12))


@contextmanager
def _chart(charts: Charts, name: str, height: float = HEIGHT) -> Iterator[Axes]:
    """Add the chart that the block draws."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure.add_subplot()
        charts[name] = _svg(figure)


@contextmanager
def _bar_chart(charts: Charts, name: str, labels: Sequence[str]) -> Iterator[Axes]:
    """Add a chart whose horizontal bars the block draws, at `_bar_places`."""
    with _chart(charts, name, max(1.5, 0.34 * len(labels) + 0.8)) as axes:
        axes.set_yticks(_bar_places(labels), labels)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        yield axes


def _bar_places(labels: Sequence[str]) -> list[int]:
    return list(range(len(labels)))[::-1]


def _svg(figure: Figure) -> str:
    """Return a figure as an SVG element in the page's colours, without XML head, metadata or fixed size."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", svg, count=1)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"([^>]*?)width="[^"]*"', r"<svg \1\2", svg, count=1)
    svg = re.sub(r"font: ([0-9.]+px) [^;\"]*", r"font-size: \1", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg
