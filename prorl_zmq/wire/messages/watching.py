"""What watchers ask the rollout broker: which jobs have changed, what an ended one brought, how a batch stands.

The broker numbers the changes of jobs. A watcher asks for the jobs that have changed after a number, and the reply has
the newest of them, each once and as it is now; those between the number and the first of the reply it asks for in
further requests. So it always sees what is new first, and in the end all of it. Nothing here changes anything.
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
"""What jobs that ended are counted by; each interval begins at a multiple of it."""
CELLS_LIMIT = 16_384
"""Most rollouts of one reply."""
BATCH_STEPS_LIMIT = 2000
"""Closed batches of one reply."""
TURNS_LIMIT, TOKENS_LIMIT = 20, 5000
"""Most turns of a running job that are shown, and most tokens of them: 64 KiB."""
TURNS_WAIT_S = 3.0
"""How long the rollout broker waits for a stage process to show them."""
Tokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]
ChangeNumber = Annotated[int, Meta(ge=0, le=2**62)]


class JobRow(Part, frozen=True, array_like=True):
    """One job, as a line of a table."""

    job_id: str
    task: str
    group_id: str
    """Empty too for a queued job that a restarted broker has not read again yet."""
    phase: Phase
    """Of a job that has ended, the last one."""
    place: Literal["queued", "held", "ended"]
    attempt: int
    accepted_at: float
    """The broker's wall clock, in seconds since 1970, as are the others."""
    entered_at: float
    """When it came to its phase and place."""
    node: str = ""
    """Of the stage process that has it, or had it last."""
    stage_id: str = ""
    backend: str = ""
    """The one of its last RUN."""
    ended_at: float | None = None
    outcome: Outcome | None = None
    code: str = ""
    """Of the error that ended it, or its attempt before."""
    reward: float | None = None
    tokens: int = 0
    turns: int = 0


class EndedJobs(Part, frozen=True, array_like=True):
    """The jobs that ended within one interval of the recent past."""

    at: float
    """When it began: wall clock, in seconds since 1970."""
    seconds: float
    outcomes: dict[Outcome, int] = {}


class Watch(Request, frozen=True):
    """Name the jobs that have changed, the newest ones."""

    roles: ClassVar[Roles] = FOR_OPERATORS
    broker_id: str = ""
    """That of the earlier answer, which the numbers are of. Of another life of the broker: they count as 0."""
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
    """Names this life of the broker; it begins with no numbers and, of jobs that were collected, no rows."""
    until: int
    """The number of the newest change, whether it is in this reply or not."""
    first: int
    """The number of the oldest change in this reply; of none, `until` + 1."""
    more: bool
    """There are further ones between `since` and `first`."""
    forgotten_until: int = 0
    """The number of the newest change of a job that is forgotten. Who does not know all changes until then may have
    rows of jobs that have ended since, and must ask for all again."""
    jobs: tuple[JobRow, ...] = ()
    """The newest first."""
    ended: tuple[EndedJobs, ...] = ()
    """The intervals of the last hour in which jobs ended, the oldest first; since the broker was started."""


class Peek(Request, frozen=True):
    """Show what a job brought that has ended: one that was not collected, or one of the last that were."""

    roles: ClassVar[Roles] = FOR_OPERATORS
    job_id: JobIdentifier
    only_result: bool = False
    """Send no block: for who looks at many jobs' times."""


class Peeked(Reply, frozen=True):
    """Answer to `Peek`. Further frame: the trajectory's block, if it is there."""

    result: Result
    has_block: bool = False
    """False: there are no tokens, or the block is elsewhere: with its node, if `kept`, else only its client has it."""


class PeekTurns(Request, frozen=True):
    """Show the last turns of a job that has not ended, as its stage process has them now.

    The reply may be held for `TURNS_WAIT_S`. Stage processes send turns only when they are asked.
    """

    roles: ClassVar[Roles] = FOR_OPERATORS
    job_id: JobIdentifier
    known_attempt: Annotated[int, Meta(ge=0, le=ATTEMPT_LIMIT)] = 0
    known_tokens: Tokens = 0
    """How far the asker knows this attempt: if it has come no further, no turns are sent."""


class TurnsSoFar(Part, frozen=True, kw_only=True):
    """How far a rollout has come, and which of its turns are shown."""

    backend: Identifier | Literal[""] = ""
    turns: Tokens = 0
    """All that have begun, those of the system, the user and the tools too."""
    tokens: Tokens = 0
    shown_turns: Annotated[int, Meta(ge=0, le=TURNS_LIMIT)] = 0
    shown_tokens: Annotated[int, Meta(ge=0, le=TOKENS_LIMIT)] = 0
    policy_turns_before: Tokens = 0
    """Turns of the policy before those that are shown."""
    cut_tokens: Tokens = 0
    """Tokens that the first turn that is shown lacks at its beginning."""
    steps: Steps = ()
    """As in `Result`, until now."""


class TurnsPeeked(Reply, frozen=True, kw_only=True):
    """Answer to `PeekTurns`.

    Further frame, if `so_far` has `shown_tokens`: the block of the turns that are shown, laid out as a trajectory's.
    """

    job_id: str
    attempt: Attempt
    phase: Phase
    place: Literal["queued", "held"]
    stage_id: str = ""
    node: str = ""
    so_far: TurnsSoFar | None = None
    """None: the job is in INIT or waits for RUN, or its RUN begins or ends just now."""


class ViewBatch(Request, frozen=True):
    """Show the groups of a batch that is open, or what one came to that was closed not long ago."""

    roles: ClassVar[Roles] = FOR_OPERATORS
    batch_id: BatchIdentifier
    """Or the beginning of one."""


class RolloutCell(Part, frozen=True, array_like=True):
    """One place of a group."""

    state: Literal["running", "in", "missing"]
    """`running`: its job has not ended, and may still be queued. `missing`: no job has been started for it."""
    job_id: str = ""
    reward: float | None = None
    staleness: int | None = None
    """Weight versions that its oldest token, or the start of its job, is behind the current one; None: not known."""
    seconds: float = 0.0
    """In phases, until now."""


class GroupRow(Part, frozen=True, array_like=True):
    """One group."""

    group_id: str
    prompt_id: str
    state: Literal["under_way", "kept", "given"]
    """`given`: its client was sent it, and has not acknowledged it."""
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
    """Those under way, the oldest first, then those that its client has not acknowledged."""
    left_out: int = 0
    """Groups that had no room in this reply."""
    is_closed: bool = False
    """By its client, or since that was silent for longer than its lease: its groups are shown no more."""
    begins: str
    """How the ids of its own groups and jobs begin."""
    taken_over: tuple[GroupIdentifier, ...] = ()
    """Groups that it took over from earlier batches."""
    rollouts: int = 0
    """Jobs that ran for it: started for it, or taken over as they ran."""
    opened_at: float | None = None
    """In seconds since 1970, as is the next one; None: before the broker was restarted."""
    ended_at: float | None = None
    """When it needed no more rollouts: met, short, failed, or closed; None: it goes on, or as above."""


class ListSteps(Request, frozen=True):
    """List the batches that were closed last, as the steps of trainings, and when weights changed."""

    roles: ClassVar[Roles] = FOR_OPERATORS


class BatchStep(Part, frozen=True, kw_only=True, array_like=True):
    """A batch that was closed. Times are in seconds since 1970; None: not known, or it never was."""

    batch_id: str
    session: str
    opened_at: float | None
    began_at: float | None
    """When it had its first prompt, or a group of an earlier batch."""
    ended_at: float | None
    """When it needed no more rollouts."""
    served_at: float | None
    """When its client was sent the last group."""
    closed_at: float
    weight_version: int
    """The announced one as it was closed."""
    groups: int
    """Kept."""
    rollouts: int
    """That its client was sent; what follows are means over them."""
    failed: int
    reward: float
    tokens: float
    tokens_p90: float
    seconds: float
    staleness: float
    """Versions that the oldest token of a rollout was behind the announced weights as it was sent."""
    staleness_most: float


class StepList(Reply, frozen=True, kw_only=True):
    """Answer to `ListSteps`: since the broker was started."""

    steps: tuple[BatchStep, ...] = ()
    """The oldest first."""
    weights: tuple[tuple[int, float], ...] = ()
    """The versions that were announced, and when, in seconds since 1970."""


WatchingRequest = Watch | Peek | PeekTurns | ViewBatch | ListSteps
WatchingReply = Watched | Peeked | TurnsPeeked | BatchView | StepList
