"""`Regrading`: computes the rewards of a stored run again with the graders of this installation.

Only EVAL is repeated, on the RUN data in each result's notes (`AgentHandler.stored_data`). Results go to a new run
folder, with the differences in `differences.jsonl`; the old folder is only read. A rollout whose data are not stored,
or whose grader fails, keeps its reward and is counted.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import ConfigError, ProrlError, SandboxFailed
from ..stages.grading.grader_pool import GraderPool
from ..stages.handler import EvalPhase
from ..stages.judge import judge_of_endpoints
from ..stages.other_models import ChatEndpoints
from ..stages.phase_ends import notes_of, reward_of, rewards_of
from ..tools.sandbox.sandboxes import Sandboxes
from ..wire.messages.base import new_id
from ..wire.messages.jobs import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..stages.handler import AgentHandler, Evaluation
    from ..tools.containers.specification import SandboxSpec
    from ..tools.sandbox.sandbox import Sandbox
    from .problems import Problem
    from .run_folder import RunFolder, Sample

DIFFERENCES = "differences.jsonl"


class Difference(msgspec.Struct, frozen=True):
    """A rollout whose reward has changed."""

    job_id: str
    problem: str
    before: float | None
    after: float


@dataclass(slots=True)
class Regrading:
    """Regrades the samples of one run into another folder.

    Args:
        samples: the old run's.
        source: the old run's folder.
        folder: the new run, open and empty.
        problems: those of the run's data file.
        handlers: by task.
        sandbox: the kind of the sandboxes in which tests run.
        image: their root filesystem, where a job names none.
    """

    samples: Sequence[Sample]
    source: Path
    folder: RunFolder
    problems: Sequence[Problem]
    handlers: Mapping[str, AgentHandler[Any]]
    sandbox: str
    image: str = ""
    differences: list[Difference] = field(default_factory=list, init=False)
    same: int = field(default=0, init=False)
    not_stored: int = field(default=0, init=False)
    not_judged: int = field(default=0, init=False)
    """Rollouts without a reward of EVAL, such as infrastructure errors."""
    failed: list[tuple[str, str]] = field(default_factory=list, init=False)
    """Job ids, and why their graders failed."""
    _endpoints: ChatEndpoints = field(default_factory=ChatEndpoints, init=False)

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="prorl-regrade-") as place:
            sandboxes = Sandboxes(self.sandbox, Path(place) / "sandboxes", image=self.image)
            waiting = iter(self.samples)
            try:
                async with GraderPool() as pool, asyncio.TaskGroup() as group:
                    count = len(os.sched_getaffinity(0))
                    workers = [group.create_task(self._work(waiting, pool, sandboxes)) for _ in range(count)]
                    await asyncio.wait(workers)
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
            finally:
                sandboxes.close()
                await self._endpoints.close()
                for handler in self.handlers.values():
                    await handler.close()
        self.differences.sort(key=lambda one: one.job_id)
        lines = [msgspec.json.encode(one).decode() + "\n" for one in self.differences]
        self.folder.write(DIFFERENCES, "".join(lines))

    async def _work(self, waiting: Any, pool: GraderPool, sandboxes: Sandboxes) -> None:
        for sample in waiting:
            self.folder.add_copy(await self._regraded(sample, pool, sandboxes), self.source)

    def _problem(self, sample: Sample) -> Problem:
        if not 0 <= sample.index.problem < len(self.problems):
            message = f"{self.source} has a result of problem {sample.index.problem}, which its data file has not"
            raise ConfigError(message, key="run")
        return self.problems[sample.index.problem]

    async def _regraded(self, sample: Sample, pool: GraderPool, sandboxes: Sandboxes) -> Sample:
        result = sample.result
        if result.outcome != Outcome.COMPLETED:
            self.not_judged += 1
            return sample
        job = msgspec.structs.replace(self._problem(sample).job, job_id=result.job_id)
        handler = self.handlers.get(job.task)
        if handler is None:
            raise ConfigError(f"no handler of the task {job.task!r} is installed here", key="task")
        fresh: list[Sandbox] = []

        async def create(spec: SandboxSpec) -> Sandbox:
            fresh.append(await sandboxes.create(f"regrade-{new_id()[:12]}", spec))
            return fresh[-1]

        try:
            instance = handler.parse_instance(job)
            data = handler.stored_data(instance, result.notes)
            if data is None:
                self.not_stored += 1
                return sample
            judge = judge_of_endpoints(job, self._endpoints)
            phase = EvalPhase(job, instance, data, None, create, pool.call, judge)
            evaluation: Evaluation = handler.final_result(job, await handler.eval(phase))
            reward = reward_of(evaluation)
            rewards = rewards_of(evaluation, [part.name for part in result.conversations])
        except ProrlError as error:
            self.failed.append((result.job_id, error.message))
            return sample
        finally:
            for each in fresh:
                with suppress(SandboxFailed):
                    await each.close()
        if reward == result.reward:
            self.same += 1
        else:
            self.differences.append(Difference(result.job_id, sample.problem, result.reward, reward))
        return msgspec.structs.replace(
            sample,
            result=msgspec.structs.replace(
                result,
                reward=reward,
                conversations=tuple(
                    msgspec.structs.replace(part, reward=rewards.get(part.name)) for part in result.conversations
                ),
                metrics={**result.metrics, **evaluation.metrics},
                notes={**result.notes, **notes_of({**judge.notes, **evaluation.notes})},
            ),
        )
