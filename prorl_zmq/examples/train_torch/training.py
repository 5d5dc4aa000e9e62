"""The example's training: batches of informative groups, collected while the learner works on the one before.

`max_staleness` drops rollouts that are too old; running generations continue with new weights (`keep`), and what a
batch leaves unfinished continues into the next. Each thread has a client of its own, the tests a third.

A run that is stopped, or killed, continues from its last checkpoint; the service's journal lies in the same folder, and
under the checkpoint's session are the groups that were under way.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...client.blocking.client import RolloutClient
from ...demo.trainer import Trainer
from ...errors import RequestTimeout
from ...trackers import batch_values, rollout_values, sample_conversations
from .learner import Interrupted, Learner, LearnerSettings, LearnStats
from .records import BatchRecord, Exam, StepRecord, append_step
from .service import Processes
from .tasks import PromptStream
from .testing import Tester
from .tokenizer import load_chat
from .weights import Checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from ...client.blocking.batch import Batch
    from ...data.group import Group
    from ...demo.trainer import Step
    from ...trackers import Tracker
    from ...wire.messages.batches import BatchReport
    from .display import Display

CHECKPOINT = "checkpoint.pt"
SAMPLES_EVERY = 5
"""Steps between two tables of conversations for the trackers."""
POLL_S = 0.5
"""How often it looks whether all is well while it waits for a group."""
PROMPTS_PER_GROUP = 8
"""Prompts that a batch may try for each group that it is to keep: a policy that knows all tasks agrees with itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    steps: int = 40
    groups: int = 8
    """Groups of a batch whose rewards differ."""
    group_size: int = 8
    max_staleness: int = 4
    slots: int = 16
    """Conversations at once."""
    sandbox: str = "bubblewrap"
    device: str = "cpu"
    """Of the engine and the learner."""
    test_every: int = 5
    """Steps between two tests; 0: none."""
    test_prompts: int = 20
    measure: int = 5
    """The last steps are measured: a batch is collected while nobody learns, beside each; 0: none."""
    learner: LearnerSettings = field(default_factory=LearnerSettings)


class Collected(NamedTuple):
    """A batch that has ended."""

    groups: list[Group]
    report: BatchReport
    record: BatchRecord


class Training(Trainer[Collected, LearnStats]):
    overlaps = True
    _learner: Learner
    _client: RolloutClient
    _tester: Tester
    _processes: Processes
    _batch: Batch

    def __init__(
        self,
        out: Path,
        tokenizer: Path,
        settings: RunSettings,
        start: Checkpoint,
        learner: Learner,
        display: Display,
        tracker: Tracker,
    ) -> None:
        super().__init__(out, learner)
        self._out = out
        self._tokenizer = tokenizer
        self._settings = settings
        self._start = start
        self._display = display
        self._tracker = tracker
        self._prompts = PromptStream(start.seed, start.position)
        self._opened_s = 0.0
        self._position = start.position
        """The prompt that a run continues with from the next checkpoint."""
        self._recent: list[list[Group]] = []
        """The last batches, to learn from again when that is measured."""
        self.steps: list[StepRecord] = []
        """Those of this process."""
        self.tests: list[Exam] = []
        self.alone: list[BatchRecord] = []
        """Batches that were collected while nobody learned, one for each of the last steps."""
        self.learn_alone_s: list[float] = []
        """Times of learning without rollouts beside it."""

    def run(self) -> None:
        """Train until all steps are made, then measure."""
        settings, version = self._settings, self._learner.weight_version
        with ExitStack() as stack:
            self._processes = stack.enter_context(
                Processes(
                    self._out,
                    self.weights,
                    version,
                    self._tokenizer,
                    settings.sandbox,
                    settings.slots,
                    settings.device,
                )
            )
            door = self._processes.front_door
            self._client = stack.enter_context(RolloutClient(door, session=self._start.session))
            pusher, testing = (stack.enter_context(RolloutClient(door)) for _ in range(2))
            self._processes.wait_ready(self._client)
            self._client.set_weight_version(version)
            self._tester = Tester(testing, self._start.seed, settings.test_prompts)
            self._display.begin("training", settings.steps, self._start.step)
            self.train(pusher, range(self._start.step, settings.steps))
            if settings.test_every:
                self._tester.start(self._start.step + len(self.steps))
                self._take_tests(self._tester.finish())
        self._measure_learning()

    def _open(self, step: int) -> None:
        if self._settings.test_every and step % self._settings.test_every == 0 and not self._measures(step):
            self._tester.start(step)
        self._open_batch()

    def _open_batch(self) -> None:
        settings = self._settings
        self._batch = self._client.open_batch(
            settings.groups,
            settings.group_size,
            keep="informative",
            carry="running",
            max_staleness=settings.max_staleness,
        )
        self._opened_s = self._clock()
        self._batch.feed(islice(self._prompts, PROMPTS_PER_GROUP * settings.groups))

    def _collect(self) -> Collected:
        batch, groups = self._batch, []
        while True:
            self._processes.check()
            try:
                group = batch.next_group(POLL_S)
            except RequestTimeout:
                self._display.collecting(batch.status)
                continue
            if group is None:
                break
            groups.append(group)
            self._display.collecting(batch.status)
        met_s = self._clock()
        batch.close()
        report = batch.report
        assert report is not None
        parts = (report.kept.reward, report.dropped.reward)
        record = BatchRecord(
            reward=sum(part.mean * part.count for part in parts) / max(sum(part.count for part in parts), 1),
            rollouts=report.completed,
            kept_groups=report.kept_groups,
            dropped_groups=report.dropped_groups,
            unused_rollouts=sum(report.wasted.values()),
            opened_s=self._opened_s,
            met_s=met_s,
        )
        return Collected(groups, report, record)

    def _accept(self, step: int, batch: Collected) -> bool:
        self._take_tests(self._tester.collect())
        if not batch.groups:
            self._display.say(
                "no prompt is left on which the policy's rollouts differ: it has learned what it can here"
            )
            return False
        if self._measures(step):
            self._open_batch()
            self.alone.append(self._collect().record)
        return True

    def _measures(self, step: int) -> bool:
        """Return whether a step is one of the last, whose batch is compared with one that nobody learns beside."""
        return step >= max(self._settings.steps - self._settings.measure, self._start.step + 1)

    def _learn(self, batch: Collected) -> LearnStats:
        self._position = self._prompts.position
        stats = self._learner.learn(batch.groups, self._check_stop)
        self._recent = [*self._recent, batch.groups][-max(self._settings.measure, 1) :]
        return stats

    def _save_checkpoint(self, step: int) -> None:
        start = self._start
        checkpoint = Checkpoint(step + 1, start.session, start.seed, self._position, self._learner.state())
        checkpoint.save(self._out / CHECKPOINT)

    def _made(self, step: Step[Collected, LearnStats]) -> None:
        batch = step.batch.record
        record = StepRecord(
            step=step.number,
            batch=batch,
            learn_from_s=step.learn_from_s,
            learned_s=step.learned_s,
            pushed_s=step.pushed_s,
            wait_s=max(0.0, batch.met_s - (self.steps[-1].pushed_s if self.steps else batch.opened_s)),
            learn_s=step.learned_s - step.learn_from_s,
            step_s=step.ready_s - batch.opened_s,
            stats=step.stats,
        )
        self.steps.append(record)
        append_step(self._out, record)
        self._display.stepped(record, self._settings.steps)
        if self._tracker.is_on:
            self._log(step.batch, record)

    def _log(self, batch: Collected, record: StepRecord) -> None:
        rollouts = [trajectory for group in batch.groups for trajectory in group.trajectories]
        seconds = {"step": record.step_s, "learn": record.learn_s, "wait": record.wait_s}
        values = {f"learn/{name}": float(value) for name, value in asdict(record.stats).items()}
        values |= {f"seconds/{name}": value for name, value in seconds.items()}
        self._tracker.log(batch_values(batch.report) | rollout_values(rollouts, record.step) | values, record.step)
        if record.step % SAMPLES_EVERY == 0:
            chat = load_chat(self._tokenizer)
            texts = sample_conversations(rollouts, lambda ids: chat.decode(np.array(ids, np.int32)))
            self._tracker.samples(texts, record.step)

    def _take_tests(self, tests: list[Exam]) -> None:
        self.tests += tests
        for test in tests:
            self._display.tested(test)

    def _measure_learning(self) -> None:
        """Learn from the last batches again, now that the service is down; the checkpoint has what was learned."""
        if not self._settings.measure:
            return
        self._display.begin("measuring learning alone", len(self._recent))
        for number, groups in enumerate(self._recent):
            began = time.monotonic()
            self._learner.learn(groups)
            self.learn_alone_s.append(time.monotonic() - began)
            self._display.advance(number + 1)

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise Interrupted
