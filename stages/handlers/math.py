r"""The `math` task: a problem, tools if it has any, and a ground truth that the final answer is compared with.

The answer is the last `\boxed{}`, or the finish tool's message, or what `math-verify` finds in the last words. It is
compared in a grader process (`math_answers.py`), since it may be made to take for ever. A problem without tools that
need one has no sandbox.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ...data.trajectory import Role
from ...errors import HandlerFailed
from ...inference.chat import ChatMessage
from ...tasks.math import ROW_FORMATS, MathInstance
from ...tools.sandbox.specification import SandboxSpec
from ...tools.think_and_finish import FinishTool, ThinkTool
from ...tools.toolbox import Toolbox
from ..handler import AgentHandler, EvalPhase, Evaluation, InitPhase, PhaseData, RunPhase
from .math_answers import answer_of, right_answer, usable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...tasks.row_format import RowFormat
    from ...tools.sandbox.sandbox import Sandbox
    from ...tools.tool import Tool
    from ...tools.toolbox import ToolName

SYSTEM_MESSAGE = "Solve the problem. Put the final answer in \\boxed{}."
FINISH_MESSAGE = " Then call finish with it."
"""What the system message says besides to who has the finish tool."""
GRADE_S = 30.0
"""How long comparing may take: a second of processor time, and a start of sympy, on a machine that is busy."""
IN_SANDBOX = frozenset({"bash", "ipython"})
"""The tools that need a sandbox."""


class MathHandler(AgentHandler[MathInstance]):
    task = "math"
    instance_type = MathInstance
    row_formats: ClassVar[tuple[RowFormat, ...]] = ROW_FORMATS

    async def init(self, phase: InitPhase[MathInstance]) -> PhaseData:
        check_ground_truth(phase.instance.ground_truth)
        return await start_tools(phase, phase.instance.tools, phase.instance.image)

    async def run(self, phase: RunPhase[MathInstance]) -> PhaseData:
        instance = phase.instance
        tools = make_tools(phase.sandbox, instance.tools, phase.carry.get("sessions", {}))
        system = SYSTEM_MESSAGE + (FINISH_MESSAGE if "finish" in instance.tools else "")
        opening = [ChatMessage(Role.SYSTEM, system), ChatMessage(Role.USER, instance.problem)]
        episode = await phase.converse(opening, tools)
        for tool in tools:
            await tool.close()
        return {"answer": answer_of(episode.final_message, episode.last_text)}

    async def eval(self, phase: EvalPhase[MathInstance]) -> Evaluation:
        """Compare the answer with the ground truth: reward 1.0 if they are equal, 0.0 if not."""
        truth = phase.instance.ground_truth
        check_ground_truth(truth)
        answer = str(phase.carry.get("answer", ""))
        right = await phase.grade(right_answer, truth, answer, timeout_s=GRADE_S, returns=bool)
        return Evaluation(1.0 if right else 0.0, notes={"answer": answer, "ground_truth": truth})


def check_ground_truth(ground_truth: str) -> None:
    """See that there is something to compare with."""
    if not usable(ground_truth):
        raise HandlerFailed("the instance's ground_truth is empty, so that no answer can be judged")


async def start_tools(phase: InitPhase[Any], names: Sequence[ToolName], image: str) -> PhaseData:
    """In INIT: make the sandbox, if any of the tools needs one, and start their sessions; return what RUN needs."""
    if not IN_SANDBOX & set(names):
        return {}
    sandbox = await phase.create_sandbox(SandboxSpec(image=image))
    return {"sessions": await Toolbox(sandbox, names).start()}


def make_tools(sandbox: Sandbox | None, names: Sequence[ToolName], sessions: Mapping[str, int]) -> list[Tool[Any]]:
    """In RUN: make the tools, on the sessions that `start_tools` started."""
    if IN_SANDBOX & set(names):
        return Toolbox(sandbox, names).tools(sessions)
    made: dict[str, Tool[Any]] = {"think": ThinkTool(), "finish": FinishTool()}
    return [made[name] for name in dict.fromkeys(names)]
