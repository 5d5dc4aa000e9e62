"""`prorl demo`."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from ..data.reward_curve import conclusion
from ..errors import ConfigError
from ..system.files import put_aside
from ..system.logs import say
from ..trackers.adapter import TRACKERS
from .options import Log
from .tables import console

if TYPE_CHECKING:
    from rich.console import Console

    from ..demo.records import Summary
    from ..trackers import Tracker

SOLVED = 0.8
PICTURE = "reward.png"


def _finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):  # a range lets NaN pass
        raise typer.BadParameter(f"{value} is not a number")
    return value


def demo(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for pictures, conversations, figures and the checkpoint.")
    ] = Path("demo"),
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**32, help="Seed of the tasks, the sampling and the training. [default: 0]"),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, max=100_000, help="Training steps in all. [default: 22]")] = None,
    groups: Annotated[int | None, typer.Option(min=1, max=1024, help="Groups in a batch. [default: 5]")] = None,
    group_size: Annotated[
        int | None, typer.Option(min=2, max=256, help="Rollouts of each prompt. [default: 8]")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, max=1000, help="Passes over each batch. [default: 6]")] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--lr", min=1e-7, max=1.0, callback=_finite, help="Of Adam. [default: 0.001]")
    ] = None,
    overlap: Annotated[
        bool,
        typer.Option(
            "--overlap", help="Collect the next batch while learning, of groups whose rewards differ (DAPO's sampling)."
        ),
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint in --out.")] = False,
    sandbox: Annotated[
        Literal["bubblewrap", "process"],
        typer.Option(help="What the agent's bash runs in; `process` is not isolated at all."),
    ] = "bubblewrap",
    log: Log = None,
) -> None:
    """Train a small policy to use bash, through the whole service, with GRPO: one to two minutes on two cores.

    ^C stops it within seconds, and --resume continues. In --out are then reward.png, trajectories.jsonl (one line per
    conversation), steps.jsonl (one line per step), summary.json, checkpoint.npz and logs/. Those of an earlier run move
    to DIR/earlier, unless --resume continues it.
    """
    from ..demo.display import Display, draw, reward_curve
    from ..demo.grpo import Settings
    from ..demo.trainer import CHECKPOINT, Trainer
    from ..trackers import open_tracker

    screen = console()
    given: dict[str, Any] = {
        "steps": steps,
        "groups": groups,
        "group_size": group_size,
        "epochs": epochs,
        "learning_rate": learning_rate,
    }
    settings = replace(Settings(), **{name: value for name, value in given.items() if value is not None})
    _begin(out, sandbox, screen, resume=resume)
    trainer = Trainer(out, settings, seed, sandbox, overlap=overlap, resume=resume)
    config = {**asdict(settings), "seed": seed, "overlap": overlap}
    screen.print("starting the service: two brokers, INIT, RUN and EVAL, one engine")
    try:
        with open_tracker(*log or (), run=f"demo-{trainer.session}", folder=out / TRACKERS, config=config) as tracker:
            summary = trainer.run(Display(settings.steps, screen), tracker)
    except KeyboardInterrupt:
        after = f"--out {out} --resume continues from the last whole step"
        kept = (out / CHECKPOINT).exists()
        screen.print(f"stopped; {after}" if kept else "stopped before the first whole step", soft_wrap=True)
        raise
    draw(summary.rewards, trainer.records.steps, out / PICTURE)
    screen.print(Text.from_ansi(reward_curve(summary.rewards, settings.steps, screen.width)))
    _conclude(screen, summary, out)
    say_where("prorl demo", tracker)


def _begin(out: Path, sandbox: str, screen: Console, *, resume: bool) -> None:
    """Check the sandboxes and make the folder of a training run; a new run moves an earlier one's files aside."""
    from ..demo.records import STEPS, SUMMARY, TRAJECTORIES
    from ..demo.trainer import CHECKPOINT
    from ..tools.sandbox.sandboxes import Sandboxes

    Sandboxes(sandbox, out / "sandboxes").check()
    if sandbox == "process":
        screen.print("Sandboxes are plain processes: what the policy runs is not isolated from this machine.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not resume and (out / CHECKPOINT).exists():
            earlier = put_aside(out, (PICTURE, STEPS, TRAJECTORIES, SUMMARY, CHECKPOINT))  # the checkpoint last
            screen.print(f"the run that {out} had is in {earlier}", soft_wrap=True)
    except OSError as error:
        reason = "it is not a folder" if out.exists() else error.strerror
        raise ConfigError(f"--out {out}: {reason}", key="out") from error


def say_where(program: str, tracker: Tracker) -> None:
    """Print where the logs are."""
    for name, where in tracker.where.items():
        say(program, f"logged to {name}: {where}")


def _conclude(screen: Console, summary: Summary, out: Path) -> None:
    failed, rate = summary.failed, summary.rollouts / max(summary.seconds, 1e-3)
    lines = [
        f"Mean reward: {summary.reward_first:.3f} at the first step, {summary.reward_last:.3f} at the last three.",
        conclusion(summary.rewards),
        f"{summary.rollouts} rollouts in {summary.seconds:.1f} s ({rate:.0f}/s, training included); {failed} failed.",
        f"Largest gap between the engine's log-probs and the trainer's: {summary.logprob_gap:.1e}.",
        f"Picture: {out / PICTURE}; conversations: {out / 'trajectories.jsonl'}; figures: {out / 'summary.json'}.",
        "Next: `prorl serve` starts a service of your own, `prorl submit TASKS.jsonl` sends it jobs; see the README.",
    ]
    screen.print("\n".join(lines), highlight=False, soft_wrap=True)
    if summary.reward_last < SOLVED:
        screen.print(f"The reward did not reach {SOLVED}: give it more --steps.", highlight=False)
