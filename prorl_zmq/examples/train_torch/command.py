"""The command line of the example."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
import typer

from ...commands.demo import TrainingSandbox, begin_training, say_where
from ...commands.options import Log, console
from ...data.reward_curve import conclusion
from ...demo.trainer import SUMMARY, write_summary
from ...errors import ConfigError
from ...trackers import open_tracker
from ...trackers.adapter import TRACKERS
from ...wire.messages.base import new_id
from .display import Display
from .learner import Learner, LearnerSettings
from .model import Model
from .plot import draw
from .records import Summary, measure_overlap, read_steps
from .script import STEPS as IMITATION_STEPS
from .script import imitate, texts
from .service import JOURNAL
from .tokenizer import load_chat, make_tokenizer
from .training import CHECKPOINT, RunSettings, Training
from .weights import Checkpoint, read_weights, save_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

PICTURE = "train_torch.png"
WARM = "warm.safetensors"
TOKENIZER = "tokenizer"
TOKENIZER_TEXTS = 400
DEFAULTS = RunSettings()


def _finite(value: float) -> float:
    if not math.isfinite(value):  # a range lets NaN pass
        raise typer.BadParameter(f"{value} is no number")
    return value


def _device(name: str) -> str:
    try:
        device = torch.device(name)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise typer.BadParameter(f"PyTorch finds {torch.cuda.device_count()} GPUs here; use --device cpu")
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError
    except RuntimeError:  # torch does not know the name
        raise typer.BadParameter(f"{name!r} is not cpu, cuda or cuda:N") from None
    return name


def train(
    out: Annotated[Path, typer.Option(metavar="DIR", help="For picture, checkpoint and logs.")] = Path("train_torch"),
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="Training steps in all.")] = DEFAULTS.steps,
    groups: Annotated[
        int, typer.Option(min=1, max=1024, help="Groups in a batch; the service keeps those whose rewards differ.")
    ] = DEFAULTS.groups,
    group_size: Annotated[int, typer.Option(min=2, max=256, help="Rollouts of each prompt.")] = DEFAULTS.group_size,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**32, help="Of the weights, the tasks and the sampling. [default: 0]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint in --out.")] = False,
    sandbox: TrainingSandbox = "bubblewrap",
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", callback=_device, help="Where the engine and the learner compute.")
    ] = DEFAULTS.device,
    max_staleness: Annotated[
        int, typer.Option(min=0, max=1000, help="Drop rollouts with tokens of weights so many versions old, and older.")
    ] = DEFAULTS.max_staleness,
    slots: Annotated[int, typer.Option(min=1, max=512, help="Conversations at once.")] = DEFAULTS.slots,
    learning_rate: Annotated[
        float, typer.Option("--lr", min=1e-7, max=1.0, callback=_finite, help="Learning rate of Adam.")
    ] = DEFAULTS.learner.learning_rate,
    epochs: Annotated[int, typer.Option(min=1, max=100, help="How often each rollout is learned from.")] = (
        DEFAULTS.learner.epochs
    ),
    warm_steps: Annotated[
        int, typer.Option(min=1, max=100_000, help="Steps of imitation before; its policy knows the form of an answer.")
    ] = IMITATION_STEPS,
    test_every: Annotated[
        int,
        typer.Option("--eval-every", min=0, help="Steps between two tests at temperature 0 on other prompts; 0: none."),
    ] = DEFAULTS.test_every,
    measure: Annotated[
        int, typer.Option(min=0, max=100, help="How many of the last steps also measure each side alone.")
    ] = DEFAULTS.measure,
    log: Log = None,
) -> None:
    """Train a small transformer with GRPO and DAPO sampling through the whole service: five minutes on two cores.

    It makes a tokenizer, warms the policy up by imitating a script, starts the service and an engine, and trains on
    questions that need bash and on questions of geometry. While it learns from one batch, the next one's rollouts run.

        python -m prorl_zmq.examples.train_torch --out run --steps 60

        python -m prorl_zmq.examples.train_torch --out run --steps 100 --resume

    ^C stops it within seconds. In --out are then train_torch.png, steps.jsonl (one line per step), summary.json,
    checkpoint.pt and logs/.
    """
    screen = console()
    torch.set_num_threads(1)  # the other core is the service's
    settings = RunSettings(
        steps=steps,
        groups=groups,
        group_size=group_size,
        max_staleness=max_staleness,
        slots=slots,
        sandbox=sandbox,
        device=device,
        test_every=test_every,
        measure=measure,
        learner=replace(LearnerSettings(), learning_rate=learning_rate, epochs=epochs),
    )
    if not resume and (out / CHECKPOINT).exists():
        raise ConfigError(
            f"{out} holds a run already: --resume continues it; or name another --out, or delete the folder", key="out"
        )
    begin_training(out, sandbox, screen)
    with Display(screen) as display:
        try:
            if resume:
                summary = _resume(out, seed, settings, display, log or ())
            else:
                summary = _begin(out, seed or 0, settings, warm_steps, display, log or ())
        except KeyboardInterrupt:
            if (out / CHECKPOINT).exists():
                display.say(f"stopped; --out {out} --resume continues from the last step that was made whole")
            raise
    _conclude(screen, summary, out)


def _begin(
    out: Path, seed: int, settings: RunSettings, warm_steps: int, display: Display, log: Sequence[str]
) -> Summary:
    began = time.monotonic()
    for left in out.glob(f"{JOURNAL}*"):
        left.unlink()  # of a run that ended before its first checkpoint
    make_tokenizer(out / TOKENIZER, texts(np.random.default_rng(0), TOKENIZER_TEXTS))
    model = Model(seed=seed).to(settings.device)
    display.say(f"warm start: {sum(p.numel() for p in model.parameters())} parameters learn to write as a script does")
    display.begin("warm start", warm_steps)

    def on_step(step: int, loss: float) -> None:
        display.advance(step, f"{loss:.3f} nats per token")

    imitate(model, load_chat(out / TOKENIZER), seed, on_step, warm_steps)
    save_weights(model, out / WARM)
    learner = Learner(model, model, settings.learner, seed)
    start = Checkpoint(0, new_id(), seed, 0, learner.state())
    start.save(out / CHECKPOINT)
    return _train(out, settings, start, learner, display, log, time.monotonic() - began)


def _resume(out: Path, seed: int | None, settings: RunSettings, display: Display, log: Sequence[str]) -> Summary:
    start = Checkpoint.load(out / CHECKPOINT)
    if seed is not None and seed != start.seed:
        raise ConfigError(f"the run in {out} has seed {start.seed}, not {seed}; leave out --seed", key="seed")
    if start.step >= settings.steps:
        raise ConfigError(f"the run in {out} has made {start.step} steps; to continue, give more --steps", key="steps")
    warm = Model().to(settings.device)
    warm.load_state_dict(read_weights(out / WARM, warm))
    learner = Learner(Model().to(settings.device), warm, settings.learner, start.seed)
    learner.load_state(start.learner)
    display.say(f"continuing after step {start.step}")
    return _train(out, settings, start, learner, display, log, 0.0)


def _train(
    out: Path,
    settings: RunSettings,
    start: Checkpoint,
    learner: Learner,
    display: Display,
    log: Sequence[str],
    warm_start_s: float,
) -> Summary:
    history = read_steps(out, start.step)
    display.say("starting the service: two brokers, INIT, RUN and EVAL, and one engine")
    config = {**asdict(settings), **asdict(settings.learner)}
    with open_tracker(*log, run=f"train_torch-{start.session}", folder=out / TRACKERS, config=config) as tracker:
        training = Training(out, out / TOKENIZER, settings, start, learner, display, tracker)
        training.run()
    say_where("train_torch", tracker)
    steps = [*history, *training.steps]
    rewards = [step.batch.reward for step in steps]
    summary = Summary(
        seed=start.seed,
        sandbox=settings.sandbox,
        steps=len(steps),
        reward_first=rewards[0] if rewards else 0.0,
        reward_last=sum(rewards[-5:]) / max(len(rewards[-5:]), 1),
        tests=training.tests,
        rollouts=sum(step.batch.rollouts for step in training.steps),
        warm_start_s=warm_start_s,
        seconds=training.steps[-1].pushed_s - training.steps[0].batch.opened_s if training.steps else 0.0,
        logprob_gap=max((step.stats.logprob_gap for step in steps), default=0.0),
        overlap=measure_overlap(training.steps, training.alone, training.learn_alone_s),
        rewards=rewards,
    )
    write_summary(out, summary)
    draw(steps, training.tests, len(training.steps), out / PICTURE)
    return summary


def _conclude(screen: Console, summary: Summary, out: Path) -> None:
    lines = [
        f"{summary.rollouts} rollouts in {summary.seconds:.0f} s, after {summary.warm_start_s:.0f} s of warm start.",
        f"Largest gap between the engine's log-probs and the learner's: {summary.logprob_gap:.1e}.",
    ]
    overlap = summary.overlap
    if overlap is not None:
        lines.append(
            f"A step took {overlap.step_s:.1f} s: {overlap.ratio:.2f} of the longer of its rollouts alone "
            f"({overlap.rollout_alone_s:.1f} s) and its learning alone ({overlap.learn_alone_s:.1f} s); "
            f"one after the other it would be {overlap.serial_ratio:.2f}."
        )
    lines.append(conclusion(summary.rewards))
    lines.append(f"Picture: {out / PICTURE}; figures: {out / SUMMARY}, {out / 'steps.jsonl'}.")
    screen.print("\n".join(lines), highlight=False, soft_wrap=True)
