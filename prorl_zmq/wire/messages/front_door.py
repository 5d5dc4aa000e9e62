"""Front door: requests of trainers and operators to the rollout broker, and its replies."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from ...errors import ErrorInfo
from .base import (
    FOR_ALL,
    FOR_OPERATORS,
    FOR_TRAINERS,
    POLICY,
    Attempt,
    Count,
    Done,
    Identifier,
    JobIdentifier,
    Part,
    Refused,
    Reply,
    Request,
    Roles,
    Seconds,
)
from .batches import (
    BatchClosed,
    BatchOpened,
    BatchStatus,
    CloseBatch,
    Fed,
    Feed,
    GroupGiven,
    NextGroup,
    OpenBatch,
    SessionAlive,
)
from .engines import WeightUpdate
from .jobs import Outcome, Phase, Result
from .nodes import ListNodes, NodeList
from .watching import WatchingReply, WatchingRequest


class Hello(Request, frozen=True):
    """First request of a client."""

    roles: ClassVar[Roles] = FOR_ALL
    session: Identifier | Literal[""] = ""
    """The client's session; empty: none."""


class Submit(Request, frozen=True):
    """Accept these jobs, all or none. Further frames: one packed `Job` each. Known jobs are not added twice."""

    roles: ClassVar[Roles] = FOR_TRAINERS
    session: Identifier
    lease_s: Seconds | None = None
    """How long the session may be silent before its jobs and results are dropped; None: no limit."""


class Collect(Request, frozen=True):
    """Wait for finished jobs of a session and return them; results of earlier replies are acknowledged first.

    A result that was sent to this client and is not in `acknowledge` was lost in transit and is resent.
    """

    roles: ClassVar[Roles] = FOR_TRAINERS
    session: Identifier
    client_id: Identifier
    acknowledge: tuple[JobIdentifier, ...] = ()
    max_results: Annotated[int, Meta(ge=0, le=1024)] = 64
    """0 only acknowledges."""
    goodbye: bool = False
    """The client will not ask again: its unacknowledged results go to the session's next client."""
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """Longest time to hold the reply while there are no results."""
    job_ids: tuple[JobIdentifier, ...] = ()
    """Only these, whichever client they were sent to before, for callers without state. Empty: any."""


class RelayBlocks(Request, frozen=True):
    """Move the blocks of these results, which cannot be fetched from their nodes, to the broker.

    The results are delivered again once the broker has the blocks.
    """

    roles: ClassVar[Roles] = FOR_TRAINERS
    session: Identifier
    job_ids: tuple[JobIdentifier, ...]


class Cancel(Request, frozen=True):
    """End these jobs with outcome `cancelled`."""

    roles: ClassVar[Roles] = FOR_TRAINERS | FOR_OPERATORS
    job_ids: tuple[JobIdentifier, ...]
    session: Identifier | Literal[""] = ""
    """Only jobs of this session; others are answered as unknown. Empty: any session."""


class Status(Request, frozen=True):
    """Describe the service."""

    roles: ClassVar[Roles] = FOR_ALL


class Trace(Request, frozen=True):
    """Return a job's history; `job_id` is its id or, without `wait_s`, a unique prefix."""

    roles: ClassVar[Roles] = FOR_TRAINERS | FOR_OPERATORS
    job_id: JobIdentifier
    session: Identifier | Literal[""] = ""
    """Only an uncollected job of this session, by its whole id. Empty: any known job."""
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """Longest time to hold the reply while the job has not ended and its rollout has no address."""


class ListSessions(Request, frozen=True):
    """List the sessions that have jobs, results, batches or carried groups."""

    roles: ClassVar[Roles] = FOR_OPERATORS


class EndSession(Request, frozen=True):
    """Cancel a session's jobs, close its batches, and drop its results."""

    roles: ClassVar[Roles] = FOR_OPERATORS
    session: Identifier


class Welcome(Reply, frozen=True, kw_only=True):
    """Answer to `Hello`."""

    protocol: int
    version: str
    """The version of the service's package."""
    backend_broker: str
    """The backend broker's endpoint."""
    job_limit_bytes: Count


class Accepted(Reply, frozen=True):
    """Answer to `Submit`: the service owns the jobs, and each will end in exactly one outcome."""

    new: int = 0
    """How many were not known before."""
    journal_id: str = ""
    """The journal that has them; jobs of another journal, which is gone, are lost."""


class Collected(Reply, frozen=True):
    """Answer to `Collect`.

    Further frames, in order: one trajectory block for each result whose `tokens` is not 0 and that no node has `kept`.
    """

    results: tuple[Result, ...] = ()
    remaining: int = 0
    """Jobs of the session that have not ended, or whose results are neither in this reply nor acknowledged."""
    journal_id: str = ""
    """As in `Accepted`."""


class Cancelled(Reply, frozen=True):
    """Answer to `Cancel`: the result for each id."""

    jobs: dict[str, Literal["cancelled", "finished", "unknown"]] = {}


class StageStatus(Part, frozen=True):
    """One stage process, as the rollout broker sees it."""

    stage_id: str
    role: Phase
    node: str
    slots: int
    busy: int


class ServiceStatus(Reply, frozen=True, kw_only=True):
    """Answer to `Status`."""

    stages: tuple[StageStatus, ...] = ()
    queued: dict[Phase, int] = {}
    """Jobs that wait for each stage."""
    running: dict[Phase, int] = {}
    """Jobs that hold a slot of each stage."""
    outcomes: dict[Outcome, int] = {}
    """Jobs ended since the broker started."""
    uncollected: int = 0
    """Results that no client has acknowledged yet."""
    redelivered: int = 0
    """Phases restarted after a loss."""
    lost_blocks: int = 0
    """Trajectories lost with their node before they were fetched; their jobs ran again."""
    tasks: tuple[str, ...] = ()
    """Tasks that some stage process serves."""
    batches: tuple[BatchStatus, ...] = ()
    uptime_s: float = 0.0


class Span(Part, frozen=True, kw_only=True):
    """A job's time in one state."""

    phase: Phase
    place: Literal["queued", "held"]
    attempt: Attempt
    start_s: float
    """Seconds after the job was accepted."""
    end_s: float | None = None
    """None: the job is still in it."""
    stage_id: str = ""
    """The stage process that held it."""
    node: str = ""
    backends: tuple[str, ...] = ()
    """Backends assigned to RUN, in order."""
    error: ErrorInfo | None = None
    """The error that ended it, shortened."""


class JobTrace(Reply, frozen=True, kw_only=True):
    """Answer to `Trace`. Times are seconds after the job was accepted, except `accepted_at`."""

    job_id: str
    accepted_at: float
    """The broker's wall clock, in seconds since 1970; for people."""
    age_s: float
    spans: tuple[Span, ...]
    left_out: int = 0
    """Events cut from the middle of a very long history."""
    restarts: tuple[float, ...] = ()
    """When the broker was restarted."""
    outcome: Outcome | None = None
    """None: the job has not ended; of the fields below only its task, group and model are known."""
    ended_s: float | None = None
    collected_s: float | None = None
    """When a client acknowledged the result."""
    task: str = ""
    group_id: str = ""
    model: str = POLICY
    """The model of its own turns."""
    reward: float | None = None
    stop_reason: str = ""
    tokens: int = 0
    turns: int = 0
    error: ErrorInfo | None = None
    address: str = ""
    """The URL at which RUN accepts calls of an outside program, while it may lead the rollout. The part after `#` names
    the loopback network, if the URL is on one (see `system.node_name.loopback_id`)."""
    traceparent: str = ""
    """The W3C trace context of the job's span; empty: not traced."""
    parent_span: str = ""
    """The id of the parent span, 16 hexadecimal digits; empty: none."""


class SessionRow(Part, frozen=True):
    """The contents of a session."""

    session: str
    queued: int = 0
    """Waiting jobs, including those of its batches."""
    running: int = 0
    """Jobs that hold a slot."""
    results: int = 0
    """Unacknowledged results, and rollouts of groups that were not fetched."""
    batches: int = 0
    """Open batches, and ended ones that were not closed."""
    carried_groups: int = 0
    """Groups that wait for its next batch."""
    lease_s: float | None = None
    """How long it may be silent; None: no limit."""
    silent_s: float | None = None
    """How long it has been silent."""


class SessionList(Reply, frozen=True, kw_only=True):
    """Answer to `ListSessions`."""

    sessions: tuple[SessionRow, ...] = ()
    """By name."""
    left_out: int = 0


class SessionStopped(Reply, frozen=True, kw_only=True):
    """Answer to `EndSession`."""

    jobs: int = 0
    """Plain jobs that were cancelled."""
    results: int = 0
    """Results that were dropped."""
    batches: int = 0


FrontDoorRequest = (
    Hello
    | Submit
    | Collect
    | RelayBlocks
    | Cancel
    | OpenBatch
    | Feed
    | NextGroup
    | CloseBatch
    | SessionAlive
    | WeightUpdate
    | Status
    | ListNodes
    | ListSessions
    | EndSession
    | Trace
    | WatchingRequest
)
FrontDoorReply = (
    Welcome
    | Accepted
    | Collected
    | Cancelled
    | BatchOpened
    | Fed
    | GroupGiven
    | BatchClosed
    | Done
    | SessionList
    | SessionStopped
    | ServiceStatus
    | NodeList
    | JobTrace
    | WatchingReply
    | Refused
)
