"""`prorl demo`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from ..errors import ConfigError
from ..system.logs import say
from ..trackers.adapter import TRACKERS
from .options import Log, console

if TYPE_CHECKING:
    from rich.console import Console

    from ..demo.training import Summary
    from ..trackers import Tracker

SOLVED = 0.8
TrainingSandbox = Annotated[
    Literal["bubblewrap", "process"],
    typer.Option("--sandbox", help="What the agent's bash runs in; `process` is no isolation at all."),
]


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="For the picture, trajectories and summary.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Of the tasks, the sampling and the training.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, max=1000, help="Training steps. [default: 22]")] = None,
    sandbox: TrainingSandbox = "bubblewrap",
    log: Log = None,
) -> None:
    """Train a small policy to use bash, through the whole service, with GRPO: one to two minutes on two cores."""
    from ..demo.display import Display, reward_curve
    from ..demo.grpo import GrpoSettings
    from ..demo.training import Demo
    from ..trackers import open_tracker

    screen = console()
    begin_training(out, sandbox, screen)
    settings = GrpoSettings()
    if steps is not None:
        settings = replace(settings, steps=steps)
    with open_tracker(*log or (), folder=out / TRACKERS, config={**asdict(settings), "seed": seed}) as tracker:
        summary = Demo(out, seed, settings, sandbox, Display(settings.steps, screen), tracker).run()
    screen.print(Text.from_ansi(reward_curve(summary.rewards, settings.steps, screen.width)))
    _conclude(screen, summary, out)
    say_where("prorl demo", tracker)


def begin_training(out: Path, sandbox: str, screen: Console) -> None:
    """Check the sandboxes and make the folder of a training run."""
    from ..tools.sandbox.sandboxes import Sandboxes

    Sandboxes(sandbox, out / "sandboxes").check()
    if sandbox == "process":
        screen.print("Sandboxes are plain processes: what the policy runs is not isolated from this machine.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is not a folder" if out.exists() else error.strerror
        raise ConfigError(f"--out {out}: {reason}", key="out") from error


def say_where(program: str, tracker: Tracker) -> None:
    """Print where a person finds what was logged."""
    for name, where in tracker.where.items():
        say(program, f"logged to {name}: {where}")


def _conclude(screen: Console, summary: Summary, out: Path) -> None:
    rate = summary.rollouts / summary.seconds
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(summary.outcomes.items()))
    lines = [
        f"Mean reward: {summary.reward_first:.3f} at the first step, {summary.reward_last:.3f} at the last.",
        f"{summary.rollouts} rollouts in {summary.seconds:.1f} s ({rate:.0f}/s, training included): {outcomes}.",
        f"Largest gap between the engine's log-probs and the trainer's: {summary.logprob_gap:.1e}.",
        f"Picture: {out / 'reward.png'}; conversations: {out / 'trajectories.jsonl'}; figures: {out / 'summary.json'}.",
        "Next: `prorl serve` starts a service of your own, `prorl submit TASKS.jsonl` sends it jobs; see the README.",
    ]
    screen.print("\n".join(lines), highlight=False, soft_wrap=True)
    if summary.reward_last < SOLVED:
        screen.print(f"The reward did not reach {SOLVED}: give it more --steps.", highlight=False)
