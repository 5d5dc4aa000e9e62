"""The bodies of the JSON API that are not messages of the brokers, with their limits. `openapi` describes them all."""

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
    """Base of all."""


class Request(Body, frozen=True, forbid_unknown_fields=True):
    """Base of what clients send."""


class Submitted(Body, frozen=True):
    """All of the jobs were accepted, or none."""

    job_ids: tuple[str, ...]
    new: int
    """How many of them the service did not have."""


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
        """Return the short of what a job went through."""
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
    """Open a rollout that a program of the client's leads."""

    job: Job
    """The task, such as `outside`, with the sampling and the limits that hold whatever the program asks for."""
    idle_s: Seconds = 600.0
    """How long the program may make no call before the rollout ends."""
    train_on: TrainOn = ("all",)
    """Which of the program's calls are in the trajectory, by kind."""


class OpenedRollout(Body, frozen=True):
    """A rollout that waits for its program's calls, or for a RUN process that takes them."""

    job_id: str
    base_url: str
    """Of the model: for the clients of OpenAI and Anthropic."""
    api_key: str
    """What each call shows. It is not shown again."""


class RolloutState(JobState, frozen=True, kw_only=True):
    """How far a rollout has come."""

    base_url: str
    open: bool
    """Its program may call the model."""

    @classmethod
    def of(cls, trace: JobTrace, base_url: str) -> Self:
        state = msgspec.structs.asdict(JobState.at(trace))
        return cls(**state, base_url=base_url, open=bool(trace.address))


class CancelledBody(Body, frozen=True):
    """What became of each job: `cancelled`, `finished` (it had ended before), or `unknown`."""

    jobs: dict[str, str]


class TrajectoryBody(Body, frozen=True):
    """An ended job and its tokens: T of them, in n turns. Without the arrays, if they were not asked for."""

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
    """Take finished trajectories; those of earlier answers that are named here are acknowledged first."""

    acknowledge: Ids = ()
    """What was received: it is forgotten by the service. What is not named is sent again."""
    max_results: Annotated[int, Meta(ge=0, le=RESULTS_LIMIT)] = 16
    """0 only acknowledges."""
    arrays: bool = True
    """False: results only; the arrays of each are at `/v1/jobs/{job_id}/trajectory`."""
    consumer: Identifier = "http"
    """Several consumers of one token, each with a name of its own, get different trajectories."""


class Trajectories(Body, frozen=True):
    """Finished trajectories; acknowledge them with the next call."""

    trajectories: tuple[TrajectoryBody, ...]
    remaining: int
    """Jobs that have not ended, or whose trajectories are neither here nor acknowledged."""
    journal_id: str
    """Changes when the service lost its journal, and with it all jobs."""


class NewBatch(Request, frozen=True):
    """Ask for groups of rollouts that are worth learning from."""

    options: BatchOptions
    batch_id: BatchIdentifier = msgspec.field(default_factory=new_id)
    """The same id with the same options again is the same batch."""


class Opened(Body, frozen=True):
    """An open batch."""

    batch_id: str
    fed: int
    """Prompts that it has."""
    wanted: int
    """More prompts that it could use soon."""


class Prompts(Request, frozen=True):
    """Prompts for a batch: jobs that are templates of their groups' jobs."""

    prompts: Annotated[tuple[Job, ...], Meta(max_length=JOBS_PER_REQUEST)]
    start: Annotated[int, Meta(ge=0)]
    """Prompts that the batch was fed before these, so that a request that is sent twice counts once."""
    last: bool = False
    """No more will come."""


class PromptsFed(Body, frozen=True):
    """Prompts that the batch was fed, with these."""

    fed: int


class Acknowledged(Request, frozen=True):
    """Groups that were received."""

    acknowledge: Annotated[tuple[GroupIdentifier, ...], Meta(max_length=10_000)] = ()


class NextGroupBody(Acknowledged, frozen=True):
    """Take the next group of a batch."""

    feeds: bool = False
    """There are more prompts: answer also when they are wanted."""
    arrays: bool = True
    consumer: Identifier = "http"


class GroupBody(Body, frozen=True):
    """A group, if there is one yet, and the batch."""

    batch: BatchStatus
    report: BatchReport
    group_id: str
    """Empty: there is none yet, or none will come, as `ended` says."""
    prompt_id: str
    trajectories: tuple[TrajectoryBody, ...]
    wanted: int
    ended: bool


class ClosedBatch(Body, frozen=True):
    """What the batch took."""

    batch: BatchStatus
    report: BatchReport


class Batches(Body, frozen=True):
    """The open batches of this token."""

    batches: tuple[BatchStatus, ...]


class Health(Body, frozen=True):
    """The gateway answers, and so does the service behind it."""

    status: str = "ok"


class StatusBody(ServiceStatus, frozen=True, kw_only=True, tag="service_status"):
    """What the rollout brokers say together."""

    problems: tuple[str, ...] = ()
    """A line for each broker that does not answer; its jobs are missing from the numbers."""

    @classmethod
    def of(cls, status: ServiceStatus, problems: Iterable[str]) -> Self:
        return cls(**msgspec.structs.asdict(status), problems=tuple(problems))
