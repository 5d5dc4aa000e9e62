"""The JSON API's bodies that are not wire messages, with their limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

import msgspec
import numpy as np
from msgspec import Meta

from ..client.requests import JOBS_PER_REQUEST
from ..data.trajectory import Trajectory
from ..wire.messages.base import BatchIdentifier, GroupIdentifier, Identifier, JobIdentifier, Seconds, new_id
from ..wire.messages.batches import BatchOptions, BatchReport, BatchStatus
from ..wire.messages.front_door import ServiceStatus
from ..wire.messages.jobs import Job, Outcome, Result, TrainOn

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..wire.messages.front_door import JobTrace

RESULTS_LIMIT = 64
"""Most trajectories of one answer."""
Waiting = Annotated[float, Meta(ge=0, le=60)]
Ids = Annotated[tuple[JobIdentifier, ...], Meta(max_length=10_000)]
Jobs = Annotated[tuple[Job, ...], Meta(min_length=1, max_length=JOBS_PER_REQUEST)]


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all bodies."""


class Request(Body, frozen=True, forbid_unknown_fields=True):
    """Base of what clients send."""


class Submitted(Body, frozen=True):
    """All of the jobs were accepted, or none."""

    job_ids: tuple[str, ...]
    new: int
    """How many of them are new to the service."""


class JobCounts(Body, frozen=True):
    """The jobs of this token."""

    session: str
    remaining: int
    """Jobs that have not ended, or whose trajectories are not acknowledged."""


class JobState(Body, frozen=True):
    """How far a job has come."""

    job_id: str
    state: str
    """`queued`, `running` or `ended`."""
    age_s: float
    """Since it was accepted."""
    phase: str = ""
    """`init`, `run` or `eval`, of a job that has not ended."""
    attempt: int = 1
    outcome: Outcome | None = None
    reward: float | None = None

    @classmethod
    def at(cls, trace: JobTrace) -> JobState:
        now = next((span for span in reversed(trace.spans) if span.end_s is None), None)
        state = "ended" if trace.outcome else "running" if now is not None and now.place == "held" else "queued"
        return JobState(
            job_id=trace.job_id,
            state=state,
            phase=str(now.phase) if now is not None else "",
            attempt=trace.spans[-1].attempt if trace.spans else 1,
            age_s=trace.age_s,
            outcome=trace.outcome,
            reward=trace.reward,
        )


class NewRollout(Request, frozen=True):
    """Open a rollout whose program is the client's."""

    job: Job
    """The task, such as `outside`, with the sampling and limits that hold whatever the program requests."""
    idle_s: Seconds = 600.0
    """The rollout ends after so long without a call."""
    train_on: TrainOn = ("all",)
    """Which kinds of the program's calls the trajectory contains."""


class OpenedRollout(Body, frozen=True):
    """A rollout that waits for its program's calls, or for a free slot in RUN."""

    job_id: str
    base_url: str
    """Base URL of the model, for the clients of OpenAI and Anthropic."""
    api_key: str
    """The key that each call shows. It is returned only once."""


class RolloutState(JobState, frozen=True, kw_only=True):
    """How far a rollout has come."""

    base_url: str
    open: bool
    """Whether its program may call the model."""

    @classmethod
    def of(cls, trace: JobTrace, base_url: str) -> Self:
        state = msgspec.structs.asdict(JobState.at(trace))
        return cls(**state, base_url=base_url, open=bool(trace.address))


class TrajectoryBody(Body, frozen=True):
    """An ended job and its T tokens in n turns; without the arrays if they were not requested."""

    result: Result
    token_ids: list[int] | None = None
    """[T]"""
    loss_mask: list[bool] | None = None
    """[T]: true where the policy generated the token."""
    logprobs: list[float | None] | None = None
    """[T]: 0 where the mask is false; null where the engine gave no number."""
    weight_versions: list[int] | None = None
    """[T]: -1 where the mask is false."""
    turns: list[tuple[int, int, int]] | None = None
    """[n]: first token, the token after the last, and who spoke: 0 system, 1 user, 2 assistant, 3 tool."""

    @classmethod
    def of(cls, trajectory: Trajectory, *, arrays: bool) -> TrajectoryBody:
        if not arrays:
            return cls(result=trajectory.result)
        logprobs = trajectory.logprobs.tolist()
        finite = np.isfinite(trajectory.logprobs)
        if not finite.all():
            logprobs = [each if number else None for each, number in zip(logprobs, finite.tolist(), strict=True)]
        return cls(
            result=trajectory.result,
            token_ids=trajectory.token_ids.tolist(),
            loss_mask=trajectory.loss_mask.tolist(),
            logprobs=logprobs,
            weight_versions=trajectory.weight_versions.tolist(),
            turns=trajectory.turns.tolist(),
        )


class NextTrajectories(Request, frozen=True):
    """Take finished trajectories, after acknowledging those of earlier answers."""

    acknowledge: Ids = ()
    """Received trajectories, which the service deletes. Others are sent again."""
    max_results: Annotated[int, Meta(ge=0, le=RESULTS_LIMIT)] = 16
    """0 only acknowledges."""
    arrays: bool = True
    """False: results only; the arrays of each are at `/v1/jobs/{job_id}/trajectory`."""
    consumer: Identifier = "http"
    """Consumers of one token with different names get different trajectories."""


class Trajectories(Body, frozen=True):
    """Finished trajectories; acknowledge them with the next call."""

    trajectories: tuple[TrajectoryBody, ...]
    remaining: int
    """Jobs that have not ended, or whose trajectories are neither here nor acknowledged."""
    journal_id: str
    """Changes when the service has lost its journal, and with it all jobs."""


class NewBatch(Request, frozen=True):
    """Request groups of rollouts worth learning from."""

    options: BatchOptions
    batch_id: BatchIdentifier = msgspec.field(default_factory=new_id)
    """The same id with the same options again is the same batch."""


class Opened(Body, frozen=True):
    """An open batch."""

    batch_id: str
    fed: int
    """Prompts that it was fed."""
    wanted: int
    """More prompts that it could use soon."""


class Prompts(Request, frozen=True):
    """Prompts for a batch: jobs that are templates of their groups' jobs."""

    prompts: Annotated[tuple[Job, ...], Meta(max_length=JOBS_PER_REQUEST)]
    start: Annotated[int, Meta(ge=0)]
    """Prompts that the batch was fed before these; a repeated request counts once."""
    last: bool = False
    """No more will come."""


class Acknowledged(Request, frozen=True):
    """Groups that were received."""

    acknowledge: Annotated[tuple[GroupIdentifier, ...], Meta(max_length=10_000)] = ()


class NextGroupBody(Acknowledged, frozen=True):
    """Take the next group of a batch."""

    feeds: bool = False
    """There are more prompts: also answer when they are wanted."""
    arrays: bool = True
    consumer: Identifier = "http"


class GroupBody(Body, frozen=True):
    """A group, if there is one yet, and its batch."""

    batch: BatchStatus
    report: BatchReport
    group_id: str
    """Empty: there is none yet, or, if `ended`, none will come."""
    prompt_id: str
    trajectories: tuple[TrajectoryBody, ...]
    wanted: int
    ended: bool


class Batches(Body, frozen=True):
    """The open batches of this token."""

    batches: tuple[BatchStatus, ...]


class Health(Body, frozen=True):
    """The gateway and the service behind it answer."""

    status: str = "ok"


class StatusBody(ServiceStatus, frozen=True, kw_only=True, tag="service_status"):
    """The sum of the rollout brokers' statuses."""

    problems: tuple[str, ...] = ()
    """A line for each broker that does not answer; the numbers leave out its jobs."""

    @classmethod
    def of(cls, status: ServiceStatus, problems: Iterable[str]) -> Self:
        return cls(**msgspec.structs.asdict(status), problems=tuple(problems))
