"""What the demo shows: a live table of stages, backends and groups with the reward's curve; plain lines in a pipe."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

import plotext
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..wire.messages.jobs import Phase

if TYPE_CHECKING:
    from pathlib import Path

    from ..client.blocking.client import RolloutClient
    from .grpo import StepStats

REFRESH_S = 0.25
PLOT_ROWS = 12


class Display:
    def __init__(self, steps: int, console: Console) -> None:
        self._steps = steps
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._rewards: list[float] = []
        self._drawn_at = 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line above the live part."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def collected(self, client: RolloutClient, groups_done: int, groups: int) -> None:
        """Draw the state of the service between two trajectories, now and then."""
        if self._live is None or time.monotonic() - self._drawn_at < REFRESH_S:
            return
        self._drawn_at = time.monotonic()
        self._live.update(self._picture(client, groups_done, groups), refresh=True)

    def stepped(self, step: int, stats: StepStats, seconds: float) -> None:
        self._rewards.append(stats.reward)
        if self._live is None:
            self.say(
                f"step {step + 1:2d}/{self._steps}: mean reward {stats.reward:.3f}, {stats.completed}/{stats.rollouts} "
                f"rollouts completed, {stats.informative_groups}/{stats.groups} groups informative, {seconds:.1f} s"
            )

    def _picture(self, client: RolloutClient, groups_done: int, groups: int) -> Group:
        status = client.status()
        table = Table(title=f"step {len(self._rewards) + 1} of {self._steps}", title_justify="left")
        for column in ("", "busy", "slots", "queued"):
            table.add_column(column, justify="left" if not column else "right")
        for phase in Phase:
            stages = [stage for stage in status.stages if stage.role == phase]
            busy, slots = sum(stage.busy for stage in stages), sum(stage.slots for stage in stages)
            table.add_row(phase.upper(), str(busy), str(slots), str(status.queued.get(phase, 0)))
        for backend in client.backends.list():
            table.add_row(f"backend {backend.backend.backend_id}", str(backend.in_flight))
        reward = f"; mean reward of the last step: {self._rewards[-1]:.3f}" if self._rewards else ""
        line = f"groups finished: {groups_done} of {groups}{reward}"
        return Group(table, line, Text.from_ansi(reward_curve(self._rewards, self._steps, self._console.width)))


def reward_curve(rewards: list[float], steps: int, width: int) -> str:
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(min(width, 80), PLOT_ROWS)
    plotext.ylim(0, 1)
    plotext.xlim(1, max(steps, 2))
    plotext.xticks(list(range(1, steps + 1, max(1, steps // 10))))
    plotext.title("mean reward per step")
    if rewards:
        plotext.plot(list(range(1, len(rewards) + 1)), rewards, marker="braille")
    return str(plotext.build())


def draw_rewards(rewards: list[float], path: Path) -> None:
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(1, len(rewards) + 1), rewards, marker="o", markersize=4)
    axes.set(xlabel="training step", ylabel="mean reward", ylim=(-0.02, 1.02), title="prorl demo: reward per step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
