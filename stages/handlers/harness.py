"""The `harness` task: a prompt for an agent program, initial files or an image, and a judge of the result.

A check script judges, as in the `shell` task, or the grader of another task, which then also prepares the sandbox.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from ...data.trajectory import Role
from ...errors import ConfigError, InvalidJob
from ...inference.chat import ChatMessage
from ...tools.containers.specification import SandboxSpec
from ...wire.messages.jobs import Harness, Job
from ..handler import AgentHandler, EvalPhase, Evaluation, InitPhase, PhaseData, RunPhase, load_handlers
from .check_script import checked_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...tools.tool import AnyTool
    from ..episode import Episode


class Grader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another task, whose INIT and EVAL are used."""

    task: str
    instance: dict[str, Any]


class HarnessInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One task for an agent program."""

    prompt: str
    """What it is asked to do."""
    harness: Harness | str | None = None
    """The program, or only its name; None: the job's own `harness`."""
    check: str = ""
    """Bash script that gives the reward, as in the `shell` task."""
    grader: Grader | None = None
    """In place of `check`: what of another task prepares the sandbox and judges."""
    files: dict[str, str] = {}
    """Text files to place in the working directory before: relative path to content."""
    image: str = ""
    """The sandbox's root filesystem, as in the `shell` task."""

    def __post_init__(self) -> None:
        if bool(self.check) == (self.grader is not None):
            raise ValueError("give one of check and grader")
        if self.grader is not None and self.image:
            raise ValueError("with a grader, the image is its instance's")


class HarnessHandler(AgentHandler[HarnessInstance]):
    task = "harness"
    instance_type = HarnessInstance
    eval_in_sandbox = True

    def harness(self, job: Job, instance: HarnessInstance) -> Harness:
        named = job.harness if job.harness is not None else instance.harness
        if named is None:
            raise InvalidJob(
                "a job of the task harness names one, in its instance or in its own field", field="harness"
            )
        return Harness.of(named)

    async def init(self, phase: InitPhase[HarnessInstance]) -> PhaseData:
        instance = phase.instance
        data: PhaseData = {}
        if instance.grader is not None:
            handler, inner = self._graded_by(phase.job, instance.grader)
            data = await handler.init(replace(phase, instance=inner))
        sandbox = await phase.create_sandbox(SandboxSpec(image=instance.image))
        if instance.files:
            await sandbox.write_files({path: content.encode() for path, content in instance.files.items()})
        return data

    async def run(self, phase: RunPhase[HarnessInstance]) -> PhaseData:
        instance = phase.instance
        messages = [ChatMessage(Role.USER, instance.prompt)]
        if instance.grader is None:
            await phase.converse(messages, ())
            return {}

        async def converse(_messages: Sequence[ChatMessage], tools: Sequence[AnyTool]) -> Episode:
            return await phase.converse(messages, tools)

        handler, inner = self._graded_by(phase.job, instance.grader)
        return await handler.run(replace(phase, instance=inner, converse=converse))

    def stored_data(self, instance: HarnessInstance, notes: Mapping[str, str]) -> PhaseData | None:
        if instance.grader is None:
            return None
        handler, inner = self._graded_by(Job(task=self.task, instance={}), instance.grader)
        return handler.stored_data(inner, notes)

    async def eval(self, phase: EvalPhase[HarnessInstance]) -> Evaluation:
        grader = phase.instance.grader
        if grader is None:
            return await checked_files(phase, phase.instance.check)
        handler, inner = self._graded_by(phase.job, grader)
        return await handler.eval(replace(phase, instance=inner))

    def _graded_by(self, job: Job, grader: Grader) -> tuple[AgentHandler[Any], Any]:
        """Return the handler of the grader's task, of a file or of a package, and the grader's instance.

        Raises:
            InvalidJob: this process does not have the task, or the instance does not fit it.
        """
        try:
            handler = self.file_tasks.get(grader.task) or _handler(grader.task)
        except ConfigError as error:
            own = ", ".join(sorted(self.file_tasks)) or "none"
            words = f"the grader's task is not known: {error.message}; of files (--task-module): {own}"
            raise InvalidJob(words, job_id=job.job_id, field="grader.task") from error
        return handler, handler.parse_instance(msgspec.structs.replace(job, instance=grader.instance))


@cache
def _handler(task: str) -> AgentHandler[Any]:
    return load_handlers([task])[task]
