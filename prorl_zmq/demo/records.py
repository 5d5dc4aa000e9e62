"""What a run of the demo records: `steps.jsonl`, `trajectories.jsonl`, `summary.json`, and a tracker's values."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..inference.tokenizer import decode
from ..trackers import batch_values, rollout_values, sample_conversations

if TYPE_CHECKING:
    from pathlib import Path

    from ..data.group import Group
    from ..data.trajectory import Trajectory
    from ..trackers import Tracker
    from ..wire.messages.batches import BatchReport
    from .grpo import StepStats

STEPS, TRAJECTORIES, SUMMARY = "steps.jsonl", "trajectories.jsonl", "summary.json"
SAMPLES_EVERY = 5
"""Steps between two tables of conversations for the trackers."""


class Collected(NamedTuple):
    """A batch that has ended; times are seconds since this process began to train."""

    groups: list[Group]
    report: BatchReport
    opened_s: float
    met_s: float

    @property
    def reward(self) -> float:
        """Mean over the rollouts of all whole groups, kept or not."""
        parts = (self.report.kept.reward, self.report.dropped.reward)
        return sum(part.mean * part.count for part in parts) / max(sum(part.count for part in parts), 1)

    @property
    def trajectories(self) -> list[Trajectory]:
        """The rollouts of the groups."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]


@dataclass(frozen=True, slots=True)
class Step:
    """A step: a line of `steps.jsonl`; times as in `Collected`."""

    step: int
    reward: float
    rollouts: int
    """Completed while the batch was open."""
    failed: int
    """Jobs that ended without a reward, and were replaced."""
    kept_groups: int
    dropped_groups: int
    opened_s: float
    met_s: float
    learn_from_s: float
    learned_s: float
    """With the checkpoint written."""
    pushed_s: float
    """When the engine served the new weights."""
    stats: StepStats

    @classmethod
    def of(cls, step: int, batch: Collected, times: tuple[float, float, float, float, float], stats: StepStats) -> Step:
        """Make the record of a step from its batch, its times in the order of the fields, and the learner's figures."""
        report = batch.report
        counts = (report.completed, report.failed, report.kept_groups, report.dropped_groups)
        return cls(step, batch.reward, *counts, *times, stats)


@dataclass(slots=True)
class Summary:
    """The figures of a run: `summary.json`."""

    seed: int
    sandbox: str
    reward_first: float
    """Mean reward of the first step, before anything was learned."""
    reward_last: float
    """Of the last three steps."""
    rollouts: int
    failed: int
    seconds: float
    """Of this process, from its first batch to the last step's end."""
    logprob_gap: float
    """Largest, see `StepStats`."""
    rewards: list[float]
    """Mean reward per step."""


class Records:
    """Writes the records of a run into its folder.

    Args:
        out: the folder.
        made: steps that the run has made before; the records of later ones, which it makes again, are removed.
    """

    def __init__(self, out: Path, made: int) -> None:
        self.steps: list[Step] = []
        """Those of this process."""
        self._out = out
        self._earlier = _rewards_before(out / STEPS, made)
        _rewards_before(out / TRAJECTORIES, made)

    def add(self, step: Step, batch: Collected, tracker: Tracker) -> None:
        """Record a step and its batch."""
        number, trajectories = step.step, batch.trajectories
        self.steps.append(step)
        _append(self._out / STEPS, [asdict(step)])
        _append(self._out / TRAJECTORIES, [_row(number, trajectory) for trajectory in trajectories])
        if tracker.is_on:
            values = {f"learn/{name}": float(value) for name, value in asdict(step.stats).items()}
            values |= batch_values(batch.report) | rollout_values(trajectories, number)
            tracker.log({**values, "seconds/step": step.pushed_s - step.opened_s}, number)
            if number % SAMPLES_EVERY == 0:
                texts = sample_conversations(trajectories, lambda ids: decode(np.array(ids, np.int32)))
                tracker.samples(texts, number)

    def summarize(self, seed: int, sandbox: str) -> Summary:
        """Write and return the run's figures."""
        steps, rewards = self.steps, [*self._earlier, *(step.reward for step in self.steps)]
        summary = Summary(
            seed,
            sandbox,
            reward_first=rewards[0] if rewards else 0.0,
            reward_last=sum(rewards[-3:]) / max(len(rewards[-3:]), 1),
            rollouts=sum(step.rollouts for step in steps),
            failed=sum(step.failed for step in steps),
            seconds=steps[-1].pushed_s if steps else 0.0,
            logprob_gap=max((step.stats.logprob_gap for step in steps), default=0.0),
            rewards=rewards,
        )
        (self._out / SUMMARY).write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
        return summary


def _rewards_before(path: Path, step: int) -> list[float]:
    """Drop the lines of a file from a step on, which the run will make again; return the rewards of those before."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    kept = [(line, record) for line in lines if (record := json.loads(line))["step"] < step]
    path.write_text("".join(line for line, _ in kept), encoding="utf-8")
    return [record["reward"] for _, record in kept]


def _append(path: Path, records: list[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def _row(step: int, trajectory: Trajectory) -> dict[str, Any]:
    return {
        "step": step,
        "job_id": trajectory.job_id,
        "group_id": trajectory.group_id,
        "reward": trajectory.reward,
        "stop_reason": trajectory.result.stop_reason,
        "weight_version": int(trajectory.weight_versions.max(initial=-1)),
        "tokens": trajectory.result.tokens,
        "timings": trajectory.result.timings,
        "text": decode(trajectory.token_ids),
    }
