"""Whether rollouts and learning overlap in the real training of `prorl demo --overlap`: for bench/dapo.py.

The trainer runs as the demo runs it: its service, its engine, a policy that learns, here from each rollout so often
that learning takes about as long as rollouts do. Each side has its own cores, as trainers and engines have: the learner
the first core, the service the others. Otherwise both would share two cores, and the figure would be the machine's. It
times its steps, all but the first two, while rollouts of the next batch run during the learning; after that, each side
alone: batches of rollouts with no learning, and learning from the last batches again with the service down. A step
should take no longer than the longer of the two.
"""

from __future__ import annotations

import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from prorl_zmq.demo.display import Display
from prorl_zmq.demo.grpo import Settings
from prorl_zmq.demo.trainer import Trainer
from prorl_zmq.trackers import open_tracker

if TYPE_CHECKING:
    from prorl_zmq import RolloutClient
    from prorl_zmq.client.blocking.batch import Batch
    from prorl_zmq.demo.records import Collected, Summary
    from prorl_zmq.service.child import ChildService
    from prorl_zmq.trackers import Tracker

SETTINGS = Settings(steps=14, groups=8, epochs=270, minibatches=1, learning_rate=3e-5)
MEASURED = 4
"""Batches with which each side is timed alone."""
FIRST = 2
"""Steps that are not timed."""


class Overlap(NamedTuple):
    """What a training says of its steps, in seconds each."""

    steps: int
    step_s: float
    rollout_alone_s: float
    learn_alone_s: float

    @property
    def ratio(self) -> float:
        """A step, to the longer of the two."""
        return self.step_s / max(self.rollout_alone_s, self.learn_alone_s)

    @property
    def serial_ratio(self) -> float:
        """Both, to the longer of the two."""
        return (self.rollout_alone_s + self.learn_alone_s) / max(self.rollout_alone_s, self.learn_alone_s)


class _Measured(Trainer):
    """Collects further batches after the last step, while nothing is learned."""

    def __init__(self, out: Path) -> None:
        super().__init__(out, SETTINGS, 0, "process", overlap=True)
        self._learner_core, *self._service_cores = sorted(os.sched_getaffinity(0))
        self.alone: list[Collected] = []
        self.last: list[Collected] = []

    def run(self, display: Display, tracker: Tracker) -> Summary:
        os.sched_setaffinity(0, self._service_cores)  # the service's processes inherit it
        return super().run(display, tracker)

    def _train(
        self, service: ChildService, client: RolloutClient, pusher: RolloutClient, display: Display, *more: object
    ) -> None:
        os.sched_setaffinity(0, {self._learner_core})
        super()._train(service, client, pusher, display, *more)
        for _ in range(MEASURED):
            self.alone.append(super()._collect(service, client, self._open(client), display))

    def _collect(self, service: ChildService, client: RolloutClient, batch: Batch, display: Display) -> Collected:
        self.last.append(super()._collect(service, client, batch, display))
        return self.last[-1]


def train() -> Overlap:
    """Run the training and time its parts, on a machine with two cores or more."""
    cores = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder, open_tracker() as tracker:
        trainer = _Measured(Path(folder))
        trainer.run(Display(SETTINGS.steps, Console(quiet=True)), tracker)
        learning = []
        for batch in trainer.last[-MEASURED:]:
            began = time.monotonic()
            trainer.learner.step(batch.groups)
            learning.append(time.monotonic() - began)
        os.sched_setaffinity(0, cores)
    steps = list(pairwise(trainer.records.steps))[FIRST:]
    # From one batch's opening to the next one's: when this batch is full and the learning beside it is done.
    step_s = fmean(later.opened_s - step.opened_s for step, later in steps)
    per_rollout_s = sum(batch.met_s - batch.opened_s for batch in trainer.alone) / sum(
        batch.report.completed for batch in trainer.alone
    )
    rollouts = fmean(step.rollouts for step, _ in steps)
    return Overlap(len(steps), step_s, per_rollout_s * rollouts, fmean(learning))
