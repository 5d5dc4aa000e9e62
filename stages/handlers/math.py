"""The `math` task: a problem, and a ground truth that the policy's last words are compared with by `math-verify`.

Grading is sympy work on text that a model wrote, so it may take for ever or bring its process down: it runs in a child
process of the EVAL stage process (`math_grader`), under math-verify's own time limits.
"""

from __future__ import annotations

import msgspec

from ...inference.chat import ChatMessage
from ...trajectory import Role
from ..handler import AgentHandler, Carry, EvalPhase, Evaluation, RunPhase
from .math_grader import MathGrader

SYSTEM_MESSAGE = "Solve the problem. Put the final answer in \\boxed{}."


class MathInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One math problem."""

    problem: str
    """The user message."""
    ground_truth: str
    """The right answer: LaTeX or a plain expression."""


class MathHandler(AgentHandler[MathInstance]):
    """Runs and judges `math` jobs."""

    task = "math"
    instance_type = MathInstance

    def __init__(self) -> None:
        self._grader = MathGrader()

    async def run(self, phase: RunPhase[MathInstance]) -> Carry:
        """Let the policy answer; it has no tools."""
        episode = await phase.converse(
            [ChatMessage(Role.SYSTEM, SYSTEM_MESSAGE), ChatMessage(Role.USER, phase.instance.problem)], []
        )
        return {"answer": episode.last_text}

    async def eval(self, phase: EvalPhase[MathInstance]) -> Evaluation:
        """Compare the answer with the ground truth: reward 1.0 if they are equal, 0.0 if not."""
        right = await self._grader.grade(phase.instance.ground_truth, str(phase.carry.get("answer", "")))
        return Evaluation(1.0 if right else 0.0)

    async def close(self) -> None:
        """End the grader's child process."""
        self._grader.close()
