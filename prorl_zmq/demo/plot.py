"""The demo's reward curve as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def draw_rewards(rewards: list[float], path: Path) -> None:
    """Write the mean reward per step to a PNG file."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(1, len(rewards) + 1), rewards, marker="o", markersize=4)
    axes.set(xlabel="training step", ylabel="mean reward", ylim=(-0.02, 1.02), title="prorl demo: reward per step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
