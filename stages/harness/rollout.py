"""One harness in a sandbox, from start to end, with the policy behind the only address that it can reach.

    harness, in the sandbox    → 127.0.0.1 of the sandbox's own network → model server, in this process → engine

The socket is the sandbox's own, so every caller is a program of this rollout. If a sandbox shares the host's network,
others can reach the socket too, so each call must present the key. When the model refuses calls because the rollout is
over, the harness has `GRACE_S` to exit; then it is killed, as at the end of the phase. Leftover processes cannot reach
the model: the server is closed first.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import msgspec

from ...data.trajectory import Role
from ...errors import ConfigError, HarnessFailed, InvalidJob, SandboxFailed, SandboxLimitExceeded
from ...inference.http.turn_parser import TurnParser
from ...model_proxy.server import ModelServer
from ..agent_loop import StopReason
from ..cut_text import cut_text
from .adapter import ADDRESS_SPACE_BYTES, LaunchRequest, load_adapter
from .call_limits import CALLS_AT_ONCE
from .call_tree import CallKind
from .harness_model import HarnessModel
from .installation import HarnessStore, default_root

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...inference.chat import ChatFormat, ChatMessage
    from ...inference.engine import Generator
    from ...tools.containers.specification import SandboxSpec
    from ...tools.execution.messages import ExecResult
    from ...tools.sandbox.sandbox import Sandbox
    from ...wire.messages.jobs import Harness, Job
    from ..agent_loop import Episode
    from .adapter import Adapter, Launch
    from .installation import Installation

GRACE_S = 10.0
"""How long a harness may take to end once it knows that the rollout is over."""
CLOSE_S = 1.0
"""How long calls under way may take when it has ended."""
WRITE_S = 30.0
OUTPUT_LIMIT_BYTES = 64 * 1024
WORDS = 2000
"""Characters of what it said last, in errors."""
NOTE_CHARACTERS = 4000
"""Of what it printed, in the rollout's notes: its beginning and its end."""
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")
KILLED_NOTE = "it had to be killed, and what it printed is lost"
KILLED = -9
"""The exit code that is noted of one that had to be killed."""
HOME = "harness"
"""The folder below /tmp that is its home."""


@dataclass(frozen=True, slots=True)
class ChosenHarness:
    """A harness that is here and can lead rollouts."""

    choice: Harness
    adapter: Adapter
    installation: Installation | None
    """None: it is a program of the sandbox's own."""

    @classmethod
    def find(cls, choice: Harness) -> Self:
        """Find it on this machine.

        Raises:
            InvalidJob: there is no such harness.
            HarnessFailed: it is not installed here.
        """
        try:
            adapter = load_adapter(choice.name)
        except ConfigError as error:
            raise InvalidJob(error.message, field="harness") from error
        named = f"{choice.name}=={choice.version}" if choice.version else choice.name
        try:
            installation = HarnessStore(default_root()).find(named) if adapter.package is not None else None
        except ConfigError as error:
            raise HarnessFailed(error.message, harness=choice.name) from error
        return cls(choice, adapter, installation)

    def prepared(self, spec: SandboxSpec) -> SandboxSpec:
        """Return what a task asks for, with what the harness needs besides."""
        limits = msgspec.structs.replace(spec.limits, address_space_bytes=ADDRESS_SPACE_BYTES)
        binds = self.installation.binds if self.installation is not None else ()
        return msgspec.structs.replace(spec, limits=limits, binds=(*spec.binds, *binds))

    async def lead(
        self,
        messages: Sequence[ChatMessage],
        sandbox: Sandbox,
        generate: Generator,
        chat: ChatFormat,
        context_tokens: int,
        job: Job,
        episode: Episode,
        parser_url: str = "",
    ) -> ExecResult | None:
        """Lead a rollout to its end, and write what was sampled to the episode, however it ends.

        The harness gets the user's messages as its task. It has a system message and tools of its own. What the policy
        says is read by the server at `parser_url`, if there is one.

        Raises:
            HarnessFailed, EngineFailed, SandboxFailed: see `HarnessRollout.run`.
        """
        adapter = self.adapter
        parser = TurnParser(parser_url, chat, limit=CALLS_AT_ONCE) if parser_url else None
        prompt = "\n\n".join(message.content for message in messages if message.role == Role.USER)
        model = HarnessModel(
            generate,
            chat,
            context_tokens,
            job,
            episode,
            prompt=prompt,
            refusal_status=adapter.refusal_status,
            hints=adapter.hints,
            parser=parser,
        )
        episode.notes["harness"] = (
            f"{self.choice.name} {self.installation.version if self.installation else ''}".strip()
        )
        try:
            return await HarnessRollout(self, sandbox, model, job, episode).run(prompt)
        finally:
            kinds = self.choice.train_on
            model.write([kind for kind in CallKind if kind.value in kinds or "all" in kinds])
            if parser is not None:
                await parser.close()


@dataclass(frozen=True, slots=True)
class HarnessRollout:
    """One rollout."""

    harness: ChosenHarness
    sandbox: Sandbox
    model: HarnessModel
    job: Job
    episode: Episode

    async def run(self, prompt: str) -> ExecResult | None:
        """Run the harness on a task until it ends; return what it said, or None if it had to be killed.

        Raises:
            HarnessFailed: it ended before any call of the model was answered.
            InvalidJob: its first prompt leaves no room for an answer.
            SandboxLimitExceeded: its programs sent more than a rollout may.
            EngineFailed: it ended with an error after the engine had failed.
            SandboxFailed: the sandbox is gone.
        """
        key = secrets.token_hex(16)
        listening = await self.sandbox.listen()
        server = ModelServer(self.model, key="" if self.sandbox.has_own_network else key)
        await server.start(listening.listener)
        try:
            launch = self.harness.adapter.launch(self._request(listening.url, key, prompt))
            await self._write(launch)
            result = await self._executed(launch)
        finally:
            await server.close(CLOSE_S)
        self._judge(result)
        return result

    def _request(self, url: str, key: str, prompt: str) -> LaunchRequest:
        sandbox, installation = self.sandbox, self.harness.installation
        return LaunchRequest(
            url=url,
            key=key,
            model=self.model.name,
            prompt=prompt,
            home=f"{sandbox.temporary}/{HOME}",
            directory=sandbox.spec.directory or sandbox.directory,
            folder=str(installation.folder) if installation is not None else "",
            context_tokens=self.model.limits.tokens,
            max_tokens=min(self.job.sampling.max_tokens, self.model.limits.tokens),
            arguments=self.harness.choice.arguments,
            environment=self.harness.choice.environment,
        )

    async def _write(self, launch: Launch) -> None:
        home = launch.environment["HOME"]
        made = await self.sandbox.exec(("mkdir", "-p", "-m", "700", home), WRITE_S)
        if made.exit_code:
            raise SandboxFailed(f"no home for the harness could be made: {made.stderr.decode(errors='replace')}")
        if launch.files:
            await self.sandbox.write_files({f"{home}/{path}": text.encode() for path, text in launch.files.items()})

    async def _executed(self, launch: Launch) -> ExecResult | None:
        """Run it to its end; None: it had to be killed."""
        program = asyncio.create_task(
            self.sandbox.exec(
                launch.argv,
                self.job.limits.run_s,
                launch.stdin,
                OUTPUT_LIMIT_BYTES,
                launch.environment,
            )
        )
        over = asyncio.create_task(self.model.limits.over.wait())
        try:
            await asyncio.wait({program, over}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({program}, timeout=GRACE_S)
            return program.result() if program.done() else None
        finally:
            over.cancel()
            program.cancel()
            await asyncio.wait({program, over})

    def _judge(self, result: ExecResult | None) -> None:
        """Note how it ended."""
        episode, model, name = self.episode, self.model, self.harness.choice.name
        if model.limits.exceeded:
            limit = f"{model.limits.cost >> 20} MiB of requests to the model"
            raise SandboxLimitExceeded(f"{name} sent more than {limit}, which a rollout may send", limit="requests")
        code = result.exit_code if result is not None else KILLED
        words = last_words(result) if result is not None else ""
        episode.notes["harness_output"] = (
            cut_text(printed(result), NOTE_CHARACTERS) if result is not None else KILLED_NOTE
        )
        if model.failure is not None and (code or not model.answered):
            raise model.failure
        if not model.answered and model.limits.too_long is not None:
            problem = (
                f"{name} cannot begin: {model.limits.too_long.message} (episode.max_tokens, or the engine's context)"
            )
            raise InvalidJob(problem, field="episode.max_tokens")
        if not model.answered:
            how = f"ended with {code}" if result is not None else "had to be killed"
            problem = f"the harness {name} made no call of the model that could be answered, and {how}: {words}"
            raise HarnessFailed(problem, harness=name, exit_code=code)
        episode.metrics["harness_exit_code"] = code
        if model.limits.too_long is not None:
            episode.stop_reason = episode.stop_reason or model.limits.limited_by
        if code:
            episode.stop_reason = episode.stop_reason or StopReason.HARNESS_FAILED
        elif episode.stop_reason is None:
            episode.stop_reason = StopReason.DONE


def last_words(result: ExecResult) -> str:
    """Return the last lines of what a program said, without what colours a terminal."""
    text = printed(result)
    if len(text) > WORDS:
        text = text[-WORDS:].partition("\n")[2] or text[-WORDS:]
    return text or "it said nothing"


def printed(result: ExecResult) -> str:
    """Return all that a program said that is kept of it, without what colours a terminal."""
    return _ESCAPES.sub("", (result.stderr + b"\n" + result.stdout).decode(errors="replace")).strip()
