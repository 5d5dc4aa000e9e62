"""The trainer of `prorl demo`: collect a batch, learn from it, have the engine serve the new weights.

    service   ├── batch 1 ──────────┤├── batch 2 ──────────┤├── batch 3 …
    learner                          ├── batch 1 ──┤ push   ├── batch 2 ──┤ push

With `overlap` the next batch is collected while the learner works on this one: the service keeps groups whose rewards
differ (DAPO's sampling), running generations continue with new weights, and a batch's unfinished rollouts continue into
the next. Without it, one follows the other, and all rollouts are of the newest weights.

The main thread opens batches and collects them; a second thread learns, writes the checkpoint and updates the engine.
To train a model of your own, replace `Grpo`. The trainer uses its `weight_version`, `save`, `state`, `load_state` and
`step`.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ..client.blocking.client import RolloutClient
from ..errors import ConfigError, RequestTimeout
from ..inference.embedded.base_policy import base_policy
from ..inference.policy import save_arrays
from ..inference.tokenizer import decode
from ..service.child import ChildService
from ..trackers import batch_values, rollout_values, sample_conversations
from ..wire.messages.base import new_id
from .grpo import Grpo, Settings
from .records import Collected, Step, Summary
from .tasks import make_prompts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from ..client.blocking.batch import Batch
    from ..data.group import Group
    from ..data.trajectory import Trajectory
    from ..trackers import Tracker
    from ..wire.messages.jobs import Job
    from .display import Display

TOPOLOGY = """\
backends = [{{kind = "embedded", model = "{model}"}}]
stage = [{{role = "init", slots = 4}}, {{role = "run", slots = 16}}, {{role = "eval", slots = 4}}]

[rollout_broker]
ready_limit = 16
journal = "{journal}"

[sandbox]
kind = "{sandbox}"
"""
CHECKPOINT, JOURNAL, STEPS, SUMMARY = "checkpoint.npz", "rollout.journal", "steps.jsonl", "summary.json"
TRAJECTORIES = "trajectories.jsonl"
MAX_STALENESS = 4
"""Rollouts with tokens of older weights are dropped."""
PROMPTS_PER_GROUP = 8
"""Prompts that a batch may try for each group that it is to keep: a policy that solves all tasks agrees with itself."""
SAMPLES_EVERY = 5
"""Steps between two tables of conversations for the trackers."""
POLL_S = 0.25
STALL_S = 120.0
"""Longest time in which no rollout ends."""
NICE = 10
"""Of the service: the learner is one thread and rollouts are many processes, so the learner goes first."""


class Trainer:
    """Trains the base policy on the demo's tasks, through a service of its own.

    Args:
        out: the folder of the run: pictures, conversations, figures, checkpoint, journal and logs.
        settings: how to train.
        seed: of the prompts, the sampling and the training; None: 0, or the checkpoint's.
        sandbox: what the agent's bash runs in.
        overlap: collect the next batch while learning.
        resume: continue from the checkpoint in `out`; False: start from the beginning, whatever is there.

    Raises:
        ConfigError: there is no such checkpoint, or it has made all steps.
    """

    def __init__(
        self,
        out: Path,
        settings: Settings,
        seed: int | None,
        sandbox: str,
        *,
        overlap: bool = False,
        resume: bool = False,
    ) -> None:
        self.settings = settings
        self.steps: list[Step] = []
        self.session, self._position = new_id(), 0
        self.learner = Grpo(base_policy(), settings, seed or 0)
        self._out, self._seed, self._sandbox, self._overlap = out, seed or 0, sandbox, overlap
        if resume:
            self._resume(seed)
        else:
            for left in (*out.glob(f"{JOURNAL}*"), out / CHECKPOINT):
                left.unlink(missing_ok=True)
        self._earlier = _rewards_before(out / STEPS, self.learner.weight_version)
        _rewards_before(out / TRAJECTORIES, self.learner.weight_version)
        self._began = time.monotonic()

    def run(self, display: Display, tracker: Tracker) -> Summary:
        """Train until all steps are made, and write `summary.json`."""
        weights = self._out / "weights"
        weights.mkdir(exist_ok=True)
        self._served = self.learner.save(weights)
        topology = {"model": self._served.absolute(), "journal": (self._out / JOURNAL).absolute()}
        with ExitStack() as stack:
            service = ChildService(self._out, TOPOLOGY.format(sandbox=self._sandbox, **topology), NICE)
            stack.enter_context(service)
            client, pusher = (
                stack.enter_context(RolloutClient(service.front_door, session=session))
                for session in (self.session, None)
            )
            service.wait_ready(client)
            pusher.set_weight_version(self.learner.weight_version)
            stack.enter_context(display)
            self._began = time.monotonic()
            self._train(service, client, pusher, display, tracker)
        summary = self.summary()
        (self._out / SUMMARY).write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
        return summary

    def summary(self) -> Summary:
        """Return the figures of the steps so far, those before `resume` included."""
        rewards = [*self._earlier, *(step.reward for step in self.steps)]
        return Summary(
            self._seed,
            self._sandbox,
            reward_first=rewards[0] if rewards else 0.0,
            reward_last=sum(rewards[-3:]) / max(len(rewards[-3:]), 1),
            rollouts=sum(step.rollouts for step in self.steps),
            failed=sum(step.failed for step in self.steps),
            seconds=self.steps[-1].pushed_s if self.steps else 0.0,
            logprob_gap=max((step.stats.logprob_gap for step in self.steps), default=0.0),
            rewards=rewards,
        )

    def _train(
        self, service: ChildService, client: RolloutClient, pusher: RolloutClient, display: Display, tracker: Tracker
    ) -> None:
        learning: Future[None] | None = None
        batch: Batch | None = None
        with ThreadPoolExecutor(1, "learner") as thread:
            for number in range(self.learner.weight_version, self.settings.steps):
                collected = self._collect(service, client, batch or self._open(client), display)
                if learning is not None:
                    learning.result()
                if not collected.groups:
                    display.say("no prompt is left on which the policy's rollouts differ")
                    return
                more = self._overlap and number + 1 < self.settings.steps
                batch = self._open(client) if more else None
                learning = thread.submit(self._learn, pusher, number, collected, display, tracker)
                if not self._overlap or not more:
                    learning.result()

    def _open(self, client: RolloutClient) -> Batch:
        settings, prompts = self.settings, self._prompts()
        self._opened_s = self._clock()
        if self._overlap:
            batch = client.open_batch(settings.groups, settings.group_size, max_staleness=MAX_STALENESS)
            batch.feed(islice(prompts, PROMPTS_PER_GROUP * settings.groups))
        else:
            batch = client.open_batch(settings.groups, settings.group_size, keep="all", carry="nothing", adopt=False)
            batch.feed(islice(prompts, settings.groups))
        return batch

    def _prompts(self) -> Iterator[Job]:
        for job in make_prompts(self._seed, self._position, self.settings.temperature):
            self._position += 1
            yield job

    def _collect(self, service: ChildService, client: RolloutClient, batch: Batch, display: Display) -> Collected:
        groups: list[Group] = []
        opened_s = last_s = self._opened_s
        status = batch.status
        while True:
            if not service.is_running:
                raise ConfigError(f"the service has ended; see the logs in {service.logs}")
            display.collecting(client, len(groups), self.settings.groups)
            try:
                group = batch.next_group(POLL_S)
            except RequestTimeout:
                if batch.status != status:
                    status, last_s = batch.status, self._clock()
                elif self._clock() - last_s > STALL_S:
                    what = f"no rollout ended within {STALL_S:g} s; see the logs in {service.logs}"
                    raise RequestTimeout(what, timeout_s=STALL_S) from None
                continue
            if group is None:
                break
            groups.append(group)
            last_s = self._clock()
        met_s = self._clock()
        batch.close()
        assert batch.report is not None
        return Collected(groups, batch.report, opened_s, met_s)

    def _learn(self, client: RolloutClient, number: int, batch: Collected, display: Display, tracker: Tracker) -> None:
        """Make a step, in the learner's thread; the checkpoint is written before any rollout has the new weights."""
        position, learn_from_s = self._position, self._clock()
        stats = self.learner.step(batch.groups)
        served, self._served = self._served, self.learner.save(self._served.parent)
        run = {"session": self.session, "seed": self._seed, "position": position}
        save_arrays(self._out / CHECKPOINT, {**self.learner.state(), "run": np.array(json.dumps(run))})
        learned_s = self._clock()
        client.update_weights(self._served.absolute(), self.learner.weight_version)
        served.unlink(missing_ok=True)
        step = Step(
            step=number,
            reward=batch.reward,
            rollouts=batch.report.completed,
            failed=batch.report.failed,
            kept_groups=batch.report.kept_groups,
            dropped_groups=batch.report.dropped_groups,
            opened_s=batch.opened_s,
            met_s=batch.met_s,
            learn_from_s=learn_from_s,
            learned_s=learned_s,
            pushed_s=self._clock(),
            stats=stats,
        )
        self.steps.append(step)
        _append(self._out / STEPS, [asdict(step)])
        _append(self._out / TRAJECTORIES, [_row(number, trajectory) for trajectory in batch.trajectories])
        display.stepped(step)
        if tracker.is_on:
            values = {f"learn/{name}": float(value) for name, value in asdict(stats).items()}
            values |= batch_values(batch.report) | rollout_values(batch.trajectories, number)
            tracker.log({**values, "seconds/step": step.pushed_s - step.opened_s}, number)
            if number % SAMPLES_EVERY == 0:
                texts = sample_conversations(batch.trajectories, lambda ids: decode(np.array(ids, np.int32)))
                tracker.samples(texts, number)

    def _resume(self, seed: int | None) -> None:
        path = self._out / CHECKPOINT
        if not path.is_file():
            raise ConfigError(f"there is no checkpoint at {path}: leave out --resume to begin there", key="resume")
        try:
            with np.load(path, allow_pickle=False) as arrays:
                state = dict(arrays)
            self.learner.load_state(state)
            run: dict[str, Any] = json.loads(str(state["run"]))
            self.session, self._seed, self._position = run["session"], run["seed"], run["position"]
        except Exception as error:  # of many kinds, since numpy reads it
            raise ConfigError(f"{path} is not a checkpoint of this program: {error}", key="resume") from error
        if seed not in (None, self._seed):
            raise ConfigError(f"the run in {self._out} has seed {self._seed}, not {seed}; leave out --seed", key="seed")
        if self.learner.weight_version >= self.settings.steps:
            made = self.learner.weight_version
            raise ConfigError(f"the run in {self._out} has made {made} steps; give it more --steps", key="steps")

    def _clock(self) -> float:
        return time.monotonic() - self._began


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
