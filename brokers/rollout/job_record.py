"""`JobRecord`: the job table's record of one job, and the part of it that the journal stores."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec
from msgspec.structs import replace

from ...data.conversations import segments_of_own_model
from ...errors import ErrorInfo, LeaseLost, MalformedMessage, NoStage, PhaseTimeout
from ...wire import codec
from ...wire.messages.jobs import Job, Outcome, Phase, Result
from ...wire.messages.stages import PhaseFailed, StartPhase, TextToScore
from ...wire.records import TEACHER
from ..journal.records import Finished, JobState, holder_of, job_digest
from .stage_pool import Requirement, SlotClaim

if TYPE_CHECKING:
    from ...wire.messages.jobs import ConversationPart, RecordName, SandboxHandle
    from ...wire.messages.stages import PhaseDone
    from .fair_queue import Flow

QUEUE_TIMING = {phase: f"{phase}_queue" for phase in Phase}
QUEUE_TIMINGS = frozenset(QUEUE_TIMING.values())
"""Timings that a restarted job keeps."""
NEXT_PHASE = {Phase.INIT: Phase.RUN, Phase.RUN: Phase.EVAL}
RESTART_PHASE = {Phase.INIT: Phase.INIT, Phase.RUN: Phase.INIT, Phase.EVAL: Phase.EVAL, Phase.SCORE: Phase.SCORE}
WORKING = (Phase.INIT, Phase.RUN, Phase.EVAL)
"""The phases that count as a job's work; SCORE only waits for a teacher."""
REASON_LIMIT = 128
"""Longest reason of a dropped record, in characters."""
LossCause = Literal["died", "silent", "left", "unreported"]
LOSSES: dict[LossCause, str] = {
    "died": "died: its connection ended, and it has not reported since",
    "silent": "fell silent: it hangs, or its link is cut",
    "left": "left in good order",
    "unreported": "lives and does not have it: the start never arrived",
}


class JobStatus(StrEnum):
    """The status of a job within its phase."""

    QUEUED = "queued"
    HELD = "held"
    MOVING = "moving"
    """Between the two others, within one event."""


@dataclass(slots=True)
class JobRecord:
    sequence: int
    session: str
    job_id: str
    task: str
    stage_wait_s: float
    packed: bytes
    decoded: Job | None
    """None until needed, after the journal restored the job."""
    phase: Phase = Phase.INIT
    status: JobStatus = JobStatus.MOVING
    attempt: int = 1
    attempts_given_back: int = 0
    stage_id: str = ""
    """The stage process that holds the phase."""
    since: float = 0.0
    """When the job was queued or held."""
    confirmed: bool = False
    """Whether the holder has reported the phase, so that the holder's lease applies."""
    lease_until: float = 0.0
    """Until when an unconfirmed holder may report the phase."""
    sandbox: SandboxHandle | None = None
    phase_data: dict[str, Any] = field(default_factory=dict)
    run: PhaseDone | PhaseFailed | None = None
    last: PhaseDone | PhaseFailed | None = None
    """The event with which the job ends, while it is in SCORE."""
    block: Any = None
    avoids: str = ""
    """The node where the last attempt failed, which INIT avoids if another node serves the task."""
    metrics: dict[str, float] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    in_batch: bool = False
    flow: Flow = field(init=False, repr=False)
    """The flow in which the job shares slots; set once the job is counted."""
    _claim: SlotClaim | None = None
    _requirement: Requirement | None = None
    """Caches of `claim` and `requirement`."""

    @property
    def holder(self) -> str:
        return holder_of(self.session, in_batch=True) if self.in_batch else self.session

    @property
    def job(self) -> Job:
        """The job, decoded when first needed: a journal may restore a hundred thousand of them."""
        if self.decoded is None:
            try:
                self.decoded = codec.decode(self.packed, Job, limit_bytes=len(self.packed))
            except MalformedMessage:  # from a damaged journal; stage processes cannot read it either
                self.decoded = Job(task=self.task, instance={}, job_id=self.job_id, max_attempts=1)
        return self.decoded

    @property
    def claim(self) -> SlotClaim:
        claim = self._claim
        if claim is None or claim.attempt != self.attempt:
            claim = self._claim = SlotClaim(self.job_id, self.attempt)
        return claim

    @property
    def requirement(self) -> Requirement:
        kept = self.run.kept if self.phase == Phase.SCORE and self.run is not None else None
        place = kept or self.sandbox
        requirement, node = self._requirement, place.node if place is not None else None
        if requirement is None or requirement.role != self.phase or requirement.node != node:
            requirement = self._requirement = Requirement(self.phase, self.task, node)
        return requirement

    def start_command(self) -> StartPhase:
        """Return the command that starts the phase."""
        run = self.run
        return StartPhase(
            job_id=self.job_id,
            attempt=self.attempt,
            phase=self.phase,
            sandbox=self.sandbox,
            phase_data=self.phase_data,
            conversations=tuple(part.name for part in run.conversations) if run is not None else (),
            text=self._text() if self.phase == Phase.SCORE else None,
        )

    def _text(self) -> TextToScore | None:
        """Return what the teacher is to score; None: the policy generated no segment."""
        run = self.run
        ranges = tuple(segments_of_own_model(run)) if run is not None and run.tokens else ()
        if run is None or run.chat is None or not ranges:
            return None
        return TextToScore(chat=run.chat, tokens=run.tokens, ranges=ranges, kept=run.kept)

    def note(self, event: PhaseDone | PhaseFailed, block: Any) -> None:
        """Take over what a phase reports; `block` is the trajectory, from RUN and from SCORE."""
        self.metrics.update(event.metrics)
        self.timings.update(event.timings)
        if event.phase == Phase.RUN:
            self.run, self.block = event, block
        elif event.phase == Phase.SCORE and self.run is not None:
            dropped = {**self.run.records_dropped, **event.records_dropped}
            if event.records:
                records, self.block = (*self.run.records, *event.records), block
                self.run = replace(self.run, records=records, kept=event.kept)
            self.run = replace(self.run, records_dropped=dropped)

    def is_for_teacher(self, last: PhaseDone | PhaseFailed) -> bool:
        """Return whether the job's teacher is to score the trajectory of a job that ends with this event."""
        if self.last is not None or self.run is None or self.run.chat is None:  # as with each job without a teacher
            return False
        return self._reward(last) is not None and self._text() is not None

    def _drop_scores(self, error: ErrorInfo) -> None:
        """Note why the result has no scores."""
        if self.run is not None:
            why = f"{error.code}: {error.message}"[:REASON_LIMIT]
            self.run = replace(self.run, records_dropped={**self.run.records_dropped, TEACHER: why})

    def worked_s(self, now: float) -> float:
        """Return the seconds in INIT, RUN and EVAL so far, without queues."""
        ended = sum(self.timings.get(phase, 0.0) for phase in WORKING)
        is_at_work = self.status == JobStatus.HELD and self.phase != Phase.SCORE
        return ended + (now - self.since if is_at_work else 0.0)

    def is_held_by(self, stage_id: str, attempt: int) -> bool:
        return self.status == JobStatus.HELD and self.stage_id == stage_id and self.attempt == attempt

    def is_current(self, event: PhaseDone | PhaseFailed) -> bool:
        """Return whether an event is of the phase that its sender holds now."""
        return self.is_held_by(event.stage_id, event.attempt) and self.phase == event.phase

    @classmethod
    def restored(cls, state: JobState) -> Self:
        """Return the record of a journaled job, without a status."""
        return cls(
            *state[:6],
            None,
            state.phase,
            attempt=state.attempt,
            attempts_given_back=state.attempts_given_back,
            sandbox=state.sandbox,
            phase_data=state.phase_data,
            run=state.run,
            last=state.last,
            block=state.block,
            metrics=dict(state.metrics),
            timings=dict(state.timings),
            in_batch=state.in_batch,
        )

    def state(self, history: bytes) -> JobState:
        """Return the state for the journal, with the packed `history`."""
        return JobState(
            self.sequence,
            self.session,
            self.job_id,
            self.task,
            self.stage_wait_s,
            self.packed,
            self.phase,
            self.stage_id if self.status == JobStatus.HELD else "",
            self.attempt,
            self.attempts_given_back,
            self.sandbox,
            self.phase_data,
            self.run,
            self.block,
            dict(self.metrics),
            dict(self.timings),
            history,
            self.in_batch,
            self.last,
        )

    def forget_phases(self) -> None:
        self.sandbox = self.run = self.block = None
        self.phase_data, self.metrics = {}, {}
        self.timings = {name: value for name, value in self.timings.items() if name in QUEUE_TIMINGS}

    def finished(self, outcome: Outcome, error: ErrorInfo | None, last: PhaseDone | PhaseFailed | None) -> Finished:
        """Return the result for the client; `last` is the event that ended the job, if any.

        A job in SCORE ends as it was judged before; an error costs only the scores.
        """
        judged = self.last
        if judged is not None:
            if error is not None:
                self._drop_scores(error)
            outcome, error = Outcome.COMPLETED, None
            if isinstance(judged, PhaseFailed):
                outcome, error = judged.outcome, judged.error
            last = judged
        result = self._result(outcome, error, last)
        return Finished(
            self.session,
            result,
            self.block,
            job_digest(self.packed),
            self.sequence,
            in_batch=self.in_batch,
            packed=self.packed if result.kept is not None and not self.in_batch else b"",
        )

    def _result(self, outcome: Outcome, error: ErrorInfo | None, last: PhaseDone | PhaseFailed | None) -> Result:
        run = self.run
        return Result(
            job_id=self.job_id,
            task=self.task,
            outcome=outcome,
            group_id=self.job.group_id,
            attempt=self.attempt,
            reward=self._reward(last),
            error=error,
            stop_reason=run.stop_reason if run is not None else "",
            model=self.job.model,
            backend=run.backend if run is not None else "",
            metrics=self.metrics,
            timings=self.timings,
            steps=run.steps if run is not None else (),
            notes={**(run.notes if run is not None else {}), **(last.notes if last is not None else {})},
            tokens=run.tokens if run is not None else 0,
            turns=run.turns if run is not None else 0,
            segments=run.segments if run is not None else (),
            conversations=self._conversations(last) if run is not None and run.conversations else (),
            turn_rewards=run.turn_rewards if run is not None else (),
            logprobs_mode=run.logprobs_mode if run is not None else "",
            records=run.records if run is not None else (),
            records_dropped=self._records_dropped(last),
            kept=run.kept if run is not None else None,
        )

    def _reward(self, last: PhaseDone | PhaseFailed | None) -> float | None:
        if last is None or (isinstance(last, PhaseFailed) and self._trains_several):
            return None
        return last.reward

    def _records_dropped(self, last: PhaseDone | PhaseFailed | None) -> dict[RecordName, str]:
        run = self.run
        if run is None:
            return {}
        if not run.tokens or TEACHER in run.records_dropped or not self.job.teacher:
            return run.records_dropped
        if any(form.name == TEACHER for form in run.records):
            return run.records_dropped
        why = "the trajectory has no segment of the policy"
        if last is None:
            why = "the job ended before it was scored"
        elif self._reward(last) is None:
            why = "the rollout has no reward"
        return {**run.records_dropped, TEACHER: why}

    @property
    def _trains_several(self) -> bool:
        """Whether RUN trained several models; a failure does not say which of them failed."""
        parts = self.run.conversations if self.run is not None else ()
        return len({part.model for part in parts if part.trained}) > 1

    def _conversations(self, last: PhaseDone | PhaseFailed | None) -> tuple[ConversationPart, ...]:
        """Return RUN's conversations with the rewards that EVAL gave them."""
        parts = self.run.conversations if self.run is not None else ()
        rewards = last.rewards if last is not None else {}
        return tuple(msgspec.structs.replace(part, reward=rewards.get(part.name, part.reward)) for part in parts)


def lease_lost(record: JobRecord, cause: LossCause) -> ErrorInfo:
    """Return the error of a job whose holder lost it."""
    message = f"{record.phase} was lost with its stage process {record.stage_id}, which {LOSSES[cause]}"
    return LeaseLost(message, stage_id=record.stage_id, attempts=record.attempt, cause=cause).info()


def no_stage(requirement: Requirement, waited_s: float) -> ErrorInfo:
    """Return the error of a job that no stage process accepted."""
    role, node = requirement.role, requirement.node
    where = "" if node is None else f" on node {node}, where its sandbox is,"
    message = f"no live {role} process{where} took the job within {waited_s:g} s"
    if not waited_s:
        message = f"the last {role} process{where} has gone"
    if role == Phase.SCORE and node is not None:  # a result's reason has room for little
        message = f"give node {node} slots for score: no live process there takes the trajectory that it stores"
    return NoStage(message, role=role, node=node, waited_s=waited_s).info()


def overdue(record: JobRecord) -> ErrorInfo:
    """Return the error of a job whose phase exceeded its limit."""
    limit_s = record.job.limits.of(record.phase)
    message = f"{record.phase} took longer than its limit of {limit_s:g} s and could not be stopped"
    return PhaseTimeout(message, phase=record.phase, limit_s=limit_s).info()
