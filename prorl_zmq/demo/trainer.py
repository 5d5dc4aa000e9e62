"""The trainer of `prorl demo`: collect a batch, learn from it, have the engine serve the new weights.

With `overlap`, the main thread collects the next batch while a second thread learns from this one, writes the
checkpoint and updates the engine. To train a model of your own, replace `Grpo`: the trainer uses its `weight_version`,
`save`, `state`, `load_state` and `step`.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ..client.blocking.client import RolloutClient
from ..errors import ConfigError, RequestTimeout
from ..inference.embedded.base_policy import base_policy
from ..inference.policy import save_arrays
from ..service.child import ChildService
from ..wire.messages.base import new_id
from .grpo import Grpo, Settings
from .records import Collected, Records, Step, Summary
from .tasks import make_prompts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from ..client.blocking.batch import Batch
    from ..data.group import Group
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
CHECKPOINT, JOURNAL = "checkpoint.npz", "rollout.journal"
MAX_STALENESS = 4
"""Rollouts with tokens of older weights are dropped."""
PROMPTS_PER_GROUP = 8
"""Prompts that a batch may try for each group that it is to keep: a policy that solves all tasks agrees with itself."""
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
        overlap: collect the next batch while learning, of groups whose rewards differ.
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
        self.session, self._position = new_id(), 0
        self.learner = Grpo(base_policy(), settings, seed or 0)
        self._out, self._seed, self._sandbox, self._overlap = out, seed or 0, sandbox, overlap
        if resume:
            self._resume(seed)
        else:
            for left in (*out.glob(f"{JOURNAL}*"), out / CHECKPOINT):
                left.unlink(missing_ok=True)
        self.records = Records(out, self.learner.weight_version)
        self._began = time.monotonic()

    def run(self, display: Display, tracker: Tracker) -> Summary:
        """Train until all steps are made, and return the run's figures."""
        weights = self._out / "weights"
        weights.mkdir(exist_ok=True)
        self._served = self.learner.save(weights)
        topology = {"model": self._served.absolute(), "journal": (self._out / JOURNAL).absolute()}
        with ExitStack() as stack:
            service = ChildService(self._out, TOPOLOGY.format(sandbox=self._sandbox, **topology), NICE)
            stack.enter_context(service)
            client = stack.enter_context(RolloutClient(service.front_door, session=self.session))
            pusher = stack.enter_context(RolloutClient(service.front_door))
            service.wait_ready(client)
            pusher.set_weight_version(self.learner.weight_version)
            stack.enter_context(display)
            self._began = time.monotonic()
            self._train(service, client, pusher, display, tracker)
        return self.records.summarize(self._seed, self._sandbox)

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
                if not more:
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
        """Make a step; the checkpoint is written before any rollout has the new weights."""
        position, learn_from_s = self._position, self._clock()
        stats = self.learner.step(batch.groups)
        served, self._served = self._served, self.learner.save(self._served.parent)
        run = {"session": self.session, "seed": self._seed, "position": position}
        save_arrays(self._out / CHECKPOINT, {**self.learner.state(), "run": np.array(json.dumps(run))})
        learned_s = self._clock()
        client.update_weights(self._served.absolute(), self.learner.weight_version)
        served.unlink(missing_ok=True)
        times = (batch.opened_s, batch.met_s, learn_from_s, learned_s, self._clock())
        step = Step.of(number, batch, times, stats)
        self.records.add(step, batch, tracker)
        display.stepped(step)

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
        except Exception as error:  # numpy raises many kinds for a damaged file
            raise ConfigError(f"{path} is not a checkpoint of this program: {error}", key="resume") from error
        if seed not in (None, self._seed):
            raise ConfigError(f"the run in {self._out} has seed {self._seed}, not {seed}; leave out --seed", key="seed")
        if (made := self.learner.weight_version) >= self.settings.steps:
            raise ConfigError(f"the run in {self._out} has made {made} steps; give it more --steps", key="steps")

    def _clock(self) -> float:
        return time.monotonic() - self._began
