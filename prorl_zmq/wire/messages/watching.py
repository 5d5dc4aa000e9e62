"""Watchers' requests to the rollout broker: which jobs have changed, an ended job's result, a batch's state. Read-only.

The broker numbers the changes of jobs. A watcher requests the jobs that changed after a number, and the reply has the
newest of them, each once and in its current state; the watcher requests the remaining ones with further requests. So
new changes arrive first, and all arrive in the end.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from .base import (
    ATTEMPT_LIMIT,
    FOR_OPERATORS,
    Attempt,
    BatchIdentifier,
    GroupIdentifier,
    Identifier,
    JobIdentifier,
    ModelName,
    Part,
    Reply,
    Request,
    Roles,
)
from .batches import BatchReport, BatchStatus
from .jobs import Outcome, Phase, Result, Steps

ROWS_LIMIT = 2000
"""Most jobs of one reply."""
ENDED_INTERVAL_S = 10.0
"""The interval by which ended jobs are counted; each begins at a multiple of it."""
CELLS_LIMIT = 16_384
"""Most rollouts of one reply."""
BATCH_STEPS_LIMIT = 2000
"""Most closed batches of one reply."""
TURNS_LIMIT, TOKENS_LIMIT = 20, 5000
"""Most turns of a running job that are shown, and most tokens of them: 64 KiB."""
TURNS_WAIT_S = 3.0
"""How long the rollout broker waits for a stage process's turns."""
Tokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]
ChangeNumber = Annotated[int, Meta(ge=0, le=2**62)]


class JobRow(Part, frozen=True, array_like=True):
    """One job, as a row of a table."""

    job_id: str
    task: str
    group_id: str
    """Also empty for a queued job that a restarted broker has not read yet."""
    phase: Phase
    """For an ended job, the last one."""
    place: Literal["queued", "held", "ended"]
    attempt: int
    accepted_at: float
    """The broker's wall clock, in seconds since 1970, as are the other times."""
    entered_at: float
    """When it entered its phase and place."""
    node: str = ""
    """Of the stage process that has the job, or had it last."""
    stage_id: str = ""
    backend: str = ""
    """Of its last RUN."""
    ended_at: float | None = None
    outcome: Outcome | None = None
    code: str = ""
    """Of the error that ended it, or its previous attempt."""
    reward: float | None = None
    tokens: int = 0
    turns: int = 0
    model: str = ""
    """The model of its own turns; empty: the policy."""


class EndedJobs(Part, frozen=True, array_like=True):
    """The jobs that ended within one recent interval."""

    at: float
    """The interval's start: wall clock, in seconds since 1970."""
    seconds: float
    outcomes: dict[Outcome, int] = {}


class Watch(Request, frozen=True):
    """List the jobs that have changed, the newest first."""

    roles: ClassVar[Roles] = FOR_OPERATORS
    broker_id: str = ""
    """Of the earlier answer that the numbers come from. If the broker has restarted since, they count as 0."""
    since: ChangeNumber = 0
    """Only those that changed after this."""
    before: ChangeNumber = 0
    """Only those that changed before this; 0: all."""
    limit: Annotated[int, Meta(ge=1, le=ROWS_LIMIT)] = 500
    counts_ended: bool = False
    """Report in `ended` how many jobs ended when."""


class Watched(Reply, frozen=True, kw_only=True):
    """Answer to `Watch`."""

    broker_id: str
    """Identifies this life of the broker; a new life has no numbers, and no rows of collected jobs."""
    until: int
    """The number of the newest change, also if it is not in this reply."""
    first: int
    """The number of the oldest change in this reply; `until` + 1 if there is none."""
    more: bool
    """There are more between `since` and `first`."""
    forgotten_until: int = 0
    """The number of the newest change of a forgotten job. A watcher without all changes up to it may have rows of jobs
    that have ended since, and must request everything again."""
    jobs: tuple[JobRow, ...] = ()
    """The newest first."""
    ended: tuple[EndedJobs, ...] = ()
    """The intervals of the last hour in which jobs ended, the oldest first; only since the broker was started."""


class Peek(Request, frozen=True):
    """Return the result of an ended job: uncollected, or one of the last collected."""

    roles: ClassVar[Roles] = FOR_OPERATORS
    job_id: JobIdentifier
    only_result: bool = False
    """Send no block: for reading many jobs' times."""


class Peeked(Reply, frozen=True):
    """Answer to `Peek`. Further frame: the trajectory's block, if `has_block`."""

    result: Result
    has_block: bool = False
    """False: there are no tokens, or the block is elsewhere: on its node if `kept`, else only with its client."""


class PeekTurns(Request, frozen=True):
    """Return the last turns of a job that has not ended, as its stage process has them now.

    The reply may be held for `TURNS_WAIT_S`. Stage processes send turns only on request.
    """

    roles: ClassVar[Roles] = FOR_OPERATORS
    job_id: JobIdentifier
    known_attempt: Annotated[int, Meta(ge=0, le=ATTEMPT_LIMIT)] = 0
    known_tokens: Tokens = 0
    """The tokens of this attempt that the caller has: if there are no more, no turns are sent."""


class TurnsSoFar(Part, frozen=True, kw_only=True):
    """A rollout's progress, and which of its turns are shown."""

    backend: Identifier | Literal[""] = ""
    turns: Tokens = 0
    """All turns that have begun, including those of the system, the user and the tools."""
    tokens: Tokens = 0
    shown_turns: Annotated[int, Meta(ge=0, le=TURNS_LIMIT)] = 0
    shown_tokens: Annotated[int, Meta(ge=0, le=TOKENS_LIMIT)] = 0
    policy_turns_before: Tokens = 0
    """Turns of the policy before the shown ones."""
    cut_tokens: Tokens = 0
    """Tokens cut from the beginning of the first shown turn."""
    steps: Steps = ()
    """As in `Result`, until now."""


class TurnsPeeked(Reply, frozen=True, kw_only=True):
    """Answer to `PeekTurns`.

    Further frame, if `so_far.shown_tokens` is not 0: the block of the shown turns, laid out as a trajectory's.
    """

    job_id: str
    attempt: Attempt
    phase: Phase
    place: Literal["queued", "held"]
    stage_id: str = ""
    node: str = ""
    so_far: TurnsSoFar | None = None
    """None: the job is in INIT or waits for RUN, or its RUN is just beginning or ending."""


class ViewBatch(Request, frozen=True):
    """Return the groups of an open batch, or the totals of one that was closed recently."""

    roles: ClassVar[Roles] = FOR_OPERATORS
    batch_id: BatchIdentifier
    """Or a prefix."""


class RolloutCell(Part, frozen=True, array_like=True):
    """One rollout's place in a group."""

    state: Literal["running", "in", "missing"]
    """`running`: its job has not ended, and may still be queued. `missing`: no job has been started for it."""
    job_id: str = ""
    reward: float | None = None
    staleness: int | None = None
    """Weight versions that its oldest token, or the start of its job, is behind the current one; None: not known."""
    seconds: float = 0.0
    """In phases, so far."""


class GroupRow(Part, frozen=True, array_like=True):
    """One group."""

    group_id: str
    prompt_id: str
    state: Literal["under_way", "kept", "given"]
    """`given`: sent to its client, not acknowledged."""
    carried_over: bool
    """From an earlier batch of its session."""
    failed: int
    """Jobs that ended without a reward, and were replaced."""
    cells: tuple[RolloutCell, ...] = ()
    """By place."""


class BatchView(Reply, frozen=True, kw_only=True):
    """Answer to `ViewBatch`."""

    status: BatchStatus
    report: BatchReport
    current_version: int
    """Of the weights."""
    waits_for: str
    """What the batch waits for now, as a sentence; empty: it is closed."""
    groups: tuple[GroupRow, ...] = ()
    """Incomplete ones, the oldest first, then those that its client has not acknowledged."""
    left_out: int = 0
    """Groups omitted for lack of room."""
    is_closed: bool = False
    """Closed by its client, or by its session's expired lease; closed batches have no groups."""
    begins: str
    """The prefix of the ids of its own groups and jobs."""
    taken_over: tuple[GroupIdentifier, ...] = ()
    """Groups adopted from earlier batches."""
    rollouts: int = 0
    """Jobs that ran for it: started for it, or adopted while they ran."""
    opened_at: float | None = None
    """In seconds since 1970, as is `ended_at`; None: before the broker was restarted."""
    ended_at: float | None = None
    """When it needed no more rollouts: met, short, failed, or closed; None: not yet, or as for `opened_at`."""


class ListSteps(Request, frozen=True):
    """List the last closed batches, as training steps, and when weights changed."""

    roles: ClassVar[Roles] = FOR_OPERATORS


class BatchStep(Part, frozen=True, kw_only=True, array_like=True):
    """A closed batch. Times are in seconds since 1970; None: not known, or never."""

    batch_id: str
    session: str
    opened_at: float | None
    began_at: float | None
    """When it had its first prompt, or a group of an earlier batch."""
    ended_at: float | None
    """When it needed no more rollouts."""
    served_at: float | None
    """When its last group was sent to its client."""
    closed_at: float
    weight_version: int
    """The announced version when it was closed."""
    groups: int
    """Kept."""
    rollouts: int
    """Rollouts sent to its client; `reward` and the fields below it are over them."""
    failed: int
    reward: float
    tokens: float
    tokens_p90: float
    seconds: float
    staleness: float
    """Versions that the oldest token of a rollout was behind the announced weights when it was sent."""
    staleness_most: float


class StepList(Reply, frozen=True, kw_only=True):
    """Answer to `ListSteps`: since the broker was started."""

    steps: tuple[BatchStep, ...] = ()
    """The oldest first."""
    weights: tuple[tuple[int, float], ...] = ()
    """The announced versions of the policy and their times, in seconds since 1970."""
    models: tuple[ModelName, ...] = ()
    """The model of each step; empty: the policy's are all."""
    weights_of: dict[ModelName, tuple[tuple[int, float], ...]] = {}
    """As `weights`, of the other models."""


WatchingRequest = Watch | Peek | PeekTurns | ViewBatch | ListSteps
WatchingReply = Watched | Peeked | TurnsPeeked | BatchView | StepList
