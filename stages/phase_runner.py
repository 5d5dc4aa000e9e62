"""One phase of one job, from its start to the event that reports its end: limits, cancellation, cleanup.

The runner owns the phase's assignment, and in INIT and RUN the sandbox, which it closes unless a `PhaseDone` passes it
to the next phase. In EVAL the broker owns the sandbox, since another EVAL may need it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

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
from ..metrics.catalog import GENERATE_SECONDS
from ..system.open_files import wait_for_descriptors
from ..system.traces import span
from ..tools.containers.specification import SandboxSpec
from ..tools.processes.child import to_the_end
from ..wire.messages.base import new_id
from ..wire.messages.jobs import Outcome, Phase
from ..wire.messages.stages import PhaseDone, PhaseFailed
from .agent_loop import AgentLoop, check_opening
from .episode import Episode, JobPolicy
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
from .judge import EngineJudge, Judge
from .phase_data import checked_data, checked_evaluation, passed_on
from .phase_ends import checked, notes_of, readable, reward_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..inference.chat import ChatFormat, ChatMessage
    from ..inference.client import EngineClient
    from ..inference.engine import Generation
    from ..tools.sandbox.sandbox import Sandbox
    from ..tools.sandbox.sandboxes import Sandboxes
    from ..tools.tool import Tool
    from ..wire.messages.backends import Backend, ChatSettings
    from ..wire.messages.jobs import Job, Sampling
    from ..wire.messages.stages import StartPhase
    from .backend_client import BackendClient
    from .grading.grader_pool import GraderPool
    from .harness.outside_rollout import OutsideRollout
    from .harness.rollout import ChosenHarness
    from .harness.rollout_door import RolloutDoor
    from .judge import JudgeServer
    from .sandbox_handoff import SandboxHandoff

log = logging.getLogger("prorl.stage")
AGENTS_SHARE = 0.5
"""A RUN that is out of time is the agent's own fault if so much of its limit passed in tools, and not in the engine."""
DESCRIPTORS, DESCRIPTORS_LIMIT_S = 16, 60.0
"""More than a phase takes of its process at a time; how long it waits for so many."""
PROBE_S = 10.0
BACKEND_WAIT_S = 0.1
"""A shorter wait for a backend is not among the timings."""
NO_EPISODE = Episode()
"""What is recorded of a phase without a conversation; it is only read."""
REPORTED_REWARD = "reward reported by the program outside"
"""Where RUN's data have it."""
MOVE_LIMIT = 4
"""How often a phase goes on with another backend after one has failed its generation; then the attempt has failed."""


@dataclass(slots=True)
class PhaseRunner:
    stage_id: str
    command: StartPhase
    job: Job
    handler: AgentHandler[Any]
    sandboxes: Sandboxes
    backends: BackendClient
    engines: EngineClient
    handoff: SandboxHandoff
    graders: GraderPool
    judges: JudgeServer
    door: Callable[[], RolloutDoor]
    """Returns where programs outside lead rollouts of this process."""
    _sandbox: Sandbox | None = field(default=None, init=False)
    _fresh: list[Sandbox] = field(default_factory=list, init=False)
    """Those that end with the phase."""
    _backend: Backend | None = field(default=None, init=False)
    _episode: Episode | None = field(default=None, init=False)
    _has_conversed: bool = field(default=False, init=False)
    _harness: ChosenHarness | None = field(default=None, init=False)
    _outside: OutsideRollout | None = field(default=None, init=False)
    _conversing: float = field(default=math.inf, init=False)
    """Since when the agent acts."""
    _moves: int = field(default=0, init=False)
    _reported: EngineFailed | None = field(default=None, init=False)
    _started: float = field(default_factory=time.monotonic, init=False)
    _timer: asyncio.Timeout | None = field(default=None, init=False)

    async def run(self) -> tuple[PhaseDone | PhaseFailed, NDArray[np.uint8] | None]:
        """Return the event that ends the phase, and the trajectory's block if it has one. Never raises.

        Cancelling the call, once, ends the phase with outcome `cancelled`.
        """
        limit_s = self.job.limits.of(self.command.phase)
        event: PhaseDone | PhaseFailed
        try:
            await wait_for_descriptors(DESCRIPTORS, DESCRIPTORS_LIMIT_S)
            async with asyncio.timeout(limit_s) as self._timer:
                event = checked(await self._phase())
            closing = not self._hands_on_sandbox()
        except BaseException as error:  # noqa: BLE001 - the boundary between the task's code and the service
            timed_out = self._timer is not None and self._timer.expired()
            event = readable(self._failed(self._failure_of(error, limit_s, timed_out=timed_out)))
            closing = True
        if self._sandbox is not None:
            if closing and self.command.phase != Phase.EVAL:
                self._fresh.append(self._sandbox)
            else:
                self.handoff.hold(self._sandbox)
        for sandbox in self._fresh:
            with suppress(asyncio.CancelledError):  # too late: the phase has ended, and its event says how
                await to_the_end(self._close_sandbox(sandbox))
        block = self._episode.trajectory.block() if self._episode is not None and event.tokens else None
        return event, block

    @property
    def so_far(self) -> tuple[Episode, str]:
        """The rollout until now, and its backend."""
        return self._episode or NO_EPISODE, self._backend.backend_id if self._backend is not None else ""

    def add_time(self, seconds: float) -> None:
        """Move the phase's limit: this process did not run for so long."""
        if self._outside is not None:
            self._outside.add_time(seconds)
        if self._timer is not None and not self._timer.expired() and (until := self._timer.when()) is not None:
            with suppress(RuntimeError):  # the phase has ended, and its sandbox is still being closed
                self._timer.reschedule(until + seconds)

    async def _phase(self) -> PhaseDone:
        instance = self.handler.parse_instance(self.job)
        choice = self.handler.harness(self.job, instance)
        if choice is not None and self.job.outside is not None:
            raise InvalidJob("a job names a harness or has a program outside, not both", field="harness")
        if choice is not None:
            from .harness.rollout import ChosenHarness  # with aiohttp, which takes half of a process's start

            self._harness = ChosenHarness.find(choice)
        if self.command.sandbox is not None:
            self._sandbox = await self.sandboxes.attach(self.command.sandbox)
        match self.command.phase:
            case Phase.INIT:
                opening = InitPhase(self.job, instance, self._create_sandbox)
                data = checked_data(Phase.INIT, await self.handler.init(opening))
                if self._harness is not None:
                    await self._create_sandbox(SandboxSpec())  # unless the task has made one
                return self._done(data)
            case Phase.RUN:
                phase = RunPhase(self.job, instance, self.command.phase_data, self._sandbox, self._converse)
                try:
                    data = await self.handler.run(phase)
                    if self._sandbox is not None and self._hands_on_sandbox():
                        await self._sandbox.end_processes()
                    return self._done(self._with_report(passed_on(data)))
                except SandboxLimitExceeded:
                    raise
                except (SandboxFailed, ToolSessionLost) as error:
                    if await self._is_broken(error):
                        raise SandboxBroken(f"the agent broke its sandbox: {error.message}") from error
                    raise
                except EngineFailed as error:  # also of what the agent loop could make nothing of
                    if not (error.fields.get("refused") or error.fields.get("parser")):
                        self._report(error)
                    raise
                finally:
                    self.backends.release(self.job.job_id, self.command.attempt)
            case Phase.EVAL:
                grading = EvalPhase(
                    self.job,
                    instance,
                    self.command.phase_data,
                    self._sandbox,
                    self._create_fresh_sandbox,
                    self.graders.call,
                    Judge(self.judges, EngineJudge(self.job, self.command.attempt, self.backends, self.engines)),
                )
                with span("grade", {"prorl.task": self.job.task}):
                    evaluation = self._programs_own() or checked_evaluation("eval", await self.handler.eval(grading))
                shaped = self.handler.final_result(self.job, evaluation)
                return self._done({}, checked_evaluation("final_result", shaped))

    async def _create_sandbox(self, spec: SandboxSpec) -> Sandbox:
        if self._sandbox is None:
            if self._harness is not None:
                spec = self._harness.prepared(spec)
            # Brokers that share the node may have jobs of the same id.
            name = f"{self.job.job_id}.{self.command.attempt}-{new_id()[:8]}"
            with span("create sandbox"):
                self._sandbox = await self.sandboxes.create(name, spec)
        return self._sandbox

    async def _create_fresh_sandbox(self, spec: SandboxSpec) -> Sandbox:
        with span("create sandbox"):
            self._fresh.append(await self.sandboxes.create(f"{self.job.job_id}.eval-{new_id()[:8]}", spec))
        return self._fresh[-1]

    async def _assigned(self) -> Backend:
        if self._backend is None:
            timer, loop = self._timer, asyncio.get_running_loop()
            assert timer is not None, "an engine is asked for within a phase"
            deadline, paused = timer.when(), 0.0

            def pause() -> None:
                nonlocal paused
                if not timer.expired():
                    paused = paused or loop.time()
                    timer.reschedule(None)

            try:
                with span("assign backend"):
                    self._backend = await self.backends.assign(self.job, self.command.attempt, pause)
            finally:
                if paused and deadline is not None and not timer.expired():
                    timer.reschedule(deadline + loop.time() - paused)  # the start of a backend is no time of the job's
        return self._backend

    async def _converse(self, messages: Sequence[ChatMessage], tools: Sequence[Tool[Any]]) -> Episode:
        if self._has_conversed:
            raise HandlerFailed(
                "phase.converse was called a second time; a rollout has one conversation, and its trajectory, mask and "
                "limits are of that one: pass all opening messages in one call, and let tools answer the policy"
            )
        check_opening(messages, tools)
        self._has_conversed = True
        asked_at = time.monotonic()
        backend = await self._assigned()
        waited_s = time.monotonic() - asked_at
        has_program = self._harness is not None or self.job.outside is not None
        chat = await self._chat(backend.chat if has_program else msgspec.structs.replace(backend.chat, parser_url=""))
        self._episode, self._conversing = Episode(began=self._started), time.monotonic()
        if waited_s >= BACKEND_WAIT_S:
            self._episode.timings["backend"] = waited_s
        policy = JobPolicy(
            self._generate, chat, backend.context_tokens, self.job, self._episode, backend.chat.parser_url
        )
        if self.job.outside is not None:
            await self._be_led(policy, messages, tools)
        elif self._harness is None:
            await AgentLoop(policy, tools).run(messages)
        elif self._sandbox is None:
            raise SandboxFailed("a harness needs the job's sandbox, and there is none")
        else:
            await self._harness.lead(policy, messages, self._sandbox)
        return self._episode

    async def _be_led(self, policy: JobPolicy, messages: Sequence[ChatMessage], tools: Sequence[Tool[Any]]) -> None:
        """Let a program outside lead the rollout to its end."""
        if tools:
            names = ", ".join(tool.name for tool in tools)
            raise InvalidJob(
                f"the task {self.job.task} gives tools to the policy ({names}), which a program outside cannot use; "
                "use a task without tools, such as `outside`",
                field="task",
            )
        from .harness.outside_rollout import OutsideRollout  # with aiohttp, as above

        self._outside = OutsideRollout(policy, messages, grades=self.handler.grades)
        await self._outside.lead(self.door())

    def _with_report(self, data: PhaseData) -> PhaseData:
        """Return RUN's data with the reward that a program outside has reported."""
        reward = self._outside.reward if self._outside is not None else None
        return data if reward is None else {**data, REPORTED_REWARD: reward}

    def _programs_own(self) -> Evaluation | None:
        """Return the evaluation of a program outside, which takes the place of the task's."""
        reward = self.command.phase_data.get(REPORTED_REWARD) if self.job.outside is not None else None
        return None if reward is None else Evaluation(reward)

    async def _chat(self, settings: ChatSettings) -> ChatFormat:
        arguments = self.job.template_arguments
        try:
            return await chat_format(settings.with_arguments(arguments))
        except ConfigError as error:
            if arguments and error.key in {"chat.template_arguments", "chat.template"}:
                raise InvalidJob(error.message, field="template_arguments") from error
            raise

    async def _generate(
        self, token_ids: NDArray[np.int32], sampling: Sampling, stop_token_ids: Sequence[int]
    ) -> Generation:
        """Generate on the job's backend; if it fails, on another one of the same policy, or on it when it is well.

        The attempt goes on: the tokens are all that an engine needs.
        """
        backend = await self._assigned()
        job, limit_s = self.job, self.job.episode.generation_s
        give_up: float | None = None
        while True:
            began = time.monotonic()
            try:
                done = await self.engines.generate(
                    backend, job.job_id, token_ids, sampling, stop_token_ids, timeout_s=limit_s
                )
            except EngineFailed as error:
                if error.fields.get("refused"):
                    raise
                self._report(error)
                give_up = give_up or time.monotonic() + job.backend_wait_s
                if error.fields.get("unreachable"):
                    last = time.monotonic() > give_up
                else:
                    self._moves += 1
                    last = self._moves > MOVE_LIMIT
                if last:
                    raise
                other = await self.backends.assign(job, self.command.attempt, leaving=backend.backend_id)
                if not _interchangeable(backend, other):
                    raise
                log.info("the job goes on with backend %s: %s", other.backend_id, error.message)
                self._backend = backend = other
            else:
                self.backends.note_served(job.job_id, self.command.attempt)
                GENERATE_SECONDS.observe(time.monotonic() - began, backend.backend_id)
                return done

    def _report(self, error: EngineFailed) -> None:
        """Report a failed generation to the broker, once."""
        if self._backend is not None and error is not self._reported:
            self._reported = error
            self.backends.report_failure(self.job.job_id, self._backend, error.message)

    async def _is_broken(self, error: SandboxFailed | ToolSessionLost) -> bool:
        """Return whether the agent broke its sandbox: a fresh one works where that one does not."""
        sandbox = self._sandbox
        if sandbox is None or not (self._has_acted() and sandbox.held and sandbox.isolated):
            return False
        if error.fields.get("reason") in TASKS_OWN_REASONS:
            return False
        with suppress(ProrlError):
            await sandbox.end_processes()  # what runs there must not disturb a fresh one
        try:
            fresh = await self._create_fresh_sandbox(sandbox.spec)
            return (await fresh.exec(("/bin/sh", "-c", ":"), PROBE_S)).exit_code == 0
        except ProrlError:
            return False

    def _has_acted(self) -> bool:
        return self._episode is not None and self._episode.metrics["generated_tokens"] > 0

    def _agents_time_s(self) -> float:
        """Return the seconds since the conversation began that neither the engine nor the chat format took.

        What a harness has the chat format do is its own choice, and may be much at a time.
        """
        timings = self._episode.timings if self._episode is not None else {}
        chat_s = timings.get("chat", 0.0) if self._harness is None else 0.0
        return time.monotonic() - self._conversing - timings.get("engine", 0.0) - chat_s

    def _hands_on_sandbox(self) -> bool:
        phase = self.command.phase
        return phase == Phase.INIT or (phase == Phase.RUN and self.handler.eval_in_sandbox)

    async def _close_sandbox(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.close()
        except (ProrlError, OSError) as error:
            log.warning("the job's sandbox could not be closed: %s", error)

    def _done(self, phase_data: PhaseData, evaluation: Evaluation | None = None) -> PhaseDone:
        return PhaseDone(
            sandbox=self._sandbox.handle if self._sandbox is not None and self._hands_on_sandbox() else None,
            phase_data=phase_data,
            reward=reward_of(evaluation) if evaluation is not None else None,
            **self._record(evaluation),
        )

    def _failed(self, failure: Failure) -> PhaseFailed:
        if failure.outcome == Outcome.INFRASTRUCTURE_ERROR:
            log.warning("%s failed: %s: %s", self.command.phase, failure.error.code, failure.error.message)
        return PhaseFailed(
            outcome=failure.outcome,
            error=failure.error,
            retry=failure.retry,
            reward=failure.reward if self.command.phase == Phase.EVAL or self._has_acted() else None,
            sandbox_gone=self.command.sandbox is not None and (self._sandbox is None or not self._sandbox.held),
            **self._record(),
        )

    def _record(self, evaluation: Evaluation | None = None) -> dict[str, Any]:
        """Return the fields that both kinds of event have."""
        episode = self._episode if self._episode is not None else NO_EPISODE
        metrics = {**episode.metrics, **(evaluation.metrics if evaluation is not None else {})}
        trajectory = episode.trajectory
        return {
            "stage_id": self.stage_id,
            "job_id": self.job.job_id,
            "attempt": self.command.attempt,
            "phase": self.command.phase,
            "stop_reason": episode.stop_reason or "",
            "backend": self._backend.backend_id if self._backend is not None else "",
            "metrics": {key: float(value) for key, value in metrics.items()},
            "notes": notes_of({**episode.notes, **(evaluation.notes if evaluation is not None else {})}),
            "timings": {str(self.command.phase): time.monotonic() - self._started, **episode.timings},
            "steps": tuple(episode.steps),
            "tokens": trajectory.tokens,
            "turns": trajectory.turns if trajectory.tokens else 0,
            "segments": trajectory.segments,
            "logprobs_mode": self._backend.logprobs_mode if self._backend and episode.metrics["turns"] else "",
        }

    def _failure_of(self, error: BaseException, limit_s: float, *, timed_out: bool) -> Failure:
        """Return how the job ends, asking the handler where the error may be the task's own."""
        phase = self.command.phase
        if isinstance(error, asyncio.CancelledError):
            return Failure(Outcome.CANCELLED, Cancelled("the phase was stopped").info())
        if timed_out and isinstance(error, TimeoutError):
            message = f"{phase} took longer than its limit of {limit_s:g} s"
            is_agents = self.job.outside is None and self._agents_time_s() > AGENTS_SHARE * limit_s
            reward = 0.0 if is_agents else None
            return Failure(Outcome.TIMEOUT, PhaseTimeout(message, phase=phase, limit_s=limit_s).info(), reward=reward)
        if not isinstance(error, Exception):
            return Failure(Outcome.FAILED, HandlerFailed(f"{phase} raised {error!r}").info())
        if not isinstance(error, ProrlError):
            log.warning("%s raised", phase, exc_info=error)
        hook = getattr(self.handler, f"{phase}_exception")
        try:
            failure: Failure = hook(self.job, error)
        except Exception as second:  # noqa: BLE001 - as above
            return failure_of(second)
        return failure


def _interchangeable(one: Backend, other: Backend) -> bool:
    """Return whether a conversation can go on with another backend: the same policy, tokens, log-probs, and room."""
    fields = ("model", "chat", "logprobs_mode", "context_tokens")
    return all(getattr(one, name) == getattr(other, name) for name in fields)
