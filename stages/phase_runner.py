"""One phase of one job, from its start to the event that reports its end: limits, cancellation, cleanup.

The runner owns the phase's assignment, and in INIT and RUN the sandbox, which it closes unless a `PhaseDone` passes it
to the next phase. In EVAL the broker owns the sandbox, since another EVAL may need it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ..data.conversations import finite_reward
from ..errors import (
    Cancelled,
    ConfigError,
    EngineFailed,
    HandlerFailed,
    InvalidJob,
    PhaseTimeout,
    ProrlError,
    SandboxBroken,
    SandboxFailed,
    SandboxLimitExceeded,
    ToolSessionLost,
)
from ..inference.chat.loading import chat_format
from ..system.open_files import wait_for_descriptors
from ..system.traces import span
from ..tools.containers.specification import SandboxSpec, with_address_space
from ..tools.processes.child import to_the_end
from ..wire.messages.base import CONVERSATIONS_LIMIT, NOTES_LIMIT, POLICY, new_id
from ..wire.messages.jobs import MAIN, Outcome, Phase
from ..wire.messages.stages import PhaseDone, PhaseFailed
from .conversation import Conversation, checked_messages, checked_tools
from .episode import Episode, JobPolicy, Named
from .handler import (
    TASKS_OWN_REASONS,
    AgentHandler,
    EvalPhase,
    Evaluation,
    Failure,
    InitPhase,
    PhaseData,
    RunPhase,
    failure_of,
)
from .job_backend import JobBackend, PhaseClock
from .judge import ENGINE_MOVES, EngineJudge, Judge
from .other_models import OtherModels
from .phase_ends import (
    MUST_BE_FINITE,
    checked,
    checked_data,
    checked_evaluation,
    conversation_notes,
    notes_of,
    passed_on,
    readable,
    reward_of,
    rewards_of,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..inference.chat import ChatFormat, ChatMessage
    from ..inference.client import EngineClient
    from ..tools.mcp.toolset import McpTools
    from ..tools.sandbox.sandbox import Sandbox
    from ..tools.sandbox.sandboxes import Sandboxes
    from ..tools.tool import AnyTool
    from ..wire.messages.backends import ChatSettings
    from ..wire.messages.jobs import Job, McpServer
    from ..wire.messages.stages import StartPhase
    from .backend_client import BackendClient
    from .grading.grader_pool import GraderPool
    from .harness.outside_rollout import OutsideRollout, RolloutDoor
    from .harness.rollout import ChosenHarness
    from .judge import JudgeServer
    from .other_models import ChatEndpoints
    from .sandbox_handoff import SandboxHandoff

log = logging.getLogger("prorl.stage")
AGENTS_SHARE = 0.5
"""The share of RUN's limit spent in tools, not in the engine, from which on a timeout is the agent's own fault."""
DESCRIPTORS, DESCRIPTORS_LIMIT_S = 16, 60.0
"""More descriptors than a phase uses in its process at a time; seconds that a phase waits for them."""
PROBE_S = 10.0
BACKEND_WAIT_S = 0.1
"""Seconds; a shorter wait for a backend is not among the timings."""
LED = "a harness or a program outside leads this rollout, and holds its only conversation"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}")
"""The names of conversations, as in `messages.Identifier`."""
NOTHING_NAMED = Named()
NO_EPISODE = Episode()
"""The record of a phase without a conversation; never modified."""
REPORTED_REWARD = "reward reported by the program outside"
"""The key of the reported reward in RUN's data."""


@dataclass(frozen=True, slots=True)
class StageServices:
    """The services of a stage process that its phases share."""

    stage_id: str
    sandboxes: Sandboxes
    backends: BackendClient
    engines: EngineClient
    handoff: SandboxHandoff
    graders: GraderPool
    judge: JudgeServer
    endpoints: ChatEndpoints
    door: Callable[[], RolloutDoor]
    """Returns the server through which programs outside lead rollouts of this process."""
    mcp_keys: Mapping[str, str]
    """The addresses of the MCP servers that jobs may name, with the key for each."""


class PhaseRunner:
    """Runs one phase; `run` is called once."""

    def __init__(self, services: StageServices, command: StartPhase, job: Job, handler: AgentHandler[Any]) -> None:
        self.job = job
        self.sandbox: Sandbox | None = None
        self._services, self._command, self._handler = services, command, handler
        self._phase = command.phase
        self._clock = PhaseClock(job.limits.of(command.phase))
        self.backend = JobBackend(job, command.attempt, services.backends, services.engines, self._clock)
        self._others: OtherModels | None = None
        self._fresh: list[Sandbox] = []
        """The fresh sandboxes, which are closed when the phase ends."""
        self._harness: ChosenHarness | None = None
        self._outside: OutsideRollout | None = None
        self._servers: Sequence[McpServer] = ()
        self._has_programs = False
        """One of the servers is a program of the sandbox."""
        self._taken: set[str] = set()
        """Names of the task's own tools; noted only for jobs with MCP servers."""
        self._mcp: McpTools | None = None
        self._episode: Episode | None = None
        self._serves = False
        """A program that calls the model over HTTP plays the rollout."""
        self._opening: asyncio.Lock | None = None
        self._opened: JobPolicy | None = None
        self._acting_since = math.inf

    async def run(self) -> tuple[PhaseDone | PhaseFailed, NDArray[np.uint8] | None]:
        """Return the event that ends the phase, and the trajectory's block if there is one. Never raises.

        Cancelling the call once ends the phase with outcome `cancelled`.
        """
        event: PhaseDone | PhaseFailed
        try:
            await wait_for_descriptors(DESCRIPTORS, DESCRIPTORS_LIMIT_S)
            async with self._clock.limit():
                event = checked(await self._ran())
        except BaseException as error:  # noqa: BLE001 - the boundary between the task's code and the service
            event = readable(self._failed(self._failure_of(error)))
        if self.sandbox is not None:
            if self._phase == Phase.EVAL or (isinstance(event, PhaseDone) and self._hands_on_sandbox()):
                self._services.handoff.hold(self.sandbox)
            else:
                self._fresh.append(self.sandbox)
        for sandbox in self._fresh:
            with suppress(asyncio.CancelledError):  # too late: the phase has ended, and its event has the outcome
                await to_the_end(_close(sandbox))
        block = self._episode.whole().block() if self._episode is not None and event.tokens else None
        return event, block

    @property
    def so_far(self) -> tuple[Episode, str]:
        """The rollout so far, and its backend."""
        current = self.backend.current
        return self._episode or NO_EPISODE, current.backend_id if current is not None else ""

    def add_time(self, seconds: float) -> None:
        """Extend the phase's limit by a pause of this process."""
        if self._outside is not None:
            self._outside.add_time(seconds)
        self._clock.add(seconds)

    async def _ran(self) -> PhaseDone:
        job, instance = self.job, self._handler.parse_instance(self.job)
        if job.mcp or type(self._handler).mcp_servers is not AgentHandler.mcp_servers:
            self._servers = self._handler.mcp_servers(job, instance)
            self._has_programs = any(server.command for server in self._servers)
        choice = self._handler.harness(job, instance)
        if choice is not None and job.outside is not None:
            raise InvalidJob("a job names a harness or has a program outside, not both", field="harness")
        if self._servers and job.outside is not None:
            raise InvalidJob("a program outside cannot use MCP servers; leave out `mcp`", field="mcp")
        if choice is not None:
            from .harness.rollout import ChosenHarness  # imports aiohttp, which takes half of a process's start

            self._harness = ChosenHarness.find(choice, self._servers)
        if self._command.sandbox is not None:
            self.sandbox = await self._services.sandboxes.attach(self._command.sandbox)
        match self._phase:
            case Phase.INIT:
                data = await self._handler.init(InitPhase(job, instance, self._create_sandbox))
                checked_data(Phase.INIT, data)
                if self._harness is not None or self._has_programs:
                    await self._create_sandbox(SandboxSpec())  # unless the task has made one
                return self._done(data)
            case Phase.RUN:
                return await self._run(instance)
            case Phase.EVAL:
                return await self._eval(instance)

    async def _run(self, instance: Any) -> PhaseDone:
        calls = (self._converse, self._conversation, self._serve, self._create_fresh_sandbox)
        phase = RunPhase(self.job, instance, self._command.phase_data, self.sandbox, *calls)
        try:
            try:
                data = await self._handler.run(phase)
            finally:
                if self._mcp is not None:
                    await self._mcp.close()
            if self.sandbox is not None and self._hands_on_sandbox() and self._handler.ends_processes(instance):
                await self.sandbox.end_processes()
            data = passed_on(data)
            if self._outside is not None and self._outside.reward is not None:
                data[REPORTED_REWARD] = self._outside.reward
            return self._done(data)
        except SandboxLimitExceeded:
            raise
        except (SandboxFailed, ToolSessionLost) as error:
            if await self._is_broken(error):
                raise SandboxBroken(f"the agent broke its sandbox: {error.message}") from error
            raise
        except EngineFailed as error:  # also for messages that the agent loop could not process
            if not any(error.fields.get(name) for name in ("refused", "parser", "model")):
                self.backend.report(error)
            raise
        finally:
            await self._end_conversations()
            self.backend.release()
            if self._others is not None:
                self._others.release()

    async def _end_conversations(self) -> None:
        """End the episode, and cancel turns that the task left under way, such as those beside one that failed."""
        if self._episode is None:
            return
        self._episode.end()
        own, records = asyncio.current_task(), self._episode.conversations
        if left := {one.task for one in records if one.task is not None and one.task is not own}:
            for task in left:
                task.cancel()
            await asyncio.wait(left)

    def _backend_of(self, model: str) -> JobBackend:
        services = self._services
        return JobBackend(
            self.job, self._command.attempt, services.backends, services.engines, self._clock, model=model
        )

    async def _eval(self, instance: Any) -> PhaseDone:
        job, services, data = self.job, self._services, self._command.phase_data
        place = (job, self._command.attempt, services.backends, services.engines, self._clock)
        judge = Judge(services.judge, EngineJudge(lambda: JobBackend(*place, ENGINE_MOVES)))
        phase = EvalPhase(job, instance, data, self.sandbox, self._create_fresh_sandbox, services.graders.call, judge)
        reported = data.get(REPORTED_REWARD) if job.outside is not None else None
        with span("grade", {"prorl.task": job.task}):
            if reported is None:
                evaluation = checked_evaluation("eval", await self._handler.eval(phase))
            else:
                evaluation = Evaluation(reported)
        shaped = checked_evaluation("final_result", self._handler.final_result(job, evaluation))
        return self._done({}, shaped)

    async def _create_sandbox(self, spec: SandboxSpec) -> Sandbox:
        if self.sandbox is None:
            if self._harness is not None:
                spec = self._harness.prepared(spec)
            elif self._has_programs:
                spec = with_address_space(spec)
            # Job ids are not unique among brokers that share the node.
            name = f"{self.job.job_id}.{self._command.attempt}-{new_id()[:8]}"
            with span("create sandbox"):
                self.sandbox = await self._services.sandboxes.create(name, spec)
        return self.sandbox

    async def _create_fresh_sandbox(self, spec: SandboxSpec) -> Sandbox:
        with span("create sandbox"):
            name = f"{self.job.job_id}.eval-{new_id()[:8]}"
            self._fresh.append(await self._services.sandboxes.create(name, spec))
        return self._fresh[-1]

    async def _converse(self, messages: Sequence[ChatMessage], tools: Sequence[AnyTool]) -> Episode:
        if not self._is_led:
            await self._conversation(messages, tools).say()
            assert self._episode is not None, "a conversation has begun"
            return self._episode
        if self._episode is not None:
            raise HandlerFailed(f"phase.converse was called a second time; {LED}")
        checked_messages(messages)
        checked_tools(tools)
        self._episode = episode = Episode(began=self._clock.began)
        policy = await self._policy()
        if self._harness is None:
            await self._be_led(policy, messages, tools)
        elif self.sandbox is None:
            raise SandboxFailed("a harness needs the job's sandbox, and there is none")
        else:
            await self._harness.lead(policy, messages, self.sandbox)
        return episode

    @property
    def _is_led(self) -> bool:
        """Whether a harness or a program outside leads the rollout."""
        return self._harness is not None or self.job.outside is not None

    def _conversation(
        self,
        opening: Sequence[ChatMessage],
        tools: Sequence[AnyTool] = (),
        *,
        name: str = MAIN,
        model: str = POLICY,
        trained: bool = True,
    ) -> Conversation:
        if self._is_led:
            raise HandlerFailed(f"phase.conversation was called; {LED}")
        if self._episode is None:
            self._episode = Episode(began=self._clock.began)
        if not NAME.fullmatch(name):
            raise HandlerFailed(f"a conversation's name is of letters, digits and . _ : -, and not {name!r:.150}")
        if len(self._episode.conversations) >= CONVERSATIONS_LIMIT:
            raise HandlerFailed(f"a rollout has at most {CONVERSATIONS_LIMIT} conversations")
        if any(one.name == name for one in self._episode.conversations):
            raise HandlerFailed(
                f"this rollout has a conversation named {name!r} already: give the other one a name (name=…), or say "
                "more in the first one"
            )
        if self._servers:
            self._taken |= {tool.name for tool in tools}
        policy: Callable[[], Awaitable[JobPolicy]] = self._policy
        if model != POLICY or self.job.models:
            policy, trained = partial(self._policy_of, model), trained and self._other_models().is_policy(model)
        return Conversation(self._episode, policy, opening, tools, name=name, trained=trained)

    def _other_models(self) -> OtherModels:
        if self._others is None:
            self._others = OtherModels(self.job, self._services.endpoints, self._backend_of)
        return self._others

    async def _policy_of(self, role: str) -> JobPolicy:
        """Return what takes the turns of the model that the job or the service calls so."""
        others = self._other_models()
        if not others.is_policy(role):
            asked_at = time.monotonic()
            policy = await others.policy(role)
            assert self._episode is not None, "a conversation has begun"
            self._episode.spent(f"model.{role[:96]}", asked_at)
            return policy
        policy, sampling = await self._policy(), others.named(role).sampling
        if sampling is None:
            return policy
        return replace(policy, job=msgspec.structs.replace(self.job, sampling=sampling))

    async def _serve(
        self, play: Callable[[str, str, Sequence[str]], Awaitable[tuple[PhaseData, Sequence[tuple[int, float]]]]]
    ) -> PhaseData:
        if self._is_led or self._episode is not None:
            raise HandlerFailed("phase.serve was called in a rollout that has a conversation, or that another leads")
        from .harness.served_program import serve_program  # imports aiohttp, as above

        self._episode, self._serves = Episode(began=self._clock.began), True
        return await serve_program(await self._policy(), play)

    async def _policy(self) -> JobPolicy:
        """Return the job's policy, on the backend that the job is assigned to."""
        self._opening = self._opening or asyncio.Lock()  # conversations may begin at once
        async with self._opening:
            if self._opened is None:
                self._opened = await self._open_policy()
            return self._opened

    async def _open_policy(self) -> JobPolicy:
        episode = self._episode
        assert episode is not None, "a conversation has begun"
        more = await self._more_tools() if self._servers and not self._is_led else None
        asked_at = time.monotonic()
        backend = await self.backend.assigned()
        waited_s = time.monotonic() - asked_at
        parser_url = backend.chat.parser_url if self._is_led or self._serves else ""
        chat = await self._chat(msgspec.structs.replace(backend.chat, parser_url=parser_url))
        self._acting_since = time.monotonic()
        if waited_s >= BACKEND_WAIT_S:
            episode.timings["backend"] = waited_s
        generate, context = self.backend.generate, backend.context_tokens
        others = self._other_models() if (self._is_led or self._serves) and self.job.models else None
        return JobPolicy(generate, chat, context, self.job, episode, parser_url, others, more)

    async def _more_tools(self) -> MutableMapping[str, AnyTool]:
        """Start the job's MCP servers, and return their tools."""
        from ..tools.mcp.toolset import McpTools

        self._mcp = McpTools(self._servers, self.sandbox, self._services.mcp_keys, self._taken)
        with span("start MCP servers"):
            await self._mcp.open()
        return self._mcp.tools

    async def _be_led(self, policy: JobPolicy, messages: Sequence[ChatMessage], tools: Sequence[AnyTool]) -> None:
        if tools:
            names = ", ".join(tool.name for tool in tools)
            raise InvalidJob(
                f"the task {self.job.task} gives tools to the policy ({names}), which a program outside cannot use; "
                "use a task without tools, such as `outside`",
                field="task",
            )
        from .harness.outside_rollout import OutsideRollout  # imports aiohttp, as above

        self._outside = OutsideRollout(policy, messages, grades=self._handler.grades)
        await self._outside.lead(self._services.door())

    async def _chat(self, settings: ChatSettings) -> ChatFormat:
        arguments = self.job.template_arguments
        try:
            return await chat_format(settings.with_arguments(arguments))
        except ConfigError as error:
            if arguments and error.key in {"chat.template_arguments", "chat.template"}:
                raise InvalidJob(error.message, field="template_arguments") from error
            raise

    async def _is_broken(self, error: SandboxFailed | ToolSessionLost) -> bool:
        """Return whether the agent broke its sandbox: a fresh one works where that one does not."""
        sandbox = self.sandbox
        if sandbox is None or not (self._has_acted() and sandbox.held and sandbox.isolated):
            return False
        if error.fields.get("reason") in {*TASKS_OWN_REASONS, "server"}:
            return False
        with suppress(ProrlError):
            await sandbox.end_processes()  # its processes must not disturb a fresh one
        try:
            fresh = await self._create_fresh_sandbox(sandbox.spec)
            return (await fresh.exec(("/bin/sh", "-c", ":"), PROBE_S)).exit_code == 0
        except ProrlError:
            return False

    def _has_acted(self) -> bool:
        return self._episode is not None and self._episode.metrics["generated_tokens"] > 0

    def _agents_time_s(self) -> float:
        """Return the seconds since the conversation began, less those in the engine and in the service's chat format.

        With a harness the chat format's time stays: the harness decides how much work it gives the format.
        """
        timings = self._episode.timings if self._episode is not None else {}
        chat_s = timings.get("chat", 0.0) if self._harness is None else 0.0
        models_s = sum(seconds for name, seconds in timings.items() if name.startswith("model."))
        return time.monotonic() - self._acting_since - timings.get("engine", 0.0) - chat_s - models_s

    def _hands_on_sandbox(self) -> bool:
        return self._phase == Phase.INIT or (self._phase == Phase.RUN and self._handler.eval_in_sandbox)

    def _done(self, phase_data: PhaseData, evaluation: Evaluation | None = None) -> PhaseDone:
        return PhaseDone(
            sandbox=self.sandbox.handle if self.sandbox is not None and self._hands_on_sandbox() else None,
            phase_data=phase_data,
            reward=reward_of(evaluation) if evaluation is not None else None,
            rewards=self._rewards(evaluation) if evaluation is not None and evaluation.rewards else {},
            **self._record(evaluation),
        )

    def _rewards(self, evaluation: Evaluation) -> dict[str, float]:
        rewards = rewards_of(evaluation, self._command.conversations)
        return rewards if self._command.conversations else {}

    def _failed(self, failure: Failure) -> PhaseFailed:
        if failure.outcome == Outcome.INFRASTRUCTURE_ERROR:
            log.warning("%s failed: %s: %s", self._phase, failure.error.code, failure.error.message)
        return PhaseFailed(
            outcome=failure.outcome,
            error=failure.error,
            retry=failure.retry,
            reward=failure.reward if self._phase == Phase.EVAL or self._has_acted() else None,
            sandbox_gone=self._command.sandbox is not None and (self.sandbox is None or not self.sandbox.held),
            **self._record(),
        )

    def _record(self, evaluation: Evaluation | None = None) -> dict[str, Any]:
        episode, backend = self._episode or NO_EPISODE, self.backend.current
        metrics: dict[str, float] = {**episode.metrics}
        notes = {**episode.notes}
        trajectory, named = episode.trajectory, NOTHING_NAMED
        if episode.conversations or episode.turn_rewards:
            notes |= conversation_notes(episode.conversations, NOTES_LIMIT - len(notes))
            trajectory, named = episode.whole(), episode.named()
        if evaluation is not None:
            metrics |= evaluation.metrics
            notes |= evaluation.notes
        return {
            "stage_id": self._services.stage_id,
            "job_id": self.job.job_id,
            "attempt": self._command.attempt,
            "phase": self._phase,
            "stop_reason": episode.stop_reason or "",
            "backend": backend.backend_id if backend is not None else "",
            "metrics": {key: float(value) for key, value in metrics.items()},
            "notes": notes_of(notes),
            "timings": {str(self._phase): time.monotonic() - self._clock.began, **episode.timings},
            "steps": tuple(episode.steps),
            "tokens": trajectory.tokens,
            "turns": trajectory.turns if trajectory.tokens else 0,
            "segments": trajectory.segments,
            "conversations": named.conversations,
            "turn_rewards": named.turn_rewards,
            "logprobs_mode": backend.logprobs_mode if backend is not None and episode.metrics["turns"] else "",
        }

    def _failure_of(self, error: BaseException) -> Failure:
        """Return the job's outcome; ask the handler if the error may be the task's own."""
        phase, limit_s = self._phase, self._clock.limit_s
        if isinstance(error, asyncio.CancelledError):
            return Failure(Outcome.CANCELLED, Cancelled("the phase was stopped").info())
        if self._clock.expired and isinstance(error, TimeoutError):
            message = f"{phase} took longer than its limit of {limit_s:g} s"
            is_agents = self.job.outside is None and self._agents_time_s() > AGENTS_SHARE * limit_s
            reward = 0.0 if is_agents else None
            return Failure(Outcome.TIMEOUT, PhaseTimeout(message, phase=phase, limit_s=limit_s).info(), reward=reward)
        if not isinstance(error, Exception):
            return Failure(Outcome.FAILED, HandlerFailed(f"{phase} raised {error!r}").info())
        if not isinstance(error, ProrlError):
            log.warning("%s raised", phase, exc_info=error)
        hook = getattr(self._handler, f"{phase}_exception")
        try:
            failure: Failure = hook(self.job, error)
        except Exception as second:  # noqa: BLE001 - as above
            return failure_of(second)
        if failure.reward is not None and finite_reward(failure.reward) is None:
            return failure_of(HandlerFailed(f"{phase}_exception gave the reward {failure.reward!r}; {MUST_BE_FINITE}"))
        return failure


async def _close(sandbox: Sandbox) -> None:
    try:
        await sandbox.close()
    except (ProrlError, OSError) as error:
        log.warning("the job's sandbox could not be closed: %s", error)
