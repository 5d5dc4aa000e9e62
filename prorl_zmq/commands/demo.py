"""`prorl demo`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..demo.training import Summary

SOLVED = 0.8


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the picture, trajectories and summary.")] = Path(
        "demo"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Of the tasks, the sampling and the training.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Training steps. [default: as many as it takes]")
    ] = None,
    sandbox: Annotated[
        Literal["bubblewrap", "process"],
        typer.Option(help="What the agent's bash runs in; `process` is no isolation at all."),
    ] = "bubblewrap",
) -> None:
    """Train a small policy to use bash, through the whole service, with GRPO: about a minute on two cores."""
    from ..demo.display import Display, reward_curve
    from ..demo.grpo import GrpoSettings
    from ..demo.training import train
    from ..tools.sandbox.sandboxes import Sandboxes

    console = Console()
    Sandboxes(sandbox, out / "sandboxes").check()
    if sandbox == "process":
        console.print("Sandboxes are plain processes: what the policy runs is not isolated from this machine.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error
    settings = GrpoSettings()
    if steps is not None:
        settings = replace(settings, steps=steps)
    summary = train(out, seed, settings, sandbox, Display(settings.steps, console))
    print(reward_curve(summary.rewards, settings.steps, console.width))
    _conclude(console, summary, out)


def _conclude(console: Console, summary: Summary, out: Path) -> None:
    rate = summary.rollouts / summary.seconds
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(summary.outcomes.items()))
    lines = [
        f"Mean reward: {summary.reward_first:.3f} at the first step, {summary.reward_last:.3f} at the last.",
        f"{summary.rollouts} rollouts in {summary.seconds:.1f} s ({rate:.0f}/s, training included): {outcomes}.",
        f"Largest gap between the engine's log-probs and the trainer's: {summary.logprob_gap:.1e}.",
        f"Picture: {out / 'reward.png'}; conversations: {out / 'trajectories.jsonl'}; figures: {out / 'summary.json'}.",
        "Next: `prorl serve` starts a service of your own, `prorl submit TASKS.jsonl` sends it jobs; see the README.",
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if summary.reward_last < SOLVED:
        console.print(f"The reward did not reach {SOLVED}: give it more --steps.", highlight=False)
