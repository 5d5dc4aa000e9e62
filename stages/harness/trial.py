"""A harness tried for real: a model that follows a script, two turns, in a sandbox without network.

The first turn has it write a file, the second ends its work. The model is served as a rollout's is: on a socket in the
sandbox's own network, in whichever API the harness speaks. The ids that it counts out stand for no text.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...errors import SandboxFailed
from ...model_proxy.calls import ModelReply, ReplyCall, Usage, new_turn_id
from ...model_proxy.server import ModelServer
from ...tools.sandbox.specification import Limits, SandboxSpec
from .adapter import ADDRESS_SPACE_BYTES, LaunchRequest

if TYPE_CHECKING:
    from ...model_proxy.calls import ModelRequest
    from ...tools.execution.messages import ExecResult
    from ...tools.sandbox.sandbox import Sandbox
    from ...tools.sandbox.sandboxes import Sandboxes
    from .adapter import Adapter, ScriptedTurn
    from .installation import Installation

FILE = "written-by-the-harness.txt"
PROMPT = f"Write the file {FILE}, then say that you are done."
CONTEXT_TOKENS, MAX_TOKENS = 128_000, 8_000
PROMPT_TOKENS, REPLY_TOKENS = 1_000, 10
"""What the usage of every reply says."""
LIMIT_S = 120.0
LIMITS = Limits(address_space_bytes=ADDRESS_SPACE_BYTES)
CLOSE_LIMIT_S = 5.0


class ScriptedModel:
    """Says the first turn once, to whoever can do what it asks, and the last one to every other call."""

    name = "policy"

    def __init__(self, first: ScriptedTurn, last: ScriptedTurn, refusal_status: int) -> None:
        self.refusal_status = refusal_status
        self.requests: list[ModelRequest] = []
        self.first_call_at = 0.0
        self.tools: tuple[str, ...] = ()
        """Offered in the request with the most tools."""
        self._first: ScriptedTurn | None = first
        self._last = last

    async def open(self, request: ModelRequest) -> ScriptedCall:
        self.first_call_at = self.first_call_at or time.monotonic()
        self.requests.append(request)
        offered = tuple(str(tool["function"]["name"]) for tool in request.tools)
        self.tools = max(self.tools, offered, key=len)
        turn = self._last
        if self._first is not None and (not self._first.tool or self._first.tool in offered):
            turn, self._first = self._first, None
        return ScriptedCall(turn)

    async def count_tokens(self, request: ModelRequest) -> int:
        del request
        return PROMPT_TOKENS

    @property
    def problem(self) -> str:
        """Why the first turn was never said; empty if it was."""
        if self._first is None:
            return ""
        if not self.requests:
            return "it never called the model"
        return f"it offered no tool {self._first.tool}, but: {', '.join(self.tools) or 'none'}"


class ScriptedCall:
    def __init__(self, turn: ScriptedTurn) -> None:
        self.turn_id = new_turn_id()
        self.prompt_tokens = PROMPT_TOKENS
        self._turn = turn

    async def reply(self) -> ModelReply:
        turn = self._turn
        calls = (ReplyCall(f"call_{self.turn_id}", turn.tool, json.dumps(dict(turn.arguments))),) if turn.tool else ()
        return ModelReply(
            turn_id=self.turn_id,
            text=turn.text,
            reasoning="",
            calls=calls,
            finish_reason="tool_calls" if calls else "stop",
            usage=Usage(prompt=PROMPT_TOKENS, generated=REPLY_TOKENS),
            prompt_token_ids=np.zeros(PROMPT_TOKENS, np.int32),
            token_ids=np.zeros(REPLY_TOKENS, np.int32),
            logprobs=np.zeros(REPLY_TOKENS, np.float32),
        )

    def close(self, *, delivered: bool) -> None:
        del delivered


@dataclass(frozen=True, slots=True)
class Trial:
    """How it went."""

    problem: str
    """Empty: the harness did as it was told."""
    result: ExecResult
    calls: int
    first_call_s: float
    """From the start to the first call of the model; 0 if there was none."""
    took_s: float
    requests: tuple[ModelRequest, ...] = field(repr=False)


async def try_harness(
    adapter: Adapter, installation: Installation, sandboxes: Sandboxes, prompt: str = PROMPT
) -> Trial:
    """Run an installed harness in a new sandbox on a script, which is the same whatever the prompt says.

    Raises:
        SandboxFailed: the sandbox could not be made, or died.
        ConfigError: the harness cannot be scripted.
    """
    secret = secrets.token_hex(8)
    model = ScriptedModel(adapter.write_turn(FILE, secret), adapter.final_turn(), adapter.refusal_status)
    sandbox = await sandboxes.create(f"trial-{secret}", SandboxSpec(binds=installation.binds, limits=LIMITS))
    try:
        listener, url = await sandbox.listen()
        server = ModelServer(model)
        await server.start(listener)
        started = time.monotonic()
        try:
            result = await run_harness(sandbox, adapter, _request(sandbox, url, installation, prompt), LIMIT_S)
        finally:
            await server.close(CLOSE_LIMIT_S)
        took_s = time.monotonic() - started
        return Trial(
            problem=model.problem or await _problem_of(sandbox, result, secret),
            result=result,
            calls=len(model.requests),
            first_call_s=max(0.0, model.first_call_at - started),
            took_s=took_s,
            requests=tuple(model.requests),
        )
    finally:
        await sandbox.close()


def home_in(sandbox: Sandbox) -> str:
    """Return where a harness keeps its settings: outside of the workspace, where the sandbox has such a place."""
    return "/tmp/harness" if sandbox.isolated else f"{sandbox.directory}/.harness"  # noqa: S108 - the sandbox's own


async def run_harness(sandbox: Sandbox, adapter: Adapter, request: LaunchRequest, timeout_s: float) -> ExecResult:
    """Run a harness to its end, or to the time limit.

    Raises:
        SandboxFailed: the sandbox is gone.
        ConfigError: the harness cannot do what is asked.
    """
    launch = adapter.launch(request)
    files = {f"{request.home}/{path}": text.encode() for path, text in launch.files.items()}
    await sandbox.write_files({f"{request.home}/.prorl": b"", **files}, mode=0o600)
    environment = dict(launch.environment)
    return await sandbox.exec(
        launch.argv, timeout_s, stdin=launch.stdin, environment=environment, directory=request.directory
    )


def _request(sandbox: Sandbox, url: str, installation: Installation, prompt: str) -> LaunchRequest:
    return LaunchRequest(
        url=url,
        key="trial",
        model="policy",
        prompt=prompt,
        home=home_in(sandbox),
        directory=sandbox.directory,
        folder=installation.folder,
        context_tokens=CONTEXT_TOKENS,
        max_tokens=MAX_TOKENS,
    )


async def _problem_of(sandbox: Sandbox, result: ExecResult, secret: str) -> str:
    if result.timed_out:
        return f"it did not end within {LIMIT_S:g} s"
    try:
        written = (await sandbox.read_file(FILE)).decode("utf-8", "replace").strip()
    except SandboxFailed as error:
        return f"it did not write the file that the model asked for: {error.message}"
    if written != secret:
        return f"it wrote {written[:100]!r} into the file, and {secret!r} was asked for"
    return f"it ended with exit code {result.exit_code}" if result.exit_code else ""
