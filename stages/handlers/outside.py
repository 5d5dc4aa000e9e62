"""The `outside` task: a program outside of the service leads the rollout and reports the reward."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from ...data.trajectory import Role
from ...errors import InvalidJob
from ...inference.chat import ChatMessage
from ..handler import AgentHandler, EvalPhase, Evaluation, PhaseData, RunPhase


class OutsideInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a program outside works on."""

    prompt: str = ""
    """The user message of its main conversation, which identifies it; the service sends it to no engine."""


class OutsideHandler(AgentHandler[OutsideInstance]):
    task = "outside"
    instance_type = OutsideInstance
    grades: ClassVar[bool] = False

    async def run(self, phase: RunPhase[OutsideInstance]) -> PhaseData:
        if phase.job.outside is None:
            raise InvalidJob(
                "a program outside leads the rollouts of this task: open one with `client.endpoint(job)` or "
                "`POST /v1/rollouts`",
                field="outside",
            )
        await phase.converse([ChatMessage(Role.USER, phase.instance.prompt)], ())
        return {}

    async def eval(self, phase: EvalPhase[OutsideInstance]) -> Evaluation:
        raise InvalidJob(f"no reward was reported for job {phase.job.job_id}, and its task does not judge")
