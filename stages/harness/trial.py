"""Try a real harness with a policy that follows a script of two turns, in a sandbox without network.

The first turn has the harness write a file, the second ends its work.
"""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...data.trajectory import Role
from ...errors import HarnessFailed, SandboxFailed
from ...inference.chat import ChatMessage
from ...inference.chat.embedded_chat import EmbeddedChatFormat
from ...inference.engine import Generation
from ...inference.tokenizer import IM_END, encode
from ...inference.tool_calls.formats import HERMES
from ...tools.containers.specification import SandboxSpec
from ...wire.messages.engines import VersionSpan
from ...wire.messages.jobs import EpisodeLimits, Job, PhaseLimits, Sampling
from ..episode import Episode, JobPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ...tools.sandbox.sandbox import Sandbox
    from ...tools.sandbox.sandboxes import Sandboxes
    from .adapter import ScriptedTurn
    from .chosen_harness import ChosenHarness

FILE = "written-by-the-harness.txt"
PROMPT = f"Write the file {FILE}, then say that you are done."
CONTEXT_TOKENS, MAX_TOKENS, MAX_TURNS = 400_000, 8_000, 16
LIMIT_S = 120.0
_CHAT = EmbeddedChatFormat()
_TOOLS = re.compile(r"Tools: (.*)\.<\|im_end\|>")
"""The line of the embedded chat format that names the tools."""


class Script:
    """Implements `engine.Generator`: the first caller that offers its tool gets the first turn, all others the last."""

    def __init__(self, first: ScriptedTurn, last: ScriptedTurn) -> None:
        self.first_at = 0.0
        """When it was first called (monotonic clock); 0: never."""
        self.calls = 0
        self.tools: list[str] = []
        """The tools offered in the call with the most tools."""
        self._first: ScriptedTurn | None = first
        self._last = last

    async def __call__(
        self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int], rows_known: int = 0
    ) -> Generation:
        """Return the next scripted turn; see `engine.Generator`."""
        del sampling, stop_token_ids, rows_known
        self.first_at = self.first_at or time.monotonic()
        self.calls += 1
        named = _TOOLS.search(_CHAT.decode(token_ids))
        offered = named[1].split(", ") if named else []
        self.tools = max(self.tools, offered, key=len)
        turn = self._last
        if self._first is not None and (not self._first.tool or self._first.tool in offered):
            turn, self._first = self._first, None
        ids = np.concatenate([encode(_spoken(turn)), np.array([IM_END], np.int32)])
        return Generation(ids, np.zeros(len(ids), np.float32), (VersionSpan(0, 0, len(ids)),), "stop")

    @property
    def problem(self) -> str:
        """Why the first turn was never used; empty if it was."""
        if self._first is None:
            return ""
        return f"it offered no tool {self._first.tool}, but: {', '.join(self.tools) or 'none'}"


@dataclass(frozen=True, slots=True)
class Trial:
    problem: str
    """Empty: the harness did as asked."""
    output: str
    calls: int
    first_call_s: float
    """Seconds from the start to the first model call; 0 if there was none."""
    took_s: float
    episode: Episode


async def try_harness(harness: ChosenHarness, sandboxes: Sandboxes, prompt: str = PROMPT) -> Trial:
    """Run a harness in a new sandbox on a script.

    Raises:
        SandboxFailed: the sandbox could not be made, or died.
        ConfigError: the harness cannot be scripted.
    """
    secret = secrets.token_hex(8)
    script = Script(harness.adapter.write_turn(FILE, secret), harness.adapter.final_turn())
    job = Job(
        task="harness",
        instance={},
        sampling=Sampling(max_tokens=MAX_TOKENS),
        episode=EpisodeLimits(max_turns=MAX_TURNS, max_tokens=CONTEXT_TOKENS),
        limits=PhaseLimits(run_s=LIMIT_S),
    )
    episode, output, problem = Episode(), "", ""
    sandbox = await sandboxes.create(f"trial-{secret}", harness.prepared(SandboxSpec()))
    try:
        started = time.monotonic()
        try:
            task = [ChatMessage(Role.USER, prompt)]
            result = await harness.lead(JobPolicy(script, _CHAT, 0, job, episode), task, sandbox)
        except HarnessFailed as error:
            problem = error.message
        else:
            output = "" if result is None else (result.stdout + result.stderr).decode("utf-8", "replace")
            problem = script.problem or await _problem_of(sandbox, episode, secret)
        took_s = time.monotonic() - started
    finally:
        await sandbox.close()
    first_call_s = max(0.0, script.first_at - started) if script.calls else 0.0
    return Trial(problem, output, script.calls, first_call_s, took_s, episode)


async def _problem_of(sandbox: Sandbox, episode: Episode, secret: str) -> str:
    try:
        written = (await sandbox.read_file(FILE)).decode("utf-8", "replace").strip()
    except SandboxFailed as error:
        return f"it did not write the file that the model asked for: {error.message}"
    if written != secret:
        return f"it wrote {written[:100]!r} into the file, and {secret!r} was asked for"
    code = episode.metrics["harness_exit_code"]
    return f"it ended with exit code {code}" if code else ""


def _spoken(turn: ScriptedTurn) -> str:
    return turn.text + (HERMES.write(turn.tool, dict(turn.arguments)) if turn.tool else "")
