"""The front door: what trainers and operators ask the rollout broker, and its replies."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from ...errors import ErrorInfo
from .base import (
    FOR_ALL,
    FOR_OPERATORS,
    FOR_TRAINERS,
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
    """Its session; empty: it has none."""


class Submit(Request, frozen=True):
    """Accept these jobs, all or none. Further frames: one packed `Job` each. A job already here is not added twice."""

    roles: ClassVar[Roles] = FOR_TRAINERS
    session: Identifier
    lease_s: Seconds | None = None
    """How long the session may be silent before its jobs and results are dropped; None: it lasts."""


class Collect(Request, frozen=True):
    """Wait for finished jobs of a session and take them; the results of earlier replies are acknowledged first.

    A result that was sent to this client and is not among `acknowledge` was lost on the way, and is sent again.
    """

    roles: ClassVar[Roles] = FOR_TRAINERS
    session: Identifier
    client_id: Identifier
    acknowledge: tuple[JobIdentifier, ...] = ()
    max_results: Annotated[int, Meta(ge=0, le=1024)] = 64
    """0 only acknowledges."""
    goodbye: bool = False
    """The client will not ask again: what it was given and did not acknowledge is for the session's next client."""
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """Hold the reply for so long while there is nothing to give."""
    job_ids: tuple[JobIdentifier, ...] = ()
    """Only these, whichever client was sent them before: for who keeps no state of its own. Empty: any."""


class RelayBlocks(Request, frozen=True):
    """Make the broker the keeper of these results' blocks, which cannot be fetched from their nodes.

    The results are delivered again once it has them.
    """

    roles: ClassVar[Roles] = FOR_TRAINERS
    session: Identifier
    job_ids: tuple[JobIdentifier, ...]


class Cancel(Request, frozen=True):
    """End these jobs with outcome `cancelled`."""

    roles: ClassVar[Roles] = FOR_TRAINERS | FOR_OPERATORS
    job_ids: tuple[JobIdentifier, ...]
    session: Identifier | Literal[""] = ""
    """Only jobs of this session; others are answered as unknown. Empty: of any."""


class Status(Request, frozen=True):
    """Describe the service."""

    roles: ClassVar[Roles] = FOR_ALL


class Trace(Request, frozen=True):
    """Tell what a job went through; `job_id` is its id, or a beginning that no other job's has."""

    roles: ClassVar[Roles] = FOR_TRAINERS | FOR_OPERATORS
    job_id: JobIdentifier
    session: Identifier | Literal[""] = ""
    """Only a job of this session that was not collected yet, by its whole id. Empty: any that is known."""
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """Hold the reply for so long while the job has not ended and its rollout has no address."""


class ListSessions(Request, frozen=True):
    """List the sessions that hold something."""

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
    """Answer to `Submit`: the jobs are the service's now, and each will end in exactly one outcome."""

    new: int = 0
    """How many of them were not here before."""
    journal_id: str = ""
    """The journal that has them now; jobs that went into another one, which is gone, are lost."""


class Collected(Reply, frozen=True):
    """Answer to `Collect`.

    Further frames: one trajectory block for each result whose `tokens` is not 0 and whose block is not `kept` by its
    node, in order.
    """

    results: tuple[Result, ...] = ()
    remaining: int = 0
    """Jobs of the session that have not ended, or whose results are neither in this reply nor acknowledged."""
    journal_id: str = ""
    """As in `Accepted`."""


class Cancelled(Reply, frozen=True):
    """Answer to `Cancel`: what became of each id."""

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
    """Phases started again after a loss."""
    lost_blocks: int = 0
    """Trajectories that were lost with their node before they were fetched, so that their jobs ran again."""
    tasks: tuple[str, ...] = ()
    """Tasks that some stage process serves."""
    batches: tuple[BatchStatus, ...] = ()
    uptime_s: float = 0.0


class Span(Part, frozen=True, kw_only=True):
    """A job's stay in one state."""

    phase: Phase
    place: Literal["queued", "held"]
    attempt: Attempt
    start_s: float
    """Seconds after the job was accepted."""
    end_s: float | None = None
    """None: it is there still."""
    stage_id: str = ""
    """The stage process that held it."""
    node: str = ""
    backends: tuple[str, ...] = ()
    """Those that RUN was assigned to, one after the other."""
    error: ErrorInfo | None = None
    """What ended it badly, in short."""


class JobTrace(Reply, frozen=True, kw_only=True):
    """Answer to `Trace`. All times but one are seconds after the job was accepted."""

    job_id: str
    accepted_at: float
    """For people: the broker's wall clock, in seconds since 1970."""
    age_s: float
    spans: tuple[Span, ...]
    left_out: int = 0
    """Events that a very long history has lost in its middle."""
    restarts: tuple[float, ...] = ()
    """When the broker was restarted."""
    outcome: Outcome | None = None
    """None: the job has not ended; then of what follows only its task and its group are known."""
    ended_s: float | None = None
    collected_s: float | None = None
    """When a client acknowledged the result."""
    task: str = ""
    group_id: str = ""
    reward: float | None = None
    stop_reason: str = ""
    tokens: int = 0
    turns: int = 0
    error: ErrorInfo | None = None
    address: str = ""
    """While a program outside may lead the rollout: the URL at which RUN takes its calls. Behind `#` is the loopback
    network that it is on, if it is on one (see `system.node_name.loopback_id`)."""
    traceparent: str = ""
    """The W3C trace context of the job's span; empty: it is not traced."""
    parent_span: str = ""
    """The id of the span above it, 16 hexadecimal digits; empty: there is none."""


class SessionRow(Part, frozen=True):
    """What a session holds."""

    session: str
    queued: int = 0
    """Jobs that wait, those of its batches too."""
    running: int = 0
    """Jobs that hold a slot."""
    results: int = 0
    """Results that no client has acknowledged, and rollouts of groups that are not fetched."""
    batches: int = 0
    """Open ones, and ended ones that were not closed."""
    carried_groups: int = 0
    """Groups that wait for its next batch."""
    lease_s: float | None = None
    """How long it may be silent; None: its jobs and results last."""
    silent_s: float | None = None
    """How long it has been."""


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
