"""Run a check script, which judges the files that an agent left and returns the reward.

The script runs in a fresh sandbox on a copy of the agent's files: regular files, folders, and links among these. It
reads but never runs them, and its environment names no home or start-up file of theirs. The script's text is in no file
and on no command line.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from ...data.conversations import finite_reward
from ...errors import HandlerFailed, SandboxFailed
from ...tools.sandbox.sandbox import CHECK_ENVIRONMENT
from ...wire.messages.base import new_id
from ..handler import Evaluation

if TYPE_CHECKING:
    from ..handler import EvalPhase

COPY_SHARE, CHECK_SHARE = 0.5, 0.9
"""The shares of EVAL's limit at which the copy, and then the check, must end: both must end with a reward."""
REWARD_PREFIX = "reward: "
CHECK_OUTPUT_LIMIT_BYTES = 64 * 1024
NOTED = 2000
"""Characters of the end of a script's output, in the note `check` of a reward below 1."""

CheckScript = Annotated[str, Meta(min_length=1)]
"""Bash script, run in a copy of the files that the agent left. The reward is 0.0 if its exit code is not 0, else 1.0,
or X if the last line that it prints is `reward: X`, with X any finite number."""


async def checked_files(phase: EvalPhase[Any], check: str) -> Evaluation:
    """Run the check script on a copy of the agent's files; files that cannot be copied or checked earn 0."""
    limit_s, started = phase.job.limits.eval_s, time.monotonic()
    if phase.sandbox is None:
        raise SandboxFailed("the job needs its sandbox, and has none")
    try:
        copy = await phase.sandbox.copy(f"{phase.job.job_id}.check-{new_id()[:8]}", COPY_SHARE * limit_s)
    except SandboxFailed as error:
        if error.fields.get("reason") != "tree":
            raise
        return Evaluation(0.0, {"uncopyable_files": 1.0})
    try:
        result = await copy.exec(
            ["bash", "-c", 'check=$(cat); exec </dev/null; eval "$check"'],
            stdin=check.encode(),
            timeout_s=CHECK_SHARE * limit_s - (time.monotonic() - started),
            output_limit_bytes=CHECK_OUTPUT_LIMIT_BYTES,
            environment=CHECK_ENVIRONMENT,
        )
    finally:
        await copy.close()
    if result.timed_out:
        return Evaluation(0.0, {"check_timed_out": 1.0})
    output = result.stdout.decode(errors="replace")
    words = f"{output}{result.stderr.decode(errors='replace')}".strip()[-NOTED:]
    try:
        reward = check_reward(output, result.exit_code)
    except HandlerFailed as error:  # the agent's files may have produced the last output of the script
        return Evaluation(0.0, {"invalid_check_reward": 1.0}, {"check": f"{error.message}\n{words}"})
    if reward >= 1.0:
        return Evaluation(reward)
    return Evaluation(reward, notes={"check": f"exit code {result.exit_code}\n{words}"})


def check_reward(output: str, exit_code: int) -> float:
    """Return the reward for a check script's output and exit code (see `ShellInstance.check`)."""
    if exit_code != 0:
        return 0.0
    last = output.rstrip("\n").rpartition("\n")[2]
    if not last.startswith(REWARD_PREFIX):
        return 1.0
    try:
        reward = finite_reward(float(last.removeprefix(REWARD_PREFIX)))
    except ValueError:
        reward = None
    if reward is None:
        raise HandlerFailed(f"the check script's last line is {last[:200]!r}; the reward must be a finite number")
    return reward
