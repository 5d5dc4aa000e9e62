"""What a run shows: a progress bar with the last step's figures on a terminal, plain lines in a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from rich.console import Console

    from ...wire.messages.batches import BatchStatus
    from .records import Exam, StepRecord


class Display:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("", note="", start=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def begin(self, what: str, total: int, completed: int = 0) -> None:
        self._progress.reset(self._task, description=what, total=total, completed=completed, note="")

    def advance(self, completed: int, note: str = "") -> None:
        self._progress.update(self._task, completed=completed, note=note)

    def collecting(self, status: BatchStatus | None) -> None:
        if status is not None:
            self._progress.update(
                self._task, note=f"{status.kept} of {status.target_groups} groups kept, {status.in_flight} jobs run"
            )

    def stepped(self, record: StepRecord, steps: int) -> None:
        batch, stats = record.batch, record.stats
        self.advance(record.step + 1)
        self.say(
            f"step {record.step + 1:3d}/{steps}: reward {batch.reward:.3f} ± {batch.reward_error:.3f}, "
            f"{batch.rollouts} rollouts, groups kept {batch.kept_groups}, dropped {batch.dropped_groups}; "
            f"{record.step_s:.1f} s, learning {record.learn_s:.1f} s; entropy {stats.entropy:.3f}, "
            f"staleness {stats.staleness_mean:.1f}"
        )

    def tested(self, record: Exam) -> None:
        self.say(f"test after {record.step} steps: " + ", ".join(f"{t} {r:.2f}" for t, r in record.reward.items()))
