"""The picture of bench/dapo.py: busy slots over time, the use of their time, and the time to free cancelled slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from dapo_account import busy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dapo_collect import Collected
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

COLOURS = {"used": "#0072B2", "needed": "#56B4E9", "wasted": "#D55E00", "idle": "0.88"}
WORDS = {
    "used": "kept groups",
    "needed": "groups found all alike",
    "wasted": "run and not used",
    "idle": "idle slots",
}
BINS = 600


def draw(path: Path, ways: Mapping[str, Collected], shown: Sequence[str], cancels: Sequence[float]) -> None:
    """Draw it.

    Args:
        path: where to.
        ways: all ways of collecting, by their names.
        shown: those whose slots are drawn over time.
        cancels: seconds from a cancellation to a free slot; none: that part is left out.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(11, 2.0 * len(shown) + 3.4), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[2.0 * len(shown), 3.4])
    longest = 1.05 * max(ways[name].seconds for name in shown) * 3
    for axes, name in zip(upper.subplots(len(shown), sharex=True), shown, strict=True):
        way = ways[name]
        times, counts = busy(way.ran, way.started)
        edges = np.linspace(0.0, longest, BINS + 1)
        axes.stairs(_means(times, counts, edges), edges, fill=True, color=COLOURS["used"], alpha=0.75)
        for end in way.complete:
            axes.axvline(end - way.started, color="black", linewidth=1)
        axes.set_xlim(0, longest)
        axes.set_ylim(0, 1.05 * way.size.slots)
        axes.set_yticks([0, way.size.slots])
        axes.set_ylabel("busy slots")
        axes.set_title(name, loc="left", fontsize=10)
    axes.set_xlabel(f"seconds; lines: a batch of {way.size.groups} informative groups is complete")
    left, axes = lower.subplots(1, 2, width_ratios=[2, 1])
    _bars(left, ways)
    axes.set_visible(bool(cancels))
    if cancels:
        axes.plot(1e3 * np.sort(cancels), 100 * np.arange(1, len(cancels) + 1) / len(cancels), color=COLOURS["used"])
        axes.axhline(99, color="0.6", linewidth=1, linestyle=":")
        axes.set_xlim(left=0)
        axes.set_xlabel("ms from cancel to the slot's next job")
        axes.set_ylabel("% of cancelled slots")
    figure.savefig(path, dpi=120)


def _bars(axes: Axes, ways: Mapping[str, Collected]) -> None:
    """Draw where the slots' time went, for each group that was kept."""
    for place, way in enumerate(ways.values()):
        shares = {name: share.slot_s for name, share in way.account()._asdict().items()}
        shares["idle"] = way.size.slots * (way.complete[-1] - way.started) - sum(shares.values())
        left = 0.0
        for name, slot_s in shares.items():
            width = slot_s / sum(map(len, way.kept))
            axes.barh(place, width, 0.7, left=left, color=COLOURS[name], label=WORDS[name] if not place else None)
            left += width
    axes.set_yticks(range(len(ways)), list(ways))
    axes.invert_yaxis()
    axes.set_xlabel("slot-seconds for each group that was kept")
    axes.legend(loc="upper right", fontsize=8)


def _means(times: NDArray[np.float64], counts: NDArray[np.int64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Give the mean of a step function within each bin."""
    area = np.concatenate([[0.0], np.cumsum(counts[:-1] * np.diff(times))])
    means: NDArray[np.float64] = np.diff(np.interp(edges, times, area)) / np.diff(edges)
    return means
