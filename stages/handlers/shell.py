"""The `shell` task: an instruction, initial files, tools, and a check script that decides the reward."""

from __future__ import annotations

import msgspec

from ...tools.containers.specification import OutputLimit, SandboxSpec
from ...tools.processes.output import OUTPUT_LIMIT_BYTES
from ...tools.toolbox import Toolbox, ToolName
from ..handler import AgentHandler, EvalPhase, Evaluation, InitPhase, PhaseData, RunPhase
from .check_script import CheckScript, checked_files
from .tool_episode import run_episode

SYSTEM_MESSAGE = "Work in bash."


class ShellInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One shell task."""

    instruction: str
    """What the agent is asked to do: the user message."""
    check: CheckScript
    files: dict[str, str] = {}
    """Text files to place in the working directory before the agent starts: relative path to content."""
    image: str = ""
    """The sandbox's root filesystem, as `prorl image list` of the node names it, or a path below one of the service's
    `image_folders`; empty: the service's default."""
    tools: tuple[ToolName, ...] = ("bash",)
    """What the agent may call."""
    output_limit_bytes: OutputLimit = OUTPUT_LIMIT_BYTES
    """How much of the output of one bash command or IPython cell the agent sees (see `SandboxSpec`)."""


class ShellHandler(AgentHandler[ShellInstance]):
    task = "shell"
    instance_type = ShellInstance
    eval_in_sandbox = True

    async def init(self, phase: InitPhase[ShellInstance]) -> PhaseData:
        instance = phase.instance
        spec = SandboxSpec(image=instance.image, output_limit_bytes=instance.output_limit_bytes)
        sandbox = await phase.create_sandbox(spec)
        if instance.files:
            await sandbox.write_files({path: content.encode() for path, content in instance.files.items()})
        return {"sessions": await Toolbox(sandbox, instance.tools).start()}

    async def run(self, phase: RunPhase[ShellInstance]) -> PhaseData:
        await run_episode(phase, phase.instance.tools, SYSTEM_MESSAGE, phase.instance.instruction)
        return {}

    async def eval(self, phase: EvalPhase[ShellInstance]) -> Evaluation:
        """Run the check script on a copy of the agent's files; files that cannot be copied or checked earn 0."""
        return await checked_files(phase, phase.instance.check)
