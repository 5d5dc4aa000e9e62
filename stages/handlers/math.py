r"""The `math` task: a problem, optional tools, and a ground truth that the final answer is compared with.

The answer is the last `\boxed{}`, or the finish tool's message, or what `math-verify` finds in the last message. A
sandbox is made only for tools that need one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ...errors import HandlerFailed
from ...tasks.math import ROW_FORMATS, MathInstance
from ..handler import AgentHandler, EvalPhase, Evaluation, InitPhase, PhaseData, RunPhase
from .math_answers import answer_of, right_answer, usable
from .tool_episode import run_episode, start_tools

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...tasks.row_format import RowFormat

SYSTEM_MESSAGE = "Solve the problem. Put the final answer in \\boxed{}."
FINISH_MESSAGE = " Then call finish with it."
"""Added to the system message if the policy has the finish tool."""
GRADE_S = 30.0
"""Seconds for a comparison: a second of processor time, and a start of sympy, on a busy machine."""


class MathHandler(AgentHandler[MathInstance]):
    task = "math"
    instance_type = MathInstance
    row_formats: ClassVar[tuple[RowFormat, ...]] = ROW_FORMATS

    async def init(self, phase: InitPhase[MathInstance]) -> PhaseData:
        check_ground_truth(phase.instance.ground_truth)
        return await start_tools(phase, phase.instance.tools, phase.instance.image)

    async def run(self, phase: RunPhase[MathInstance]) -> PhaseData:
        instance = phase.instance
        system = SYSTEM_MESSAGE + (FINISH_MESSAGE if "finish" in instance.tools else "")
        episode = await run_episode(phase, instance.tools, system, instance.problem)
        return {"answer": answer_of(episode.final_message, episode.last_text)}

    def stored_data(self, instance: MathInstance, notes: Mapping[str, str]) -> PhaseData | None:
        del instance
        return {"answer": notes["answer"]} if "answer" in notes else None

    async def eval(self, phase: EvalPhase[MathInstance]) -> Evaluation:
        """Compare the answer with the ground truth: reward 1.0 if they are equal, 0.0 if not."""
        truth = phase.instance.ground_truth
        check_ground_truth(truth)
        answer = str(phase.data.get("answer", ""))
        right = await phase.grade(right_answer, truth, answer, timeout_s=GRADE_S, returns=bool)
        return Evaluation(1.0 if right else 0.0, notes={"answer": answer, "ground_truth": truth})


def check_ground_truth(ground_truth: str) -> None:
    if not usable(ground_truth):
        raise HandlerFailed("the instance's ground_truth is empty, so that no answer can be judged")
