"""Batches of groups, at the front door: a client opens one, feeds prompts, and receives groups."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from .base import (
    FOR_TRAINERS,
    GROUP_LIMIT,
    POLICY,
    BatchIdentifier,
    Count,
    GroupIdentifier,
    Identifier,
    JobIdentifier,
    ModelName,
    Part,
    Reply,
    Request,
    Roles,
    Seconds,
    ShortText,
)
from .jobs import RecordName


class GroupFilter(Part, frozen=True):
    """Which groups a batch keeps (see `brokers.batches.group_filters`)."""

    policy: Identifier = "informative"
    """`all`, `informative` (not all rewards equal), `mean_reward`, or the name of an entry point in the service's
    environment, group `prorl_zmq.keep_policies`."""
    low: float | None = None
    """`mean_reward`: the smallest mean that is kept."""
    high: float | None = None
    """`mean_reward`: the largest."""
    least: float | None = None
    """The smallest possible reward; with `most`, groups are decided before their last rollout ends."""
    most: float | None = None


CarryOver = Literal["nothing", "finished", "running"]
"""What of a batch's unneeded groups its session's next batch gets: nothing, finished rollouts, or running ones too."""


class BatchOptions(Part, frozen=True, kw_only=True):
    """Options of a batch."""

    target_groups: Count
    group_size: Annotated[int, Meta(ge=1, le=GROUP_LIMIT)]
    keep: GroupFilter = GroupFilter()
    carry: CarryOver = "running"
    weight: Annotated[float, Meta(gt=0, le=1_000_000)] = 1.0
    """Its share of the slots, relative to other batches."""
    max_staleness: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Most weight versions that a rollout's oldest token may be behind the current one; None: any number."""
    max_replacements: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 4
    """Most jobs of a group that may fail and be replaced."""
    stop_early: bool = True
    """Cancel the running jobs of a group that can no longer be kept."""
    adopt: bool = True
    """Start with what earlier batches of the session carried over; False: only with its own prompts."""
    max_given_up: Count = 32
    """Consecutive groups given up, with none completed between them, at which the batch fails."""
    lease_s: Seconds = 60.0
    """How long its session may be silent before its batches' jobs are stopped."""
    model: ModelName = POLICY
    """The model of its jobs; it adopts only what batches of the same model carried over."""
    complete: Annotated[tuple[RecordName, ...], Meta(max_length=4)] = ()
    """The records that each rollout must have, with all rows; one without them is replaced as a failed job."""


class OpenBatch(Request, frozen=True):
    """Open a batch. Idempotent for the same id and options."""

    roles: ClassVar[Roles] = FOR_TRAINERS
    session: Identifier
    batch_id: BatchIdentifier
    options: BatchOptions


class Feed(Request, frozen=True):
    """Add prompts to a batch. Further frames: one packed `Job` each, the template of a group's jobs."""

    roles: ClassVar[Roles] = FOR_TRAINERS
    session: Identifier
    batch_id: BatchIdentifier
    start: Annotated[int, Meta(ge=0)]
    """Prompts that the batch was fed before these; prompts that it has already are not added twice."""
    last: bool = False
    """These are the last prompts of the stream."""


class NextGroup(Request, frozen=True):
    """Wait for a kept group, for the batch's end, or until more prompts are wanted.

    Groups of earlier replies are acknowledged first; a group that was sent to this client and is not in `acknowledge`
    was lost in transit and is resent.
    """

    roles: ClassVar[Roles] = FOR_TRAINERS
    session: Identifier
    batch_id: BatchIdentifier
    client_id: Identifier
    acknowledge: tuple[GroupIdentifier, ...] = ()
    feeds: bool = False
    """The client has more prompts; reply when they are wanted."""
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """Longest time to hold the reply while there is nothing to report."""


class CloseBatch(Request, frozen=True):
    """End a batch. Its running jobs and unacknowledged groups are carried over as its `carry` says."""

    roles: ClassVar[Roles] = FOR_TRAINERS
    session: Identifier
    batch_id: BatchIdentifier
    acknowledge: tuple[GroupIdentifier, ...] = ()


class SessionAlive(Request, frozen=True):
    """Renew the lease of a session's batches."""

    roles: ClassVar[Roles] = FOR_TRAINERS
    session: Identifier


BatchState = Literal["open", "met", "short", "failed"]
"""`met`: the target is reached. `short`: the stream of prompts ended before it. `failed`: the group filter raised, or
too many consecutive groups could not be completed."""


class Distribution(Part, frozen=True, kw_only=True):
    """Summary statistics of a set of numbers; all 0 for an empty one."""

    count: int = 0
    mean: float = 0.0
    least: float = 0.0
    most: float = 0.0
    p50: float = 0.0
    """The median, accurate to a few percent, as are the other percentiles."""
    p90: float = 0.0


class RolloutDistribution(Part, frozen=True, kw_only=True):
    """Distributions over rollouts."""

    reward: Distribution = Distribution()
    tokens: Distribution = Distribution()
    seconds: Distribution = Distribution()
    """From start to end, in all phases."""
    staleness: Distribution = Distribution()
    """Versions that the oldest token was behind the announced weights when its group was sent or dropped."""


class GivenUpGroup(Part, frozen=True):
    """A group that could not be completed."""

    prompt_id: JobIdentifier
    failures: dict[ShortText, int]
    """Jobs that failed, by reason."""


class BatchReport(Part, frozen=True, kw_only=True):
    """Counters of a batch while it was open."""

    launched: int = 0
    """Jobs started for it."""
    completed: int = 0
    failed: int = 0
    """Jobs that ended without a reward, or without a record of `complete`; they were replaced if allowed."""
    adopted: int = 0
    """Jobs of earlier batches, running or ended, that it adopted."""
    carried: int = 0
    """Jobs, running or ended, that it left to later batches."""
    withdrawn: int = 0
    """Jobs that were cancelled before any work was done for them."""
    kept_groups: int = 0
    dropped_groups: int = 0
    """Whole groups that the policy did not keep."""
    given_up_groups: int = 0
    given_up: tuple[GivenUpGroup, ...] = ()
    """The last of them."""
    wasted: dict[ShortText, int] = {}
    """Jobs that ran and are not used, by reason: `stale`, `not_needed`, `not_kept` (of groups that were stopped),
    `given_up`, `abandoned`."""
    wasted_s: dict[ShortText, float] = {}
    """Their seconds of work, without waiting."""
    kept: RolloutDistribution = RolloutDistribution()
    """Rollouts of kept groups."""
    dropped: RolloutDistribution = RolloutDistribution()
    """Rollouts of dropped groups, for comparison with `kept`."""
    returned_prompts: int = 0
    """Unused prompts with which the session's next batch begins."""
    unused_prompts: tuple[JobIdentifier, ...] = ()
    """Unused prompts that no other batch gets (`carry="nothing"` with `adopt=False`); the first 4,096."""


class BatchStatus(Part, frozen=True, kw_only=True):
    """One batch, as the rollout broker sees it."""

    batch_id: str
    session: str
    model: ModelName = POLICY
    """The model of its jobs."""
    state: BatchState
    problem: str = ""
    """Why it failed."""
    target_groups: int
    group_size: int
    kept: int
    """Groups, fetched or not."""
    under_way: int
    """Incomplete groups."""
    in_flight: int
    """Jobs in flight."""
    prompts: int
    """Waiting prompts."""
    dropped: int = 0
    """Whole groups that were not kept."""
    failed: int = 0
    """Jobs that ended without a reward, or without a record of `complete`."""
    failures: dict[ShortText, int] = {}
    """Their most frequent reasons."""
    given_up: int = 0
    """Groups that could not be completed."""


class BatchOpened(Reply, frozen=True):
    """Answer to `OpenBatch`."""

    fed: int = 0
    """Prompts that the batch was fed before."""
    wanted: int = 0
    """More prompts that it could use soon; 0: none now."""


class Fed(Reply, frozen=True):
    """Answer to `Feed`."""

    fed: int = 0
    """Prompts that the batch was fed, including these."""


class GroupGiven(Reply, frozen=True, kw_only=True):
    """Answer to `NextGroup`.

    Further frames, if there is a group: for each rollout the packed `Result`, followed by the trajectory's block if
    `tokens` is not 0 and the block is not `kept` by its node.
    """

    batch: BatchStatus
    group_id: str = ""
    """Empty: there is no group yet, or no more will come (see `batch.state`)."""
    prompt_id: str = ""
    rollouts: int = 0
    wanted: int = 0
    """As in `BatchOpened`."""
    ended: bool = False
    """The batch has ended, and all its groups were sent."""
    report: BatchReport


class BatchClosed(Reply, frozen=True):
    """Answer to `CloseBatch`."""

    batch: BatchStatus
    report: BatchReport
