"""Tests of the policy while it trains: some jobs at temperature 0, submitted beside the batches and collected later."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ...errors import RequestTimeout
from ...wire.messages.base import new_id
from .records import Exam
from .tasks import held_out_jobs

if TYPE_CHECKING:
    from ...client.blocking.client import RolloutClient
    from ...data.trajectory import Trajectory

WAIT_S = 60.0
"""Longest wait, at the end of a run, for the last jobs."""


class Tester:
    def __init__(self, client: RolloutClient, seed: int, prompts: int) -> None:
        self._client = client
        self._seed = seed
        self._prompts = prompts
        self._steps: dict[str, int] = {}
        """At which step each test that is under way began, by the beginning of its jobs' ids."""
        self._ended: defaultdict[str, list[Trajectory]] = defaultdict(list)

    def start(self, step: int) -> None:
        name = f"test-{new_id()[:12]}"
        self._steps[name] = step
        self._client.submit(held_out_jobs(self._seed, self._prompts, name))

    def collect(self) -> list[Exam]:
        """Return the tests that have ended since the last call."""
        while ended := self._client.collect(wait_s=0.0):
            for trajectory in ended:
                self._ended[trajectory.job_id.rpartition("-")[0]].append(trajectory)
        whole = [name for name in self._steps if len(self._ended[name]) == self._prompts]
        return [_record(self._steps.pop(name), self._ended.pop(name)) for name in whole]

    def finish(self) -> list[Exam]:
        """Wait for all that are under way; what does not end in time is left out."""
        records: list[Exam] = []
        try:
            for trajectory in self._client.stream(timeout_s=WAIT_S):
                self._ended[trajectory.job_id.rpartition("-")[0]].append(trajectory)
                records += self.collect()
        except RequestTimeout:
            pass
        return records


def _record(step: int, trajectories: list[Trajectory]) -> Exam:
    """Jobs that brought no reward count for nothing."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.reward is not None:
            rewards[trajectory.result.task].append(trajectory.reward)
    return Exam(step=step, reward={task: sum(some) / len(some) for task, some in sorted(rewards.items())})
