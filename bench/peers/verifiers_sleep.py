"""A taskset and a harness for `verifiers`: a rollout sleeps, in the worker's own process, and calls no model."""

from __future__ import annotations

import asyncio
from typing import Any

from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.task import Task, TaskData
from verifiers.v1.taskset import Taskset

__all__ = ["SleepHarness", "SleepTaskset"]


class SleepData(TaskData):
    """One job."""

    run_s: float = 0.0


class SleepTask(Task[SleepData]):
    """No tools, no rewards."""


class SleepTaskset(Taskset[SleepTask]):
    """The client has the jobs."""

    def load(self) -> list[SleepTask]:
        """Give none."""
        return []


class SleepHarness(Harness[HarnessConfig]):
    """Sleeps for as long as the job says."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx: Any, trace: Any, *_: Any, **__: Any) -> ProgramResult:
        """Sleep."""
        del ctx
        await asyncio.sleep(trace.task.data.run_s)
        return ProgramResult(exit_code=0, stdout="", stderr="")
