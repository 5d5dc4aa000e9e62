"""Stage processes and the rollout broker: reports, phases to start and stop, phases that ended."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from ...errors import ErrorInfo
from .base import (
    TASK_LIMIT,
    UNSAID_PROTOCOL,
    AnnouncedKey,
    Attempt,
    Count,
    FieldName,
    Identifier,
    JobIdentifier,
    Message,
    Metrics,
    Notes,
    Part,
    PathText,
    Seconds,
    Segments,
    ShortText,
    Timings,
)
from .jobs import BlockHandle, LogprobsMode, Outcome, Phase, SandboxHandle, Steps
from .nodes import NodeFacts
from .watching import Tokens, TurnsSoFar

Keep = Literal["broker", "node"]
ReportNumber = Annotated[int, Meta(ge=0, le=2**62)]


class Task(Part, frozen=True):
    """A task that a stage process serves, with what the front door checks of an instance."""

    name: Identifier
    fields: Annotated[dict[FieldName, ShortText], Meta(max_length=TASK_LIMIT)] = {}
    """The instance's fields and their types: `str`, `int`, `float`, `bool`, `list[str]`, `dict[str, str]` or `any`."""
    optional: Annotated[tuple[FieldName, ...], Meta(max_length=TASK_LIMIT)] = ()
    """Those of the fields that may be left out."""
    harnesses: Annotated[tuple[Identifier, ...], Meta(max_length=TASK_LIMIT)] = ()
    """The agent programs that may lead its rollouts."""


class StageReport(Message, frozen=True, kw_only=True):
    """Says everything of a stage process: sent over each new connection, when the broker asks, and now and then.

    In between, `MemberAlive` keeps its leases and says what has changed.
    """

    protocol: int = UNSAID_PROTOCOL
    """What the sender speaks; it names its `PROTOCOL_VERSION`."""
    stage_id: Identifier
    """Names one process for its lifetime, never another one."""
    member: Identifier | Literal[""] = ""
    """Who reports: the node, for all of its stage processes; empty: the process itself."""
    number: ReportNumber = 0
    """Of the member's last `MemberAlive` before this one."""
    role: Phase
    node: Identifier
    place: ShortText = ""
    """Which machine and run folder the node is (`system.node_name.place_of`): no other one may have its name."""
    slots: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    endpoint: PathText
    """Where the process's PULL is bound."""
    curve_key: AnnouncedKey = ""
    tasks: Annotated[tuple[Task, ...], Meta(max_length=TASK_LIMIT)]
    welcomed: bool = False
    """The broker's welcome has arrived at `endpoint`; before that, the process gets no job."""
    draining: bool = False
    """It takes no more jobs, and ends what it holds; `StageLeaving` follows."""
    asks_answer: bool = False
    """The broker is to send `StageWelcome`, so that the member knows that its reports arrive."""
    running: dict[JobIdentifier, Attempt] = {}
    """The jobs that it holds, with their attempts."""
    origins: dict[JobIdentifier, Identifier] = {}
    """Of those that it holds and of those that ended, as far as their `StartPhase` had one."""
    backends: dict[JobIdentifier, Identifier] = {}
    """RUN: the backends of those that have one."""
    addresses: dict[JobIdentifier, PathText] = {}
    """RUN: where programs outside reach the rollouts that they lead."""
    ended: dict[JobIdentifier, Attempt] = {}
    """The jobs whose phase ended here and whose event the broker has not noted yet, with their attempts."""
    kept: tuple[JobIdentifier, ...] | None = None
    """From a node's broker, of RUN: the blocks of this rollout broker's trajectories that are there, by `block_id`."""
    facts: NodeFacts | None = None
    """Of the node."""

    @property
    def from_member(self) -> str:
        return self.member or self.stage_id


class MemberAlive(Message, frozen=True, kw_only=True):
    """Keeps the leases of a member, who has reported before, and says what began since: sent with every heartbeat.

    A number that does not follow the last one tells the broker that a message was lost; it asks for full reports.
    """

    member: Identifier
    number: ReportNumber
    began: dict[Identifier, dict[JobIdentifier, Attempt]] = {}
    """The phases that have arrived since the last report, by stage process; those that ended say so themselves."""
    backends: dict[JobIdentifier, tuple[Attempt, Identifier]] = {}
    """The backends that attempts of jobs have got since the last report."""
    addresses: dict[JobIdentifier, tuple[Attempt, PathText]] = {}
    """The addresses that attempts of jobs have got since the last report."""
    asks_demand: bool = False
    """The broker is to send `SlotDemand`."""
    facts: NodeFacts | None = None
    """Those of the node, if they have changed much since they were last said."""


class StageLeaving(Message, frozen=True):
    """The stage process takes no more jobs; those that it still holds go to others."""

    stage_id: Identifier


class PhaseEnd(Message, frozen=True, kw_only=True):
    """Base of the two ends of a phase.

    RUN's have one further frame, the trajectory's block, if `tokens` is not 0 and the block is not `kept`.
    """

    stage_id: Identifier
    job_id: JobIdentifier
    attempt: Attempt
    phase: Phase
    number: Annotated[int, Meta(ge=0)] = 0
    """Names the event among those of its process, which sends it again until `EventsNoted` names it; 0: only once."""
    origin: Identifier | Literal[""] = ""
    """That of its `StartPhase`."""
    stop_reason: ShortText = ""
    backend: Identifier | Literal[""] = ""
    metrics: Metrics = {}
    timings: Timings = {}
    steps: Steps = ()
    tokens: Annotated[int, Meta(ge=0)] = 0
    turns: Annotated[int, Meta(ge=0)] = 0
    segments: Segments = ()
    logprobs_mode: LogprobsMode | Literal[""] = ""
    notes: Notes = {}
    """For people, from RUN and EVAL."""
    kept: BlockHandle | None = None
    """From a node's broker: the trajectory's block stays there."""


class PhaseDone(PhaseEnd, frozen=True, kw_only=True):
    """A phase ended well."""

    sandbox: SandboxHandle | None = None
    """The sandbox that lives on, for the next phase, which must run on its node."""
    phase_data: dict[str, Any] = {}
    """Plain data for the next phase: INIT's for RUN, RUN's for EVAL."""
    reward: float | None = None
    """From EVAL."""


class PhaseFailed(PhaseEnd, frozen=True, kw_only=True):
    """A phase ended badly; its block is what there is of the trajectory."""

    outcome: Outcome
    error: ErrorInfo
    retry: bool = False
    """Nothing was observed, so the phase may be tried again."""
    given_back: bool = False
    """Nothing was tried, so a retry spends no attempt."""
    sandbox_gone: bool = False
    """The sandbox that earlier phases left for this one is gone, so a retry begins with a new one."""
    reward: float | None = None
    """What a job earns that the agent itself has ended; finite."""


class BlockSent(Message, frozen=True, kw_only=True):
    """Makes the broker the keeper of a block: the answer to `SendBlocks`, and sent for each block by a node that ends.

    Further frame: the block, unless it is `lost`.
    """

    stage_id: Identifier
    block_id: JobIdentifier
    lost: bool = False
    """The node no longer has it."""


class TurnsShown(Message, frozen=True, kw_only=True):
    """Answer to `ShowTurns`. Further frame, if there are `shown_tokens`: the block of the turns that are shown."""

    stage_id: Identifier
    job_id: JobIdentifier
    attempt: Attempt
    known_tokens: Tokens = 0
    """That of the question."""
    origin: Identifier | Literal[""] = ""
    """That of the question."""
    so_far: TurnsSoFar | None = None
    """None: the process does not have that attempt (any more)."""

    @property
    def has_block(self) -> bool:
        return self.so_far is not None and self.so_far.shown_tokens > 0


StageEvent = StageReport | MemberAlive | StageLeaving | PhaseDone | PhaseFailed | BlockSent | TurnsShown


class StageWelcome(Message, frozen=True, kw_only=True):
    """Answer to the first `StageReport` of a member, and to what shows that a report was lost: report everything."""

    backend_broker: str
    heartbeat_s: Seconds
    """How often to report."""
    keep: Keep = "broker"
    """Where the blocks of trajectories are to be until a client has them."""


class StageRefused(Message, frozen=True):
    """The process cannot work for this broker, and should end."""

    error: ErrorInfo


class StartPhase(Message, frozen=True, kw_only=True):
    """Run one phase of a job. Further frame: the packed `Job`."""

    job_id: JobIdentifier
    attempt: Attempt
    phase: Phase
    sandbox: SandboxHandle | None = None
    phase_data: dict[str, Any] = {}
    origin: Identifier | Literal[""] = ""
    """From a node's broker: the rollout broker whose job it is."""
    traceparent: ShortText = ""
    """The W3C trace context of the phase's span; empty: the job is not traced."""


class StopPhase(Message, frozen=True):
    """End a phase whose result is not waited for. Of another attempt than the running one: do nothing."""

    job_id: JobIdentifier
    attempt: Attempt


class ShowTurns(Message, frozen=True, kw_only=True):
    """Send the last turns of a phase of RUN, unless it has come no further than `known_tokens`."""

    job_id: JobIdentifier
    attempt: Attempt
    known_tokens: Tokens = 0
    origin: Identifier | Literal[""] = ""
    """From a node's broker: the rollout broker that asks."""


class SlotDemand(Message, frozen=True):
    """How many slots of each stage this broker's jobs could use on the node, those they have included."""

    slots: dict[Phase, Annotated[int, Meta(ge=0)]]
    weight: Annotated[float, Meta(gt=0)] = 1.0
    """Of the sessions that have jobs, together: slots are divided among brokers by it."""


class EventsNoted(Message, frozen=True):
    """The events of these numbers are in the broker's journal, or were stale: the process may forget them."""

    numbers: tuple[Count, ...]


class CloseSandbox(Message, frozen=True):
    """Remove a sandbox of the process's node that no phase will use."""

    sandbox: SandboxHandle


class ForgetBlocks(Message, frozen=True):
    """Delete these blocks, which are no longer needed."""

    block_ids: tuple[JobIdentifier, ...]


class SendBlocks(Message, frozen=True):
    """Send these blocks to the broker, which becomes their keeper: clients cannot fetch them."""

    block_ids: tuple[JobIdentifier, ...]


StageCommand = (
    StageWelcome
    | SlotDemand
    | StageRefused
    | StartPhase
    | StopPhase
    | ShowTurns
    | EventsNoted
    | CloseSandbox
    | ForgetBlocks
    | SendBlocks
)
