"""`PhaseRunner`: INIT, RUN or EVAL of one job, from its start to the event that reports its end.

The runner closes its `Rollout`. In INIT and RUN it owns the sandbox, and closes it unless a `PhaseDone` passes it to
the next phase. In EVAL the broker owns the sandbox, since another EVAL may need it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from ..data.conversations import finite_reward, segments_of_own_model
from ..data.trajectory import block_bytes
from ..errors import (
    Cancelled,
    EngineFailed,
    HandlerFailed,
    JudgeUnreachable,
    PhaseTimeout,
    ProrlError,
    SandboxBroken,
    SandboxFailed,
    SandboxLimitExceeded,
    ToolSessionLost,
)
from ..system.open_files import wait_for_descriptors
from ..system.traces import span
from ..tools.containers.specification import SandboxSpec
from ..tools.processes.child import to_the_end
from ..wire.messages.base import NOTES_LIMIT, new_id
from ..wire.messages.jobs import Outcome, Phase
from ..wire.messages.stages import PhaseDone, PhaseFailed
from ..wire.records import Recorded
from ..wire.sockets import MAX_FRAME_BYTES
from .episode import Named
from .handler import (
    TASKS_OWN_REASONS,
    AgentHandler,
    EvalPhase,
    Evaluation,
    Failure,
    InitPhase,
    PhaseData,
    failure_of,
)
from .job_backend import PhaseClock
from .judge import Judge
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
from .rollout import Rollout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..data.trajectory_builder import TrajectoryBuilder
    from ..tools.sandbox.sandbox import Sandbox
    from ..wire.messages.jobs import Job, RecordForm
    from ..wire.messages.stages import StartPhase
    from .stage_services import StageServices

log = logging.getLogger("prorl.stage")
AGENTS_SHARE = 0.5
"""The share of RUN's limit spent in tools, not in the engine, from which on a timeout is the agent's own fault."""
DESCRIPTORS, DESCRIPTORS_LIMIT_S = 16, 60.0
"""More descriptors than a phase uses in its process at a time; seconds that a phase waits for them."""
PROBE_S = 10.0
BLOCK_LIMIT_BYTES = MAX_FRAME_BYTES
"""Largest trajectory with its records, as one frame; the last records are dropped first."""
NOT_GIVEN, TOO_LARGE = "the engine gave none", "the trajectory would be too large"
NOTHING_NAMED = Named()
REPORTED_REWARD = "reward reported by the program outside"
"""The key of the reported reward in RUN's data."""


class PhaseRunner:
    """Runs one phase; `run` is called once."""

    def __init__(self, services: StageServices, command: StartPhase, job: Job, handler: AgentHandler[Any]) -> None:
        self.job = job
        self.sandbox: Sandbox | None = None
        self._services, self._command, self._handler = services, command, handler
        self._phase = command.phase
        self._clock = PhaseClock(job.limits.of(command.phase))
        self.rollout = Rollout(services, job, command.attempt, self._clock, handler)
        self._judge: Judge | None = None
        self._fresh: list[Sandbox] = []
        """The fresh sandboxes, which are closed when the phase ends."""

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
        trajectory = self.rollout.episode.whole() if event.tokens else None
        if trajectory is not None and event.records:
            records = trajectory.checked(event.records, segments_of_own_model(event))
            event = msgspec.structs.replace(event, records=records)
        if self.sandbox is not None:
            if self._phase == Phase.EVAL or (isinstance(event, PhaseDone) and self._hands_on_sandbox()):
                self._services.handoff.hold(self.sandbox)
            else:
                self._fresh.append(self.sandbox)
        for sandbox in self._fresh:
            with suppress(asyncio.CancelledError):  # too late: the phase has ended, and its event has the outcome
                await to_the_end(_close(sandbox))
        return event, trajectory.block(event.records) if trajectory is not None and event.tokens else None

    def add_time(self, seconds: float) -> None:
        """Extend the phase's limit by a pause of this process."""
        self.rollout.add_time(seconds)
        self._clock.add(seconds)

    async def _ran(self) -> PhaseDone:
        job, instance = self.job, self._handler.parse_instance(self.job)
        self.rollout.choose(instance)
        if self._command.sandbox is not None:
            self.sandbox = await self._services.sandboxes.attach(self._command.sandbox)
        match self._phase:
            case Phase.INIT:
                data = await self._handler.init(InitPhase(job, instance, self._create_sandbox))
                checked_data(Phase.INIT, data)
                if self.rollout.needs_sandbox:
                    await self._create_sandbox(SandboxSpec())  # unless the task has made one
                return self._done(data)
            case Phase.RUN:
                return await self._run(instance)
            case _:
                return await self._eval(instance)

    async def _run(self, instance: Any) -> PhaseDone:
        rollout = self.rollout
        phase = rollout.phase(instance, self._command.phase_data, self.sandbox, self._create_fresh_sandbox)
        try:
            try:
                data = await self._handler.run(phase)
            finally:
                await rollout.close_servers()
            if self.sandbox is not None and self._hands_on_sandbox() and self._handler.ends_processes(instance):
                await self.sandbox.end_processes()
            data = passed_on(data)
            if rollout.reported_reward is not None:
                data[REPORTED_REWARD] = rollout.reported_reward
            return self._done(data)
        except SandboxLimitExceeded:
            raise
        except (SandboxFailed, ToolSessionLost) as error:
            if await self._is_broken(error):
                raise SandboxBroken(f"the agent broke its sandbox: {error.message}") from error
            raise
        except EngineFailed as error:  # also for messages that the agent loop could not process
            rollout.failed(error)
            raise
        finally:
            await rollout.close()

    async def _eval(self, instance: Any) -> PhaseDone:
        job, data, grade = self.job, self._command.phase_data, self._services.graders.call
        judge = self._judge = Judge(self.rollout.other_models())
        phase = EvalPhase(job, instance, data, self.sandbox, self._create_fresh_sandbox, grade, judge)
        reported = data.get(REPORTED_REWARD) if job.outside is not None else None
        with span("grade", {"prorl.task": job.task}):
            try:
                if reported is None:
                    evaluation = checked_evaluation("eval", await self._handler.eval(phase))
                else:
                    evaluation = Evaluation(reported)
            finally:
                judge.models.release()
        shaped = checked_evaluation("final_result", self._handler.final_result(job, evaluation))
        return self._done({}, shaped)

    async def _create_sandbox(self, spec: SandboxSpec) -> Sandbox:
        if self.sandbox is None:
            spec = self.rollout.prepared(spec)
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

    async def _is_broken(self, error: SandboxFailed | ToolSessionLost) -> bool:
        """Return whether the agent broke its sandbox: a fresh one works where that one does not."""
        sandbox = self.sandbox
        if sandbox is None or not (self.rollout.has_acted and sandbox.held and sandbox.isolated):
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
            reward=failure.reward if self._phase == Phase.EVAL or self._earned else None,
            sandbox_gone=self._command.sandbox is not None and (self.sandbox is None or not self.sandbox.held),
            **self._record(),
        )

    @property
    def _earned(self) -> bool:
        """Whether a failure of RUN earns its reward: of several trained models, none knows which one failed."""
        return self.rollout.has_acted and len(self.rollout.episode.trained_models) < 2

    def _record(self, evaluation: Evaluation | None = None) -> dict[str, Any]:
        episode, backend = self.rollout.episode, self.rollout.backend.current
        metrics: dict[str, float] = {**episode.metrics}
        notes = {**episode.notes}
        trajectory, named = episode.trajectory, NOTHING_NAMED
        if episode.conversations or episode.turn_rewards:
            notes |= conversation_notes(episode.conversations, NOTES_LIMIT - len(notes))
            trajectory, named = episode.whole(), episode.named()
        records, dropped = self._records(trajectory) if self.job.record else ((), {})
        if evaluation is not None:
            metrics |= evaluation.metrics
            notes |= evaluation.notes
        if self._judge is not None:
            room = NOTES_LIMIT - len(notes)
            notes = {**dict(islice(self._judge.notes.items(), room)), **notes}
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
            "records": records,
            "records_dropped": dropped,
            "chat": backend.chat if backend is not None and self.job.teacher and self._phase == Phase.RUN else None,
            "logprobs_mode": backend.logprobs_mode if backend is not None and episode.metrics["turns"] else "",
        }

    def _records(self, trajectory: TrajectoryBuilder) -> tuple[tuple[RecordForm, ...], dict[str, str]]:
        """Return the records that the trajectory has room for, and why others that the job asked for are not there."""
        if self._phase != Phase.RUN or not trajectory.tokens:
            return (), {}
        records = trajectory.records
        while block_bytes(trajectory.tokens, trajectory.turns, records) > BLOCK_LIMIT_BYTES:
            records = records[:-1]
        there, kept = ({one.name for one in forms} for forms in (trajectory.records, records))
        asked = Recorded.parse(self.job.record).names
        return records, {name: TOO_LARGE if name in there else NOT_GIVEN for name in asked if name not in kept}

    def _failure_of(self, error: BaseException) -> Failure:
        """Return the job's outcome; ask the handler if the error may be the task's own."""
        phase, limit_s = self._phase, self._clock.limit_s
        if isinstance(error, asyncio.CancelledError):
            return Failure(Outcome.CANCELLED, Cancelled("the phase was stopped").info())
        if self._clock.expired and isinstance(error, TimeoutError):
            message = f"{phase} took longer than its limit of {limit_s:g} s"
            if self._judge is not None and self._judge.unanswered:
                error = JudgeUnreachable(f"{message}, and waited for its judge")
                return Failure(Outcome.INFRASTRUCTURE_ERROR, error.info(), retry=True)
            is_agents = self.job.outside is None and self.rollout.agents_time_s() > AGENTS_SHARE * limit_s
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
