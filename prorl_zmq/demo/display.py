"""What the demo shows: on a terminal a live table and the reward's curve, in a pipe plain lines; and its picture."""

from __future__ import annotations

import math
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
    from collections.abc import Sequence
    from pathlib import Path

    from ..client.blocking.client import RolloutClient
    from .records import Step

REFRESH_S = 0.25
PLOT_ROWS = 12
TIMELINE_STEPS = 12
"""How many of the last steps the timeline shows."""


class Display:
    """Shows a run while it is a context; calls may come from several threads."""

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

    def collecting(self, client: RolloutClient, groups_done: int, groups: int) -> None:
        """Draw the state of the service between two groups, now and then."""
        if self._live is None or time.monotonic() - self._drawn_at < REFRESH_S:
            return
        self._drawn_at = time.monotonic()
        self._live.update(self._picture(client, groups_done, groups), refresh=True)

    def stepped(self, step: Step) -> None:
        """Note a step; in a pipe, print its line."""
        self._rewards.append(step.reward)
        if self._live is None:
            error = math.sqrt(step.reward * (1 - step.reward) / max(step.rollouts, 1))
            self.say(
                f"step {step.step + 1:3d}/{self._steps}: reward {step.reward:.3f} ± {error:.3f}, {step.rollouts} "
                f"rollouts, {step.failed} failed, groups kept {step.kept_groups}, dropped {step.dropped_groups}; "
                f"{step.pushed_s - step.opened_s:.1f} s, learning {step.learned_s - step.learn_from_s:.1f} s; entropy "
                f"{step.stats.entropy:.3f}, staleness {step.stats.staleness_max}"
            )

    def _picture(self, client: RolloutClient, groups_done: int, groups: int) -> Group:
        status = client.status()
        table = Table(title=f"step {len(self._rewards) + 1} of {self._steps}", title_justify="left")
        for column in ("", "busy", "slots", "queued"):
            table.add_column(column, justify="left" if not column else "right")
        for phase in (Phase.INIT, Phase.RUN, Phase.EVAL):
            stages = [stage for stage in status.stages if stage.role == phase]
            busy, slots = sum(stage.busy for stage in stages), sum(stage.slots for stage in stages)
            table.add_row(phase.upper(), str(busy), str(slots), str(status.queued.get(phase, 0)))
        for backend in client.backends.list():
            table.add_row(f"backend {backend.backend.backend_id}", str(backend.in_flight))
        reward = f"; mean reward of the last step: {self._rewards[-1]:.3f}" if self._rewards else ""
        line = f"groups finished: {groups_done} of {groups}{reward}"
        return Group(table, line, Text.from_ansi(reward_curve(self._rewards, self._steps, self._console.width)))


def reward_curve(rewards: list[float], steps: int, width: int) -> str:
    """Return the curve of the mean rewards for a terminal."""
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


def draw(rewards: Sequence[float], steps: Sequence[Step], path: Path) -> None:
    """Draw the mean rewards of a run, and when its last steps collected and learned."""
    figure = Figure(figsize=(11, 3.5), layout="constrained")
    reward, timeline = figure.subplots(1, 2, width_ratios=(3, 2))
    reward.plot(range(1, len(rewards) + 1), rewards, marker="o", markersize=4)
    reward.set(xlabel="training step", ylabel="mean reward", ylim=(-0.02, 1.02), title="prorl demo: reward per step")
    reward.xaxis.set_major_locator(MaxNLocator(integer=True))
    reward.grid(alpha=0.3)
    for row, step in enumerate(last := steps[-TIMELINE_STEPS:]):
        timeline.barh(row, step.met_s - step.opened_s, left=step.opened_s, height=0.35, color="tab:blue")
        learned_s = step.pushed_s - step.learn_from_s
        timeline.barh(row + 0.35, learned_s, left=step.learn_from_s, height=0.35, color="tab:orange")
    timeline.set_yticks(range(len(last)), [str(step.step + 1) for step in last])
    timeline.invert_yaxis()
    timeline.set(xlabel="seconds since training began", ylabel="step", title="rollouts (blue), learning (orange)")
    for axes in (reward, timeline):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
