"""The charts of a report, as SVG that stands in the page's own HTML and takes its fonts and colours.

matplotlib draws in marker colours, which are replaced by CSS variables of the page: so a chart is light or dark as the
page is. Texts of data files and models are drawn as they are, never as mathtext.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, MultipleLocator, NullLocator

from ..system.logs import one_line
from .run_folder import is_solved

if TYPE_CHECKING:
    from collections.abc import Sequence

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
"""What becomes of the marker colours."""
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
"""What the variables are, in CSS: of the page, and of a chart that is a file of its own."""
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
"""How many reasons have bars of their own, and how long their names may be."""
BINS = 20


def charts_of(summary: Summary, samples: Sequence[Sample]) -> dict[str, str]:
    drawn = {
        "passes": _passes(summary.passes),
        "rewards": _rewards(summary),
        "times": _times(summary.times),
        "tokens": _tokens(samples, summary.threshold),
        "failures": _failures(summary.failures),
    }
    return {name: svg for name, svg in drawn.items() if svg}


def standing_alone(svg: str) -> str:
    style = f"{COLOURS}\nsvg {{ color: var(--text); font-family: sans-serif; }}"
    return svg.replace(">", f">\n<style>\n{style}\n</style>", 1)


def _passes(rows: Sequence[PassRow]) -> str:
    known = [(row.k, row.estimate) for row in rows if row.estimate is not None]
    if not known:
        return ""
    ks = [k for k, _ in known]
    values, lows, highs = ([getattr(one, name) for _, one in known] for name in ("value", "low", "high"))
    with mpl.rc_context({**STYLE, "svg.hashsalt": "passes"}):
        figure, axes = _axes()
        if len(ks) > 1:
            axes.set_xscale("log", base=2)
            axes.fill_between(ks, lows, highs, color=MAIN, alpha=0.18, linewidth=0)
        reach = [np.subtract(values, lows), np.subtract(highs, values)]
        axes.errorbar(ks, values, reach, color=MAIN, marker="o", linewidth=2, elinewidth=1.2, capsize=4)
        for k, value, high in zip(ks, values, highs, strict=True):
            axes.annotate(f"{value:.1%}", (k, high), (0, 5), textcoords="offset points", ha="center", fontsize=9)
        axes.xaxis.set_major_locator(FixedLocator(ks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda k, _: f"{k:g}"))
        axes.margins(x=0.1)
        axes.set_xlabel("k")
        axes.set_ylabel("pass@k")
        axes.set_ylim(0, 1.12)
        axes.yaxis.set_major_locator(MultipleLocator(0.2))
        _percent(axes)
        axes.grid(axis="y")
        return _svg(figure)


def _rewards(summary: Summary) -> str:
    rewards = [row.reward for row in summary.problems if row.reward is not None]
    if not rewards:
        return ""
    low, high = min(0.0, *rewards), max(1.0, *rewards)
    with mpl.rc_context({**STYLE, "svg.hashsalt": "rewards"}):
        figure, axes = _axes()
        axes.hist(rewards, np.linspace(low, high, BINS + 1).tolist(), color=MAIN, rwidth=0.88)
        axes.set_xlim(low - 0.02 * (high - low), high + 0.02 * (high - low))
        axes.set_xlabel("mean reward of a problem")
        axes.set_ylabel("problems")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        axes.grid(axis="y")
        return _svg(figure)


def _times(rows: Sequence[Distribution]) -> str:
    if not rows:
        return ""
    with mpl.rc_context({**STYLE, "svg.hashsalt": "times"}):
        figure, axes = _axes(rows=len(rows))
        places = np.arange(len(rows))[::-1]
        for place, row in zip(places, rows, strict=True):
            colour = SECOND if row.within else FAINT if row.name.endswith("_queue") else MAIN
            axes.barh(place, row.p50, 0.62, color=colour)
            axes.plot([row.p50, row.p95], [place, place], color=TEXT, linewidth=1.2)
            axes.plot([row.p95, row.p95], [place - 0.18, place + 0.18], color=TEXT, linewidth=1.2)
            label = f"{row.p50:.3g} / {row.p95:.3g}"
            axes.annotate(label, (row.p95, place), (6, 0), textcoords="offset points", va="center", fontsize=9)
        axes.set_yticks(places, [("– " if row.within else "") + _label(row.name.replace("_", " ")) for row in rows])
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, max(row.p95 for row in rows) * 1.22 or 1.0)
        axes.set_xlabel("seconds per rollout: bar p50, line to p95")
        axes.grid(axis="x")
        return _svg(figure)


def _tokens(samples: Sequence[Sample], threshold: float) -> str:
    """Draw how many tokens the policy generated, in rollouts that solved their problem and in others."""
    solved: list[float] = []
    others: list[float] = []
    for sample in samples:
        tokens = sample.result.metrics.get("generated_tokens")
        if tokens is not None:
            (solved if is_solved(sample.result, threshold) else others).append(tokens)
    if not solved and not others:
        return ""
    with mpl.rc_context({**STYLE, "svg.hashsalt": "tokens"}):
        figure, axes = _axes()
        most = max(*solved, *others, 1.0)
        bins = np.linspace(0, most * 1.0001, min(BINS, int(most)) + 1).tolist()
        axes.hist([solved, others], bins, stacked=True, color=[MAIN, FAINT], rwidth=0.9, label=["solved", "not solved"])
        axes.set_xlabel("tokens generated in a rollout")
        axes.set_ylabel("rollouts")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 1.16), ncols=2)
        axes.grid(axis="y")
        return _svg(figure)


def _failures(rows: Sequence[FailureRow]) -> str:
    if not rows:
        return ""
    bars = [(_label(row.reason), row.count, row.outcome == "infrastructure_error") for row in rows[:REASONS]]
    if len(rows) > REASONS:
        bars.append((f"{len(rows) - REASONS} other reasons", sum(row.count for row in rows[REASONS:]), False))
    with mpl.rc_context({**STYLE, "svg.hashsalt": "failures"}):
        figure, axes = _axes(rows=len(bars))
        places = np.arange(len(bars))[::-1]
        axes.barh(places, [bar[1] for bar in bars], 0.62, color=[BAD if bar[2] else MAIN for bar in bars])
        for place, (_, count, _) in zip(places, bars, strict=True):
            axes.annotate(str(count), (count, place), (5, 0), textcoords="offset points", va="center", fontsize=9)
        axes.set_yticks(places, [bar[0] for bar in bars])
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, max(bar[1] for bar in bars) * 1.12)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axes.set_xlabel("rollouts")
        axes.grid(axis="x")
        return _svg(figure)


def _axes(rows: int = 0) -> tuple[Figure, Axes]:
    height = max(1.5, 0.34 * rows + 0.8) if rows else HEIGHT
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _percent(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))


def _label(text: str) -> str:
    clean = one_line(text)
    return clean if len(clean) <= LABEL_LIMIT else clean[: LABEL_LIMIT - 1] + "…"


def _svg(figure: Figure) -> str:
    """Return a figure as an SVG element: no XML head, no metadata, no fixed size, the page's colours."""
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
