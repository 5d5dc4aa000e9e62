"""What a run writes down: a line of `steps.jsonl` per step, and `summary.json`. Plain data; times are seconds."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import msgspec

from .learner import LearnStats  # noqa: TC001 - msgspec reads the annotations at run time

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

STEPS = "steps.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    reward: float
    """Mean over all rollouts of whole groups, kept or not; over those of kept groups alone it would say little."""
    rollouts: int
    """Completed while the batch was open; each has the reward 0 or 1."""
    kept_groups: int
    dropped_groups: int
    unused_rollouts: int
    """Jobs that ran and were of no use (see `BatchReport.wasted`)."""
    opened_s: float
    """Since the run's process began to train, as all times in it."""
    met_s: float
    """When its last group was there."""

    @property
    def reward_error(self) -> float:
        """The standard error of `reward`."""
        return math.sqrt(self.reward * (1.0 - self.reward) / max(self.rollouts, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    step: int
    batch: BatchRecord
    learn_from_s: float
    learned_s: float
    pushed_s: float
    """When the engine served the new weights."""
    wait_s: float
    """How long the learner had nothing to do, since its batch was not full yet."""
    learn_s: float
    """From the first forward pass to the checkpoint."""
    step_s: float
    """From the opening of its batch until that was full and the learning beside it was done."""
    stats: LearnStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """The policy at temperature 0 on prompts that training does not use."""

    step: int
    """Steps made when it began; weights may have changed once or twice meanwhile."""
    reward: dict[str, float]
    """Mean by task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Whether a step took longer than the longer of its two sides would have taken alone."""

    steps: int
    """Steps that were measured, the last ones of the process."""
    step_s: float
    """Mean wall time of a step, with rollouts and learning side by side."""
    rollout_alone_s: float
    """That of as many rollouts while nobody learned, from batches that were collected in turn with those."""
    learn_alone_s: float
    """That of learning from the last batches again, when the service was down."""
    rollouts_per_step: float
    ratio: float
    """step_s / max(rollout_alone_s, learn_alone_s)"""
    serial_ratio: float
    """What it would be with one after the other."""


@dataclass(slots=True, kw_only=True)
class Summary:
    """`summary.json`."""

    seed: int
    sandbox: str
    steps: int
    """Made in all, by this process and those before it."""
    reward_first: float
    """Of the first step, before anything was learned."""
    reward_last: float
    """Mean of the last five steps."""
    tests: list[Exam]
    rollouts: int
    """Of this process."""
    warm_start_s: float
    """0 if the run was resumed."""
    seconds: float
    """From the first batch's opening to the last step's end."""
    logprob_gap: float
    """Largest, see `LearnStats`."""
    overlap: Overlap | None = None
    rewards: list[float] = field(default_factory=list)
    """By step."""


def append_step(out: Path, record: StepRecord) -> None:
    with (out / STEPS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read_steps(out: Path, before: int) -> list[StepRecord]:
    """Read the steps of a run, and drop those from `before` on, which it will make again."""
    path = out / STEPS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = [msgspec.json.decode(line, type=StepRecord) for line in lines]
    kept = [record for record in records if record.step < before]
    path.write_text("".join(json.dumps(asdict(record)) + "\n" for record in kept), encoding="utf-8")
    return kept


def measure_overlap(
    steps: Sequence[StepRecord], alone: Sequence[BatchRecord], learn_alone_s: Sequence[float]
) -> Overlap | None:
    """Compare steps with their sides alone; None: nothing was measured."""
    measured = steps[len(steps) - len(alone) :]
    if not measured or not learn_alone_s:
        return None
    step_s = sum(step.step_s for step in measured) / len(measured)
    rollouts = sum(step.batch.rollouts for step in measured) / len(measured)
    rollout_s = sum(batch.met_s - batch.opened_s for batch in alone) / max(sum(batch.rollouts for batch in alone), 1)
    rollout_alone_s, learn_s = rollouts * rollout_s, sum(learn_alone_s) / len(learn_alone_s)
    longer = max(rollout_alone_s, learn_s)
    return Overlap(
        steps=len(measured),
        step_s=step_s,
        rollout_alone_s=rollout_alone_s,
        learn_alone_s=learn_s,
        rollouts_per_step=rollouts,
        ratio=step_s / longer,
        serial_ratio=(rollout_alone_s + learn_s) / longer,
    )
