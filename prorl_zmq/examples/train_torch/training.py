"""The training loop: rollouts of the next batch run while the learner works on this one.

    service   ├── batch 1 ──────────┤├── batch 2 ──────────┤├── batch 3 …
    learner                          ├── batch 1 ──┤ push   ├── batch 2 ──┤ push

The main thread opens a batch as soon as the one before it is full, feeds it prompts and collects its groups. A thread
of its own learns, writes a checkpoint and then the weights, and has the engine serve them; running generations continue
with the new weights (`keep`). The next batch is opened when the learner is done with the last one, so it is never more
than one behind and rollouts are at most a few versions old; `max_staleness` drops what is older. What a batch leaves
unfinished continues into the next.

Each thread has a client of its own, the tests a third. A run that is stopped, or killed, continues from its last
checkpoint; the service's journal lies in the same folder, and under the checkpoint's session are the groups that were
under way.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, NamedTuple

from ...client.blocking.client import RolloutClient
from .checkpoint import Checkpoint
from .learner import Interrupted, Learner, LearnerSettings
from .records import BatchRecord, Exam, StepRecord, append_step
from .rollouts import Rollouts
from .service import Processes
from .tasks import PromptStream
from .testing import Tester
from .weights import save_weights

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from ...data.group import Group
    from .display import Display
    from .learner import LearnStats

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How a run trains."""

    steps: int = 40
    groups: int = 8
    """Groups of a batch whose rewards differ."""
    group_size: int = 8
    max_staleness: int = 4
    slots: int = 16
    """Conversations at once."""
    sandbox: str = "bubblewrap"
    test_every: int = 5
    """Steps between two tests; 0: none."""
    test_prompts: int = 20
    measure: int = 5
    """The last steps are measured: a batch is collected while nobody learns, beside each; 0: none."""
    learner: LearnerSettings = field(default_factory=LearnerSettings)


class _Learned(NamedTuple):
    """What the learner's thread gives back."""

    stats: LearnStats
    learned_s: float
    pushed_s: float


class _Learning(NamedTuple):
    """A step whose learning is under way."""

    step: int
    batch: BatchRecord
    ready_s: float
    """When its batch was full and the learning beside that was done."""
    from_s: float
    future: Future[_Learned]


class Training:
    """One process's part of a run."""

    def __init__(
        self, out: Path, tokenizer: Path, settings: RunSettings, start: Checkpoint, learner: Learner, display: Display
    ) -> None:
        self._out = out
        self._tokenizer = tokenizer
        self._settings = settings
        self._start = start
        self._learner = learner
        self._display = display
        self._prompts = PromptStream(start.seed, start.position)
        self._began = time.monotonic()
        self._stop = Event()
        """Set to have the learner give up what it does."""
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
        """Train until all steps are made, then measure.

        Raises:
            ProrlError: the service or the engine did not start, ended, or stopped answering.
        """
        settings, version = self._settings, self._learner.weight_version
        weights = self._save_weights()
        with ExitStack() as stack:
            processes = stack.enter_context(
                Processes(self._out, weights, version, self._tokenizer, settings.sandbox, settings.slots)
            )
            door = processes.front_door
            client = stack.enter_context(RolloutClient(door, session=self._start.session))
            pusher, testing = (stack.enter_context(RolloutClient(door)) for _ in range(2))
            processes.wait_ready(client)
            client.set_weight_version(version)
            thread = stack.enter_context(ThreadPoolExecutor(1, "learner"))
            stack.callback(self._stop.set)  # before the thread is waited for
            rollouts = Rollouts(
                client,
                self._prompts,
                settings.groups,
                settings.group_size,
                settings.max_staleness,
                self._clock,
                processes.check,
                self._display,
            )
            self._began = time.monotonic()
            self._train(rollouts, Tester(testing, self._start.seed, settings.test_prompts), pusher, thread)
        self._measure_learning()

    def _train(self, rollouts: Rollouts, tester: Tester, pusher: RolloutClient, thread: ThreadPoolExecutor) -> None:
        settings, display = self._settings, self._display
        display.begin("training", settings.steps, self._start.step)
        learning: _Learning | None = None
        self._open(rollouts, tester, self._start.step)
        for step in range(self._start.step, settings.steps):
            collected = rollouts.collect()
            if learning is not None:
                self._note(learning)
            ready_s = self._clock()
            self._take_tests(tester.collect())
            if not collected.groups:
                display.say("no prompt is left on which the policy's rollouts differ: it has learned what it can here")
                learning = None
                break
            if self._measures(step):
                rollouts.open()
                self.alone.append(rollouts.collect().record)
            if step + 1 < settings.steps:
                self._open(rollouts, tester, step + 1)
            future = thread.submit(self._learn, step, collected.groups, pusher)
            learning = _Learning(step, collected.record, ready_s, self._clock(), future)
        if learning is not None:
            self._note(learning)
        if settings.test_every:
            tester.start(self._start.step + len(self.steps))
            self._take_tests(tester.finish())

    def _measures(self, step: int) -> bool:
        """Say whether a step is one of the last, whose batch is compared with one that nobody learns beside."""
        return step >= max(self._settings.steps - self._settings.measure, self._start.step + 1)

    def _open(self, rollouts: Rollouts, tester: Tester, step: int) -> None:
        if self._settings.test_every and step % self._settings.test_every == 0 and not self._measures(step):
            tester.start(step)
        rollouts.open()

    def _learn(self, step: int, groups: list[Group], pusher: RolloutClient) -> _Learned:
        """Make one step and hand its weights over; in the learner's thread."""
        position = self._prompts.position
        stats = self._learner.learn(groups, self._check_stop)
        self._recent = [*self._recent, groups][-max(self._settings.measure, 1) :]
        old, weights = self._weights(self._learner.weight_version - 1), self._save_weights()
        checkpoint = Checkpoint(step + 1, self._start.session, self._start.seed, position, self._learner.state())
        # Before any rollout has these weights: a run that is resumed never meets tokens newer than its own weights.
        checkpoint.save(self._out / CHECKPOINT)
        learned_s = self._clock()
        pusher.update_weights(weights.absolute(), self._learner.weight_version)
        old.unlink(missing_ok=True)
        return _Learned(stats, learned_s, self._clock())

    def _note(self, learning: _Learning) -> None:
        """Wait for the end of a step, and write it down."""
        learned = learning.future.result()
        batch = learning.batch
        record = StepRecord(
            step=learning.step,
            batch=batch,
            learn_from_s=learning.from_s,
            learned_s=learned.learned_s,
            pushed_s=learned.pushed_s,
            wait_s=max(0.0, batch.met_s - (self.steps[-1].pushed_s if self.steps else batch.opened_s)),
            learn_s=learned.learned_s - learning.from_s,
            step_s=learning.ready_s - batch.opened_s,
            stats=learned.stats,
        )
        self.steps.append(record)
        append_step(self._out, record)
        self._display.stepped(record, self._settings.steps)

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

    def _save_weights(self) -> Path:
        path = self._weights(self._learner.weight_version)
        path.parent.mkdir(exist_ok=True)
        save_weights(self._learner.model, path)
        return path

    def _weights(self, version: int) -> Path:
        return self._out / "weights" / f"{version}.safetensors"

    def _clock(self) -> float:
        return time.monotonic() - self._began

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise Interrupted
