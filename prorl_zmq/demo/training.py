"""The demo's training: a trainer that knows the service only through `RolloutClient`.

Each step submits the jobs of some prompts, collects their trajectories, and learns from them. The reward is what the
check script in the sandbox said; nothing else is learned from.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..client.blocking.client import RolloutClient
from ..inference.embedded.base_policy import base_policy
from ..inference.tokenizer import decode
from ..trackers import rollout_values, sample_conversations
from .display import draw_rewards
from .grpo import Grpo, StepStats
from .service import trainer_service
from .tasks import make_jobs
from .trainer import Trainer, write_summary

if TYPE_CHECKING:
    from pathlib import Path
    from typing import TextIO

    from ..data.trajectory import Trajectory
    from ..trackers import Tracker
    from .display import Display
    from .grpo import GrpoSettings
    from .trainer import Step

SAMPLES_EVERY = 5
"""Steps between two tables of conversations for the trackers."""
STALL_S = 120.0
"""Longest time without a finished job."""


@dataclass(slots=True)
class Summary:
    """What the demo measured: `demo/summary.json`."""

    seed: int
    sandbox: str
    reward_first: float = 0.0
    """Mean reward of the first step, before anything was learned."""
    reward_last: float = 0.0
    rollouts: int = 0
    seconds: float = 0.0
    """From the first submission to the last step's end."""
    outcomes: dict[str, int] = field(default_factory=dict)
    logprob_gap: float = 0.0
    """Largest difference between the engine's log-prob of a token and the trainer's own for the same weights."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward per step."""


class Demo(Trainer["list[Trajectory]", StepStats]):
    _learner: Grpo
    _client: RolloutClient
    _record: TextIO

    def __init__(
        self, out: Path, seed: int, settings: GrpoSettings, sandbox: str, display: Display, tracker: Tracker
    ) -> None:
        super().__init__(out, Grpo(base_policy(), settings, seed))
        self._out = out
        self._display = display
        self._tracker = tracker
        self._opened_s = 0.0
        self.summary = Summary(seed, sandbox)

    def run(self) -> Summary:
        """Run the demo, and leave `reward.png`, `trajectories.jsonl` and `summary.json` in its folder."""
        self._display.say("starting the service: two brokers, INIT, RUN and EVAL, one engine")
        engine = f'{{kind = "embedded", model = "{self.weights.absolute()}"}}'
        with (
            trainer_service(self._out, self.summary.sandbox, backends=engine) as service,
            RolloutClient(service.front_door) as self._client,
            (self._out / "trajectories.jsonl").open("w", encoding="utf-8") as self._record,
        ):
            service.wait_ready(self._client)
            with self._display:
                self.train(self._client, range(self._learner.settings.steps))
        draw_rewards(self.summary.rewards, self._out / "reward.png")
        write_summary(self._out, self.summary)
        return self.summary

    def _open(self, step: int) -> None:
        settings, seed = self._learner.settings, self.summary.seed * 10_000 + step
        self._opened_s = self._clock()
        jobs = make_jobs(settings.groups, settings.group_size, seed, settings.temperature, f"step{step}")
        self._client.submit(jobs)

    def _collect(self) -> list[Trajectory]:
        settings = self._learner.settings
        trajectories: list[Trajectory] = []
        done: Counter[str] = Counter()
        for trajectory in self._client.stream(timeout_s=STALL_S):
            trajectories.append(trajectory)
            done[trajectory.group_id] += 1
            finished = sum(count == settings.group_size for count in done.values())
            self._display.collected(self._client, finished, settings.groups)
        return trajectories

    def _accept(self, step: int, batch: list[Trajectory]) -> bool:
        self._record.writelines(json.dumps(_row(step, trajectory)) + "\n" for trajectory in batch)
        return True

    def _learn(self, batch: list[Trajectory]) -> StepStats:
        return self._learner.step(batch)

    def _made(self, step: Step[list[Trajectory], StepStats]) -> None:
        stats, summary = step.stats, self.summary
        self._display.stepped(step.number, stats, step.pushed_s - self._opened_s)
        summary.rewards.append(stats.reward)
        summary.reward_first, summary.reward_last = summary.rewards[0], stats.reward
        summary.rollouts += stats.rollouts
        summary.logprob_gap = max(summary.logprob_gap, stats.logprob_gap)
        summary.outcomes = dict(Counter(summary.outcomes) + Counter(str(each.outcome) for each in step.batch))
        summary.seconds = step.pushed_s
        if self._tracker.is_on:
            self._log(step)

    def _log(self, step: Step[list[Trajectory], StepStats]) -> None:
        learned = {f"learn/{name}": float(value) for name, value in asdict(step.stats).items()}
        seconds = {"seconds/step": step.pushed_s - self._opened_s}
        self._tracker.log(rollout_values(step.batch, step.number) | learned | seconds, step.number)
        if step.number % SAMPLES_EVERY == 0:
            texts = sample_conversations(step.batch, lambda ids: decode(np.array(ids, np.int32)))
            self._tracker.samples(texts, step.number)


def _row(step: int, trajectory: Trajectory) -> dict[str, object]:
    return {
        "step": step,
        "job_id": trajectory.job_id,
        "group_id": trajectory.group_id,
        "outcome": trajectory.outcome,
        "reward": trajectory.reward,
        "stop_reason": trajectory.result.stop_reason,
        "weight_version": int(trajectory.weight_versions.max(initial=-1)),
        "tokens": trajectory.result.tokens,
        "error": trajectory.error.message if trajectory.error is not None else None,
        "timings": trajectory.result.timings,
        "text": decode(trajectory.token_ids),
    }
