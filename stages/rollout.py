"""`Rollout`: the conversations, models and MCP servers of one phase, and the program that leads it, if any.

The task's code leads by `RunPhase.conversation` and `converse`. Instead, a harness in the sandbox or a program outside
may hold the only conversation (`converse` waits for its end), or a program of an environment calls the model (`serve`).
The policy, other models and MCP servers are opened at their first use.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..data.scores import scores_in_rows
from ..data.trajectory import Role
from ..errors import ConfigError, HandlerFailed, InvalidJob, NoBackend, SandboxFailed
from ..inference.chat.loading import chat_format, same_vocabulary
from ..system.traces import span
from ..tools.containers.specification import with_address_space
from ..wire.messages.base import CONVERSATIONS_LIMIT, POLICY
from ..wire.messages.jobs import MAIN
from ..wire.records import Recorded, teacher_of
from .conversation import Conversation, checked_messages, checked_tools
from .episode import Episode, JobPolicy
from .handler import AgentHandler, RunPhase
from .job_backend import JobBackend, other_vocabulary
from .other_models import OtherModels

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping, Sequence

    from numpy.typing import NDArray

    from ..data.scores import Scores
    from ..errors import EngineFailed
    from ..inference.chat import ChatFormat, ChatMessage
    from ..tools.containers.specification import SandboxSpec
    from ..tools.mcp.toolset import McpTools
    from ..tools.sandbox.sandbox import Sandbox
    from ..tools.tool import AnyTool
    from ..wire.messages.backends import Backend
    from ..wire.messages.chat import ChatSettings
    from ..wire.messages.jobs import Job, McpServer
    from .handler import PhaseData
    from .handlers.sample import SampleInstance
    from .harness.chosen_harness import ChosenHarness
    from .harness.outside_rollout import OutsideRollout
    from .job_backend import PhaseClock
    from .stage_services import StageServices

log = logging.getLogger("prorl.stage")
BACKEND_WAIT_S = 0.1
"""Seconds; a shorter wait for a backend is not among the timings."""
LED = "a harness or a program outside leads this rollout, and holds its only conversation"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}")
"""The names of conversations, as in `messages.Identifier`."""
NO_EPISODE = Episode()
"""The record of a phase without a conversation; never modified."""


class Rollout:
    """One rollout; `close_servers`, then `close`.

    Args:
        services: of the process.
        job: of the rollout.
        attempt: of the job.
        clock: the phase's limit.
        handler: of the job's task.
    """

    def __init__(
        self, services: StageServices, job: Job, attempt: int, clock: PhaseClock, handler: AgentHandler[Any]
    ) -> None:
        self.episode = NO_EPISODE
        """The record so far."""
        self._services, self._job, self._attempt, self._clock, self._handler = services, job, attempt, clock, handler
        self.backend = self.new_backend()
        self.backend.record = job.record
        """The policy's."""
        self._sandbox: Sandbox | None = None
        self._others: OtherModels | None = None
        self._harness: ChosenHarness | None = None
        self._outside: OutsideRollout | None = None
        self._servers: Sequence[McpServer] = ()
        self._has_programs = False
        """One of the servers is a program of the sandbox."""
        self._taken: set[str] = set()
        """Names of the task's own tools; noted only for jobs with MCP servers."""
        self._mcp: McpTools | None = None
        self._serves = False
        """A program that calls the model over HTTP plays the rollout."""
        self._opening: asyncio.Lock | None = None
        self._opened: JobPolicy | None = None
        self._acting_since = math.inf

    def new_backend(self, model: str = "") -> JobBackend:
        """Return a backend of a model, not assigned yet; empty: the policy's."""
        services, job = self._services, self._job
        return JobBackend(
            job, self._attempt, services.backends, services.engines, self._clock, model=model or job.model
        )

    def choose(self, instance: Any) -> None:
        """Find the MCP servers and the harness that the job and its task name.

        Raises:
            InvalidJob: they exclude each other, or the harness is unknown or takes no such servers.
            HarnessFailed: the harness is not installed here.
        """
        job, handler = self._job, self._handler
        if job.mcp or type(handler).mcp_servers is not AgentHandler.mcp_servers:
            self._servers = handler.mcp_servers(job, instance)
            self._has_programs = any(server.command for server in self._servers)
        choice = handler.harness(job, instance)
        if choice is not None and job.outside is not None:
            raise InvalidJob("a job names a harness or has a program outside, not both", field="harness")
        if self._servers and job.outside is not None:
            raise InvalidJob("a program outside cannot use MCP servers; leave out `mcp`", field="mcp")
        if choice is not None:
            from .harness.chosen_harness import ChosenHarness  # imports aiohttp, which takes half of a process's start

            self._harness = ChosenHarness.find(choice, self._servers)

    @property
    def needs_sandbox(self) -> bool:
        return self._harness is not None or self._has_programs

    def prepared(self, spec: SandboxSpec) -> SandboxSpec:
        """Return a task's specification with what the harness or the MCP servers need in the sandbox."""
        if self._harness is not None:
            return self._harness.prepared(spec)
        return with_address_space(spec) if self._has_programs else spec

    def phase(
        self,
        instance: Any,
        data: PhaseData,
        sandbox: Sandbox | None,
        create_sandbox: Callable[[SandboxSpec], Awaitable[Sandbox]],
    ) -> RunPhase[Any]:
        """Return the handler's input."""
        self._sandbox = sandbox
        calls = (self._converse, self._conversation, self._serve, create_sandbox, self._reply, self._score)
        return RunPhase(self._job, instance, data, sandbox, *calls)

    async def close_servers(self) -> None:
        """End the MCP servers, before their sandbox ends its processes."""
        if self._mcp is not None:
            await self._mcp.close()

    async def close(self) -> None:
        """End the episode, cancel turns still under way, such as after another one failed; release backends."""
        if self.episode is not NO_EPISODE:
            self.episode.end()
            own, records = asyncio.current_task(), self.episode.conversations
            if left := {one.task for one in records if one.task is not None and one.task is not own}:
                for task in left:
                    task.cancel()
                await asyncio.wait(left)
        self.backend.release()
        if self._others is not None:
            self._others.release()

    @property
    def so_far(self) -> tuple[Episode, str]:
        """The rollout so far, and its backend."""
        current = self.backend.current
        return self.episode, current.backend_id if current is not None else ""

    @property
    def has_acted(self) -> bool:
        """Whether the policy has generated anything."""
        return self.episode.metrics["generated_tokens"] > 0

    @property
    def reported_reward(self) -> float | None:
        """The reward that the program outside reported."""
        return self._outside.reward if self._outside is not None else None

    def agents_time_s(self) -> float:
        """Return the seconds since the policy was there, less those in engines and in the service's chat format.

        With a harness the chat format's time stays: the harness decides how much work it gives the format.
        """
        timings = self.episode.timings
        chat_s = timings.get("chat", 0.0) if self._harness is None else 0.0
        models_s = sum(seconds for name, seconds in timings.items() if name.startswith("model."))
        return time.monotonic() - self._acting_since - timings.get("engine", 0.0) - chat_s - models_s

    def add_time(self, seconds: float) -> None:
        """Extend the idle limit of the program outside by a pause of this process."""
        if self._outside is not None:
            self._outside.add_time(seconds)

    def failed(self, error: EngineFailed) -> None:
        """Report the policy's backend, unless the error has another cause: the request, a parser or another model."""
        if not any(error.fields.get(name) for name in ("refused", "parser", "model")):
            self.backend.report(error)

    async def _converse(self, messages: Sequence[ChatMessage], tools: Sequence[AnyTool]) -> Episode:
        if not self._is_led:
            await self._conversation(messages, tools).say()
            return self.episode
        if self.episode is not NO_EPISODE:
            raise HandlerFailed(f"phase.converse was called a second time; {LED}")
        checked_messages(messages)
        checked_tools(tools)
        self.episode = Episode(began=self._clock.began)
        policy = await self._policy()
        if self._harness is None:
            await self._be_led(policy, messages, tools)
        elif self._sandbox is None:
            raise SandboxFailed("a harness needs a sandbox, and the job has none")
        else:
            await self._harness.lead(policy, messages, self._sandbox)
        return self.episode

    async def _be_led(self, policy: JobPolicy, messages: Sequence[ChatMessage], tools: Sequence[AnyTool]) -> None:
        if tools:
            names = ", ".join(tool.name for tool in tools)
            raise InvalidJob(
                f"the task {self._job.task} gives tools to the policy ({names}), which a program outside cannot use; "
                "use a task without tools, such as `outside`",
                field="task",
            )
        from .harness.outside_rollout import OutsideRollout  # imports aiohttp, as above

        self._outside = OutsideRollout(policy, messages, grades=self._handler.grades)
        await self._outside.lead(self._services.door())

    @property
    def _is_led(self) -> bool:
        """Whether a harness or a program outside leads the rollout."""
        return self._harness is not None or self._job.outside is not None

    def _conversation(
        self,
        opening: Sequence[ChatMessage],
        tools: Sequence[AnyTool] = (),
        *,
        name: str = MAIN,
        model: str = POLICY,
        trained: bool | None = None,
    ) -> Conversation:
        if self._is_led:
            raise HandlerFailed(f"phase.conversation was called; {LED}")
        if self.episode is NO_EPISODE:
            self.episode = Episode(began=self._clock.began)
        if not NAME.fullmatch(name):
            raise HandlerFailed(f"a conversation's name is of letters, digits and . _ : -, and not {name!r:.150}")
        if len(self.episode.conversations) >= CONVERSATIONS_LIMIT:
            raise HandlerFailed(f"a rollout has at most {CONVERSATIONS_LIMIT} conversations")
        if any(one.name == name for one in self.episode.conversations):
            raise HandlerFailed(
                f"this rollout has a conversation named {name!r} already: give the other one a name (name=…), or say "
                "more in the first one"
            )
        if self._servers:
            self._taken |= {tool.name for tool in tools}
        other = ""
        if model != POLICY or self._job.models:
            others = self.other_models()
            other = "" if others.is_policy(model) else others.named(model).name
        is_trained = not other if trained is None else trained
        policy: Callable[[], Awaitable[JobPolicy]] = self._policy
        if model != POLICY or self._job.models or (self._job.record and not is_trained):
            policy = partial(self._policy_of, model, trained=is_trained)
        return Conversation(self.episode, policy, opening, tools, name=name, trained=is_trained, model=other)

    async def _serve(
        self, play: Callable[[str, str, Sequence[str]], Awaitable[tuple[PhaseData, Sequence[tuple[int, float]]]]]
    ) -> PhaseData:
        if self._is_led or self.episode is not NO_EPISODE:
            raise HandlerFailed("phase.serve was called in a rollout that has a conversation, or that another leads")
        from .harness.served_program import serve_program  # imports aiohttp, as above

        self.episode, self._serves = Episode(began=self._clock.began), True
        return await serve_program(await self._policy(), play)

    async def _reply(self, asked: SampleInstance) -> None:
        if self._is_led or self.episode is not NO_EPISODE:
            raise HandlerFailed("phase.reply was called in a rollout that has a conversation, or that another leads")
        from .harness.single_reply import reply_to  # imports aiohttp, as above

        self.episode, self._serves = Episode(began=self._clock.began), True
        await reply_to(replace(await self._policy(), episode=self.episode, others=None), asked)

    async def _score(
        self, model: str, token_ids: NDArray[np.int32], segments: Sequence[int], top: int, chat: ChatSettings
    ) -> Scores:
        if self._is_led or self.episode is not NO_EPISODE:
            raise HandlerFailed("phase.score was called in a rollout that has a conversation, or that another leads")
        self.episode = Episode(began=self._clock.began)
        asked_at = time.monotonic()
        scoring = self.other_models().scoring(model)
        await scoring.check_tokenizer(chat)
        scores = await scoring.score(token_ids, segments, top, chat)
        self.episode.spent(f"model.{model[:96]}", asked_at)
        self.episode.metrics["scored_tokens"] = len(token_ids)
        ids, logprobs = scores_in_rows(token_ids, scores)
        self.episode.trajectory.begin_turn(Role.ASSISTANT)
        versions = np.full(len(ids), scores.weight_version, np.int32)
        self.episode.trajectory.add_generated(ids, logprobs, versions)
        return scores

    def other_models(self) -> OtherModels:
        """Return the models that the job talks to besides the policy; `close` releases them."""
        if self._others is None:
            self._others = OtherModels(self._job, self._services.endpoints, self.new_backend)
        return self._others

    async def _policy_of(self, role: str, *, trained: bool) -> JobPolicy:
        """Return the policy of a model, by the job's or the service's name for it."""
        others = self.other_models()
        if not others.is_policy(role):
            asked_at = time.monotonic()
            policy = await others.policy(role, trained=trained)
            self.episode.spent(f"model.{role[:96]}", asked_at)
            return policy
        policy, sampling, record = await self._policy(), others.named(role).sampling, self._job.record
        if record and not trained:  # nothing of it would be in the result
            policy = replace(policy, generate=partial(self.backend.generate, record=()))
        if sampling is None:
            return policy
        if record and trained and (problem := Recorded.parse(record).conflict(sampling)):
            raise InvalidJob(f"the model {role!r}: {problem}", field="record")
        return replace(policy, job=msgspec.structs.replace(self._job, sampling=sampling))

    async def _policy(self) -> JobPolicy:
        """Return the job's policy, on the backend that the job is assigned to."""
        self._opening = self._opening or asyncio.Lock()  # conversations may begin at once
        async with self._opening:
            if self._opened is None:
                self._opened = await self._open_policy()
            return self._opened

    async def _open_policy(self) -> JobPolicy:
        episode = self.episode
        more = await self._more_tools() if self._servers and not self._is_led else None
        asked_at = time.monotonic()
        backend = await self.backend.assigned()
        if self._job.record:
            self._check_records(backend)
        if self._job.teacher:
            await self._check_teacher(backend)
        waited_s = time.monotonic() - asked_at
        parser_url = backend.chat.parser_url if self._is_led or self._serves else ""
        chat = await self._chat(msgspec.structs.replace(backend.chat, parser_url=parser_url))
        self._acting_since = time.monotonic()
        room_s = min(self.backend.room_wait_s, waited_s)
        for what, seconds in (("backend", waited_s - room_s), ("room", room_s)):
            if seconds >= BACKEND_WAIT_S:
                episode.timings[what] = seconds
        generate, context = self.backend.generate, backend.context_tokens
        others = self.other_models() if (self._is_led or self._serves) and self._job.models else None
        return JobPolicy(generate, chat, context, self._job, episode, parser_url, others, more)

    def _check_records(self, backend: Backend) -> None:
        lacking = [name for name in Recorded.parse(self._job.record).names if name not in backend.records]
        if lacking:
            raise InvalidJob(
                f"backend {backend.backend_id} ({backend.model}) as it was started does not give the records "
                f"{', '.join(lacking)}",
                field="record",
            )

    async def _check_teacher(self, own: Backend) -> None:
        """Reject a teacher with another vocabulary before the first token; SCORE reports all other problems."""
        model, _ = teacher_of(self._job.teacher)
        try:
            teachers = await self._services.backends.of_model(model)
        except NoBackend as error:
            log.info("the vocabulary of the teacher %s is not compared yet: %s", model, error.message)
            return
        for teacher in teachers:
            try:
                is_same = await same_vocabulary(own.chat, teacher.chat)
            except ConfigError as error:
                log.info("the vocabulary of the teacher %s is not compared yet: %s", model, error.message)
                return
            if not is_same:
                raise other_vocabulary(teacher, own.chat)

    async def _chat(self, settings: ChatSettings) -> ChatFormat:
        arguments = self._job.template_arguments
        try:
            return await chat_format(settings.with_arguments(arguments))
        except ConfigError as error:
            if arguments and error.key in {"chat.template_arguments", "chat.template"}:
                raise InvalidJob(error.message, field="template_arguments") from error
            raise

    async def _more_tools(self) -> MutableMapping[str, AnyTool]:
        """Start the job's MCP servers, and return their tools."""
        from ..tools.mcp.toolset import McpTools

        self._mcp = McpTools(self._servers, self._sandbox, self._services.mcp_keys, self._taken)
        with span("start MCP servers"):
            await self._mcp.open()
        return self._mcp.tools
