"""The loop of a trainer: collect a batch, learn from it, have the engines serve the new weights.

`prorl demo` makes one step after the other, so that all rollouts are of the newest weights. `examples.train_torch`
overlaps them: the next batch is collected while the learner works on this one, and never more than one ahead.

    service   ├── batch 1 ──────────┤├── batch 2 ──────────┤├── batch 3 …
    learner                          ├── batch 1 ──┤ push   ├── batch 2 ──┤ push

The main thread opens batches and collects them. A thread of its own learns, saves the weights, and updates the engines.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from threading import Event
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from ..client.blocking.client import RolloutClient

Batch = TypeVar("Batch")
Stats = TypeVar("Stats")
SUMMARY = "summary.json"


class Learner(Protocol):
    weight_version: int
    """How many batches the weights have learned from."""

    def save(self, folder: Path) -> Path:
        """Write the weights to a file of their version; return its path."""


@dataclass(frozen=True, slots=True)
class Step(Generic[Batch, Stats]):
    """A step that was made; times are seconds since training began."""

    number: int
    batch: Batch
    stats: Stats
    ready_s: float
    """When its batch was full and the learning beside that was done."""
    learn_from_s: float
    learned_s: float
    pushed_s: float
    """When the engines served the new weights."""


class Trainer(ABC, Generic[Batch, Stats]):
    overlaps = False

    def __init__(self, out: Path, learner: Learner) -> None:
        self._learner = learner
        self._folder = out / "weights"
        self._folder.mkdir(parents=True, exist_ok=True)
        self.weights = learner.save(self._folder)
        """The file that the engines serve."""
        self._began = time.monotonic()
        self._stop = Event()
        """Set to have the learner stop on the way, if it can."""

    def train(self, client: RolloutClient, steps: range) -> None:
        """Make these steps; `client` updates the engines, from the learner's thread."""
        self._began = time.monotonic()
        learning: Future[Step[Batch, Stats]] | None = None
        with ExitStack() as stack:
            thread = stack.enter_context(ThreadPoolExecutor(1, "learner"))
            stack.callback(self._stop.set)  # before the thread is waited for
            for number in steps:
                if number == steps.start or not self.overlaps:
                    self._open(number)
                batch = self._collect()
                if learning is not None:
                    self._made(learning.result())
                    learning = None
                ready_s = self._clock()
                if not self._accept(number, batch):
                    break
                if self.overlaps and number + 1 in steps:
                    self._open(number + 1)
                step = thread.submit(self._advance, client, number, batch, ready_s)
                if self.overlaps:
                    learning = step
                else:
                    self._made(step.result())
            if learning is not None:
                self._made(learning.result())

    @abstractmethod
    def _open(self, step: int) -> None:
        """Have the service begin with a step's batch."""

    @abstractmethod
    def _collect(self) -> Batch:
        """Wait for the batch that is open."""

    @abstractmethod
    def _learn(self, batch: Batch) -> Stats: ...

    @abstractmethod
    def _made(self, step: Step[Batch, Stats]) -> None:
        """Note the end of a step."""

    def _accept(self, step: int, batch: Batch) -> bool:  # noqa: ARG002
        """Look at a batch before it is learned from; false ends the training."""
        return True

    def _save_checkpoint(self, step: int) -> None:
        """Save what a later run continues from, before any rollout has the new weights; in the learner's thread."""

    def _clock(self) -> float:
        return time.monotonic() - self._began

    def _advance(self, client: RolloutClient, step: int, batch: Batch, ready_s: float) -> Step[Batch, Stats]:
        from_s = self._clock()
        stats = self._learn(batch)
        served, self.weights = self.weights, self._learner.save(self._folder)
        self._save_checkpoint(step)
        learned_s = self._clock()
        client.update_weights(self.weights.absolute(), self._learner.weight_version)
        served.unlink(missing_ok=True)
        return Step(step, batch, stats, ready_s, from_s, learned_s, self._clock())


def write_summary(out: Path, summary: Any) -> None:
    """Write a dataclass of figures to `summary.json`."""
    (out / SUMMARY).write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
