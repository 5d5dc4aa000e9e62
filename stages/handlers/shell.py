"""The `shell` task: an instruction, files to start from, tools to work with, and a check script that gives the reward.

EVAL never trusts the agent's sandbox: the check runs in a fresh one made from a copy of the agent's files, so nothing
that the agent left running can take part, and a second evaluation finds what the first one found. The copy has regular
files, folders, and links among these. The script may read them but must not run them, and its environment points no
home and no start-up file at them. Its text is in no file and on no command line.
"""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from msgspec import Meta

from ...errors import HandlerFailed, SandboxFailed
from ...tools.output import OUTPUT_LIMIT_BYTES
from ...tools.sandbox.sandbox import CHECK_ENVIRONMENT
from ...tools.sandbox.specification import OutputLimit, SandboxSpec
from ...tools.toolbox import Toolbox, ToolName
from ...wire.messages.base import new_id
from ..handler import AgentHandler, EvalPhase, Evaluation, InitPhase, PhaseData, RunPhase
from .tool_episode import run_episode

COPY_SHARE, CHECK_SHARE = 0.5, 0.9
"""Until which shares of EVAL's limit the files are copied, and the check runs: both must end with a reward."""
SYSTEM_MESSAGE = "Work in bash."
REWARD_PREFIX = "reward: "
CHECK_OUTPUT_LIMIT_BYTES = 64 * 1024


class ShellInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One shell task."""

    instruction: str
    """What the agent is asked to do: the user message."""
    check: Annotated[str, Meta(min_length=1)]
    """Bash script, run in a copy of the files that the agent left. The reward is 0.0 if its exit code is not 0, else
    1.0, or X if the last line that it prints is `reward: X`, with X from 0 to 1."""
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
        """Run the check script on a copy of the agent's files; files that no one could copy or check earn nothing."""
        limit_s, started = phase.job.limits.eval_s, time.monotonic()
        if phase.sandbox is None:
            raise SandboxFailed("a shell job needs its sandbox, and has none")
        try:
            copy = await phase.sandbox.copy(f"{phase.job.job_id}.check-{new_id()[:8]}", COPY_SHARE * limit_s)
        except SandboxFailed as error:
            if error.fields.get("reason") != "tree":
                raise
            return Evaluation(0.0, {"uncopyable_files": 1.0})
        try:
            result = await copy.exec(
                ["bash", "-c", 'check=$(cat); exec </dev/null; eval "$check"'],
                stdin=phase.instance.check.encode(),
                timeout_s=CHECK_SHARE * limit_s - (time.monotonic() - started),
                output_limit_bytes=CHECK_OUTPUT_LIMIT_BYTES,
                environment=CHECK_ENVIRONMENT,
            )
        finally:
            await copy.close()
        if result.timed_out:
            return Evaluation(0.0, {"check_timed_out": 1.0})
        return Evaluation(check_reward(result.stdout.decode(errors="replace"), result.exit_code))


def check_reward(output: str, exit_code: int) -> float:
    """Return the reward that a check script's output and exit code stand for (see `ShellInstance.check`)."""
    if exit_code != 0:
        return 0.0
    last = output.rstrip("\n").rpartition("\n")[2]
    if not last.startswith(REWARD_PREFIX):
        return 1.0
    try:
        reward = float(last.removeprefix(REWARD_PREFIX))
    except ValueError:
        reward = -1.0
    if not 0.0 <= reward <= 1.0:
        raise HandlerFailed(f"the check script's last line is {last[:200]!r}; the reward must be from 0 to 1")
    return reward
