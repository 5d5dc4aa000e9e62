"""The run as one picture: reward, entropy, KL, staleness, the time of each step, and how its two sides overlap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .records import Exam, StepRecord

TIMELINE_STEPS = 12
"""How many of the last steps the timeline shows."""


def draw(steps: Sequence[StepRecord], tests: Sequence[Exam], process_steps: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    reward, entropy, kl, staleness, times, timeline = figure.subplots(2, 3).flat
    numbers = [step.step + 1 for step in steps]
    stats = [step.stats for step in steps]
    reward.plot(numbers, [step.batch.reward for step in steps], marker="o", markersize=3, label="all rollouts")
    for task in sorted({task for test in tests for task in test.reward}):
        tested = [test for test in tests if task in test.reward]
        points = [test.reward[task] for test in tested]
        reward.plot([test.step for test in tested], points, "--", marker="x", label=f"test at temperature 0: {task}")
    _label(reward, "mean reward", legend=True)
    reward.set_ylim(-0.02, 1.02)
    entropy.plot(numbers, [one.entropy for one in stats])
    _label(entropy, "entropy, nats per generated token")
    entropy.set_ylim(bottom=0)
    kl.plot(numbers, [one.kl_warm for one in stats], label="warm start ‖ policy")
    kl.plot(numbers, [one.kl_behaviour for one in stats], label="behaviour ‖ policy (k3)")
    kl.set_yscale("symlog", linthresh=1e-4)
    _label(kl, "KL, nats per generated token", legend=True)
    staleness.plot(numbers, [one.staleness_max for one in stats], label="oldest token")
    staleness.plot(numbers, [one.staleness_mean for one in stats], label="mean")
    staleness.set_ylim(bottom=0)
    _label(staleness, "staleness, weight versions", legend=True)
    times.plot(numbers, [step.step_s for step in steps], label="step")
    times.plot(numbers, [step.learn_s for step in steps], label="learning")
    times.plot(numbers, [step.wait_s for step in steps], label="learner waits")
    times.set_ylim(bottom=0)
    _label(times, "seconds", legend=True)
    _draw_timeline(timeline, steps[len(steps) - process_steps :][-TIMELINE_STEPS:])
    figure.suptitle("train_torch: GRPO with DAPO sampling on shell and math tasks")
    figure.savefig(path, dpi=110)


def _draw_timeline(axes: Any, steps: Sequence[StepRecord]) -> None:
    for row, step in enumerate(steps):
        batch = step.batch
        axes.barh(row, batch.met_s - batch.opened_s, left=batch.opened_s, height=0.35, color="tab:blue")
        axes.barh(row + 0.35, step.learn_s, left=step.learn_from_s, height=0.35, color="tab:orange")
    axes.set_yticks(range(len(steps)), [str(step.step + 1) for step in steps])
    axes.invert_yaxis()
    axes.set(xlabel="seconds since training began", ylabel="step", title="rollouts (blue), learning (orange)")
    axes.spines[["top", "right"]].set_visible(False)


def _label(axes: Any, title: str, *, legend: bool = False) -> None:
    axes.set(xlabel="training step", title=title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(fontsize="small")
