"""Batches of groups, at the front door: a client opens one, feeds prompts, and takes groups."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from .base import (
    FOR_TRAINERS,
    GROUP_LIMIT,
    BatchIdentifier,
    Count,
    GroupIdentifier,
    Identifier,
    JobIdentifier,
    Part,
    Reply,
    Request,
    Roles,
    Seconds,
    ShortText,
)


class GroupFilter(Part, frozen=True):
    """Which groups a batch keeps (see `brokers.batches.group_filters`)."""

    policy: Identifier = "informative"
    """`all`, `informative` (not all rewards equal), `mean_reward`, or the name of an entry point in the service's
    environment, group `prorl_zmq.keep_policies`."""
    low: float | None = None
    """`mean_reward`: the smallest mean that is kept."""
    high: float | None = None
    """The largest."""
    least: float | None = None
    """The smallest reward that there is; with `most`, groups are decided before their last rollout is in."""
    most: float | None = None


CarryOver = Literal["nothing", "finished", "running"]
"""What of a batch's unneeded groups is carried into its session's next one: nothing, rollouts that are in, or also
those that run."""


class BatchOptions(Part, frozen=True, kw_only=True):
    """What a batch is to be."""

    target_groups: Count
    group_size: Annotated[int, Meta(ge=1, le=GROUP_LIMIT)]
    keep: GroupFilter = GroupFilter()
    carry: CarryOver = "running"
    weight: Annotated[float, Meta(gt=0, le=1_000_000)] = 1.0
    """Its share of the slots, beside other batches."""
    max_staleness: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Weight versions that a rollout's oldest token may be behind the current one; None: any number."""
    max_replacements: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 4
    """Jobs of a group that may end without a reward, and are replaced."""
    stop_early: bool = True
    """Cancel the running jobs of a group that can no longer be kept."""
    adopt: bool = True
    """Begin with what earlier batches of the session carried over; False: with nothing but its own prompts."""
    max_given_up: Count = 32
    """Groups given up in a row, with none completed between them, at which the batch fails."""
    lease_s: Seconds = 60.0
    """How long its session may be silent before its batches' jobs stop."""


class OpenBatch(Request, frozen=True):
    """Begin to collect groups. A batch that is open under this id with the same options is not opened again."""

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
    """Prompts that the batch was fed before these; what it has already is not taken twice."""
    last: bool = False
    """The stream of prompts ends with these."""


class NextGroup(Request, frozen=True):
    """Wait for a kept group, for the batch's end, or until more prompts are wanted.

    Groups of earlier replies are acknowledged first; one that was sent to this client and is not among `acknowledge`
    was lost on the way, and is sent again.
    """

    roles: ClassVar[Roles] = FOR_TRAINERS
    session: Identifier
    batch_id: BatchIdentifier
    client_id: Identifier
    acknowledge: tuple[GroupIdentifier, ...] = ()
    feeds: bool = False
    """The client has more prompts, and is to be told when they are wanted."""
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """Hold the reply for so long while there is nothing to say."""


class CloseBatch(Request, frozen=True):
    """End a batch. What it has under way, and groups that are not acknowledged, are carried as its `carry` says."""

    roles: ClassVar[Roles] = FOR_TRAINERS
    session: Identifier
    batch_id: BatchIdentifier
    acknowledge: tuple[GroupIdentifier, ...] = ()


class SessionAlive(Request, frozen=True):
    """The client of a session's batches lives."""

    roles: ClassVar[Roles] = FOR_TRAINERS
    session: Identifier


BatchState = Literal["open", "met", "short", "failed"]
"""`met`: the target is reached. `short`: the stream of prompts ended before it. `failed`: its group filter raised, or
too many groups in a row could not be completed."""


class Distribution(Part, frozen=True, kw_only=True):
    """How some numbers are distributed; of none at all, all is 0."""

    count: int = 0
    mean: float = 0.0
    least: float = 0.0
    most: float = 0.0
    p50: float = 0.0
    """The median, to a few percent, as are the others."""
    p90: float = 0.0


class RolloutDistribution(Part, frozen=True, kw_only=True):
    """How rollouts are distributed."""

    reward: Distribution = Distribution()
    tokens: Distribution = Distribution()
    seconds: Distribution = Distribution()
    """From start to end, in all phases."""
    staleness: Distribution = Distribution()
    """Versions that the oldest token was behind the announced weights, as its group was sent or dropped."""


class GivenUpGroup(Part, frozen=True):
    """A group that could not be completed."""

    prompt_id: JobIdentifier
    failures: dict[ShortText, int]
    """How many of its jobs ended without a reward, by the reason."""


class BatchReport(Part, frozen=True, kw_only=True):
    """What a batch took, counted while it was open."""

    launched: int = 0
    """Jobs started for it."""
    completed: int = 0
    failed: int = 0
    """Jobs that ended without a reward, and were replaced where that could be."""
    adopted: int = 0
    """Jobs of earlier batches, running or ended, that it took over."""
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
    """Jobs that ran and are not used, by the reason: `stale`, `not_needed`, `not_kept` (of groups that were stopped),
    `given_up`, `abandoned`."""
    wasted_s: dict[ShortText, float] = {}
    """Their seconds of work, waiting not counted."""
    kept: RolloutDistribution = RolloutDistribution()
    """Rollouts of the groups that were kept."""
    dropped: RolloutDistribution = RolloutDistribution()
    """Rollouts of those that were not: are they longer?"""
    returned_prompts: int = 0
    """Prompts that it did not use, and that the session's next batch begins with."""
    unused_prompts: tuple[JobIdentifier, ...] = ()
    """Prompts that it did not use, and that no other batch gets, since it shares none (`carry="nothing"` with
    `adopt=False`). The first 4,096 of them."""


class BatchStatus(Part, frozen=True, kw_only=True):
    """One batch, as the rollout broker sees it."""

    batch_id: str
    session: str
    state: BatchState
    problem: str = ""
    """Why it failed."""
    target_groups: int
    group_size: int
    kept: int
    """Groups, fetched or not."""
    under_way: int
    """Groups that are not complete."""
    in_flight: int
    """Jobs."""
    prompts: int
    """That wait."""
    dropped: int = 0
    """Whole groups that were not kept."""
    failed: int = 0
    """Jobs that ended without a reward."""
    failures: dict[ShortText, int] = {}
    """Why, the most frequent ones."""
    given_up: int = 0
    """Groups that could not be completed."""


class BatchOpened(Reply, frozen=True):
    """Answer to `OpenBatch`."""

    fed: int = 0
    """Prompts that the batch was fed already."""
    wanted: int = 0
    """More prompts that it could use soon; 0: none now."""


class Fed(Reply, frozen=True):
    """Answer to `Feed`."""

    fed: int = 0
    """Prompts that the batch was fed, with these."""


class GroupGiven(Reply, frozen=True, kw_only=True):
    """Answer to `NextGroup`.

    Further frames, if there is a group: for each of its rollouts the packed `Result`, and behind it the trajectory's
    block if `tokens` is not 0 and the block is not `kept` by its node.
    """

    batch: BatchStatus
    group_id: str = ""
    """Empty: no group is there yet, or none will come, as `batch.state` says."""
    prompt_id: str = ""
    rollouts: int = 0
    wanted: int = 0
    """As in `BatchOpened`."""
    ended: bool = False
    """The batch has ended, and all its groups were given."""
    report: BatchReport


class BatchClosed(Reply, frozen=True):
    """Answer to `CloseBatch`."""

    batch: BatchStatus
    report: BatchReport
