"""Helpers of the package's tasks: tool sessions that INIT starts, and RUN's episode with tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...data.trajectory import Role
from ...inference.chat import ChatMessage
from ...tools.containers.specification import SandboxSpec
from ...tools.think_and_finish import FinishTool, ThinkTool
from ...tools.toolbox import Toolbox

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...tools.tool import Tool
    from ...tools.toolbox import ToolName
    from ..episode import Episode
    from ..handler import InitPhase, PhaseData, RunPhase

WITHOUT_SANDBOX: dict[str, type[Tool[Any]]] = {"think": ThinkTool, "finish": FinishTool}


async def start_tools(phase: InitPhase[Any], names: Sequence[ToolName], image: str) -> PhaseData:
    """Make the sandbox, if any of the tools needs one, and start their sessions; return the data for `run_episode`."""
    if set(names) <= WITHOUT_SANDBOX.keys():
        return {}
    sandbox = await phase.create_sandbox(SandboxSpec(image=image))
    return {"sessions": await Toolbox(sandbox, names).start()}


async def run_episode(
    phase: RunPhase[Any], names: Sequence[ToolName], system: str, user: str, more_tools: Sequence[Tool[Any]] = ()
) -> Episode:
    """Run the agent on a system and a user message, with the tools `names` and `more_tools`; close these."""
    tools = list(more_tools)
    if set(names) <= WITHOUT_SANDBOX.keys():
        tools += [WITHOUT_SANDBOX[name]() for name in dict.fromkeys(names)]
    else:
        tools += Toolbox(phase.sandbox, names).tools(phase.data["sessions"])
    episode = await phase.converse([ChatMessage(Role.SYSTEM, system), ChatMessage(Role.USER, user)], tools)
    for tool in tools:
        await tool.close()
    return episode
