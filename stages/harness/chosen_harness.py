"""`ChosenHarness`: one harness in a sandbox, from start to end; it can reach only the address of the policy.

    harness, in the sandbox    → 127.0.0.1 of the sandbox's own network → model server, in this process → engine

If a sandbox shares the host's network, each call must present the rollout's key. When the model refuses calls because
the rollout is over, the harness has `GRACE_S` to exit; then it is killed. The server is closed before, so leftover
processes cannot reach the model.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import msgspec

from ...errors import ConfigError, HarnessFailed, InvalidJob, SandboxFailed, SandboxLimitExceeded
from ...model_proxy.server import ModelServer
from ...tools.containers.specification import with_address_space
from ..cut_text import cut_text
from ..episode import StopReason
from .adapter import LaunchRequest, McpCommand, load_adapter
from .harness_model import HarnessModel
from .harness_store import HarnessStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...inference.chat import ChatMessage
    from ...tools.containers.specification import SandboxSpec
    from ...tools.execution.messages import ExecResult
    from ...tools.sandbox.sandbox import Sandbox
    from ...wire.messages.jobs import Harness, McpServer
    from ..episode import JobPolicy
    from ..package_store import Installation
    from .adapter import Adapter, Launch

GRACE_S = 10.0
"""Seconds in which a harness must exit once the rollout is over."""
CLOSE_S = 1.0
"""Seconds in which calls under way must end after the harness has exited."""
WRITE_S = 30.0
OUTPUT_LIMIT_BYTES = 64 * 1024
WORDS = 2000
"""Characters of the end of its output, in errors."""
NOTE_CHARACTERS = 4000
"""Characters of its output in the rollout's notes: the beginning and the end."""
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")
KILLED_NOTE = "it had to be killed, and what it printed is lost"
KILLED = -9
"""The exit code recorded for a killed harness."""
HOME = "harness"
"""The folder below /tmp that is its home."""


@dataclass(frozen=True, slots=True)
class ChosenHarness:
    """A harness that is available here and can lead rollouts."""

    choice: Harness
    adapter: Adapter
    installation: Installation | None
    """None: a program of the sandbox's own."""
    servers: Sequence[McpServer] = ()
    """The job's MCP servers, which the program starts itself."""

    @classmethod
    def find(cls, choice: Harness, servers: Sequence[McpServer] = ()) -> Self:
        """Find the harness on this machine.

        Raises:
            InvalidJob: the harness is unknown, or cannot use the MCP servers.
            HarnessFailed: it is not installed here.
        """
        try:
            adapter = load_adapter(choice.name)
        except ConfigError as error:
            raise InvalidJob(error.message, field="harness") from error
        _check(choice.name, adapter, servers)
        named = f"{choice.name}=={choice.version}" if choice.version else choice.name
        try:
            installation = HarnessStore().find(named) if adapter.package is not None else None
        except ConfigError as error:
            raise HarnessFailed(error.message, harness=choice.name) from error
        return cls(choice, adapter, installation, servers)

    def prepared(self, spec: SandboxSpec) -> SandboxSpec:
        """Return a task's specification with the binds and limits that the harness needs."""
        binds = self.installation.binds if self.installation is not None else ()
        return msgspec.structs.replace(with_address_space(spec), binds=(*spec.binds, *binds))

    async def lead(self, policy: JobPolicy, messages: Sequence[ChatMessage], sandbox: Sandbox) -> ExecResult | None:
        """Lead a rollout to its end, and write the sampled turns to the episode in every case.

        The harness gets the user's messages as its task. It has its own system message and tools.

        Returns:
            Its exit code and output; None: it was killed.

        Raises:
            HarnessFailed: it ended before any model call was answered.
            InvalidJob: its first prompt leaves no room for an answer.
            SandboxLimitExceeded: its programs sent more than a rollout may.
            EngineFailed: the engine failed, and the harness ended with an error or got no answer.
            SandboxFailed: the sandbox is gone.
        """
        version = self.installation.version if self.installation is not None else ""
        policy.episode.notes["harness"] = f"{self.choice.name} {version}".strip()
        adapter = self.adapter
        model = HarnessModel(policy, messages, refusal_status=adapter.refusal_status, kind_of=adapter.kind_of)
        try:
            result = await self._served(model, sandbox)
            self._judge(model, result)
            return result
        finally:
            await model.finish(self.choice.train_on)

    async def _served(self, model: HarnessModel, sandbox: Sandbox) -> ExecResult | None:
        key = secrets.token_hex(16)
        listening = await sandbox.listen()
        server = ModelServer(model, key="" if sandbox.has_own_network else key)
        await server.start(listening.listener)
        try:
            launch = self.adapter.launch(self._request(model, sandbox, listening.url, key))
            await _write(sandbox, launch)
            return await _executed(model, sandbox, launch)
        finally:
            await server.close(CLOSE_S)

    def _request(self, model: HarnessModel, sandbox: Sandbox, url: str, key: str) -> LaunchRequest:
        limit = model.limits.tokens
        return LaunchRequest(
            url=url,
            key=key,
            model=model.name,
            prompt=model.prompt,
            home=f"{sandbox.temporary}/{HOME}",
            directory=sandbox.spec.directory or sandbox.directory,
            folder=str(self.installation.folder) if self.installation is not None else "",
            context_tokens=limit,
            max_tokens=min(model.policy.job.sampling.max_tokens, limit),
            arguments=self.choice.arguments,
            environment=self.choice.environment,
            mcp={server.name: _started(server) for server in self.servers},
        )

    def _judge(self, model: HarnessModel, result: ExecResult | None) -> None:
        """Record how the harness ended; raise if the rollout failed."""
        episode, limits, name = model.policy.episode, model.limits, self.choice.name
        if limits.exceeded:
            problem = f"{name} sent more than the {limits.cost >> 20} MiB of model requests that a rollout may send"
            raise SandboxLimitExceeded(problem, limit="requests")
        code, how, words, note = KILLED, "had to be killed", "", KILLED_NOTE
        if result is not None:
            code, words = result.exit_code, last_words(result)
            how, note = f"ended with {code}", cut_text(printed(result), NOTE_CHARACTERS)
        episode.notes["harness_output"] = note
        if model.failure is not None and (code or not model.answered):
            raise model.failure
        if not model.answered and limits.too_long is not None:
            problem = f"{name} cannot begin: {limits.too_long.message} (episode.max_tokens, or the engine's context)"
            raise InvalidJob(problem, field="episode.max_tokens")
        if not model.answered:
            problem = f"the harness {name} made no model call that could be answered, and {how}: {words}"
            raise HarnessFailed(problem, harness=name, exit_code=code)
        episode.metrics["harness_exit_code"] = code
        stopped = StopReason.HARNESS_FAILED if code else StopReason.DONE
        limited = limits.limited_by if limits.too_long is not None else None
        episode.stop_reason = episode.stop_reason or limited or stopped


def _check(name: str, adapter: Adapter, servers: Sequence[McpServer]) -> None:
    problem = ""
    if servers and not adapter.takes_mcp:
        problem = f"the harness {name} has no MCP client; leave out `mcp`, or name another harness"
    elif urls := [server.name for server in servers if server.url]:
        problem = f"a harness cannot reach the MCP server {urls[0]}: its sandbox has no network; give a command"
    elif chosen := [server.name for server in servers if server.tools]:
        problem = f"a harness takes all tools of the MCP server {chosen[0]}: leave out `tools`"
    if problem:
        raise InvalidJob(problem, field="mcp")


def _started(server: McpServer) -> McpCommand:
    command = server.command
    if server.directory:
        command = ("/bin/sh", "-c", 'cd "$0" && exec "$@"', server.directory, *command)
    return McpCommand(command[0], list(command[1:]), dict(server.environment))


async def _write(sandbox: Sandbox, launch: Launch) -> None:
    home = launch.environment["HOME"]
    made = await sandbox.exec(("mkdir", "-p", "-m", "700", home), WRITE_S)
    if made.exit_code:
        raise SandboxFailed(f"the harness's home {home} could not be made: {made.stderr.decode(errors='replace')}")
    if launch.files:
        await sandbox.write_files({f"{home}/{path}": text.encode() for path, text in launch.files.items()})


async def _executed(model: HarnessModel, sandbox: Sandbox, launch: Launch) -> ExecResult | None:
    """Run a harness to its end; None: it was killed."""
    limit_s = model.policy.job.limits.run_s
    program = asyncio.create_task(
        sandbox.exec(launch.argv, limit_s, launch.stdin, OUTPUT_LIMIT_BYTES, launch.environment)
    )
    over = asyncio.create_task(model.limits.over.wait())
    try:
        await asyncio.wait({program, over}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({program}, timeout=GRACE_S)
        return program.result() if program.done() else None
    finally:
        over.cancel()
        program.cancel()
        await asyncio.wait({program, over})


def last_words(result: ExecResult) -> str:
    """Return the last lines of a program's output, without terminal escapes."""
    text = printed(result)
    if len(text) > WORDS:
        text = text[-WORDS:].partition("\n")[2] or text[-WORDS:]
    return text or "it said nothing"


def printed(result: ExecResult) -> str:
    """Return the stored output of a program, without terminal escapes."""
    return _ESCAPES.sub("", (result.stderr + b"\n" + result.stdout).decode(errors="replace")).strip()
