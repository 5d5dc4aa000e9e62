"""Stage processes and the rollout broker: reports, phases to start and stop, phases that ended."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from ...errors import ErrorInfo
from .base import (
    CONVERSATIONS_LIMIT,
    SEGMENTS_LIMIT,
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
    ModelName,
    Notes,
    Part,
    PathText,
    Seconds,
    Segments,
    ShortText,
    Timings,
)
from .chat import ChatSettings
from .jobs import (
    BlockHandle,
    Conversations,
    LogprobsMode,
    Outcome,
    Phase,
    RecordForms,
    RecordsDropped,
    SandboxHandle,
    Steps,
    TurnRewards,
)
from .nodes import NodeFacts
from .watching import Tokens, TurnsSoFar

ConversationNames = Annotated[tuple[Identifier, ...], Meta(max_length=CONVERSATIONS_LIMIT)]
Keep = Literal["broker", "node"]
TokenPlace = Annotated[int, Meta(ge=0, le=2**31 - 1)]
ReportNumber = Annotated[int, Meta(ge=0, le=2**62)]


class Task(Part, frozen=True):
    """A task that a stage process serves, with what the front door checks of an instance."""

    name: Identifier
    fields: Annotated[dict[FieldName, ShortText], Meta(max_length=TASK_LIMIT)] = {}
    """The instance's fields and their types: `str`, `int`, `float`, `bool`, `list[str]`, `dict[str, str]` or `any`."""
    optional: Annotated[tuple[FieldName, ...], Meta(max_length=TASK_LIMIT)] = ()
    """Fields that may be omitted."""
    harnesses: Annotated[tuple[Identifier, ...], Meta(max_length=TASK_LIMIT)] = ()
    """The agent programs that may lead its rollouts."""
    models: Annotated[tuple[ModelName, ...], Meta(max_length=TASK_LIMIT)] = ()
    """Models that the process reaches by endpoints of its environment, for `Job.models`."""
    model_fields: Annotated[tuple[ShortText, ...], Meta(max_length=16)] = ()
    """Fields of an instance that name models, by the job's names or their own, such as `players.*.model`."""


class StageReport(Message, frozen=True, kw_only=True):
    """The full state of a stage process: sent on each new connection, when the broker asks, and periodically.

    In between, `MemberAlive` renews its leases and reports changes.
    """

    protocol: int = UNSAID_PROTOCOL
    """The sender's `PROTOCOL_VERSION`."""
    stage_id: Identifier
    """Identifies one process for its lifetime; never reused."""
    member: Identifier | Literal[""] = ""
    """The sender: the node, for all of its stage processes; empty: the process itself."""
    number: ReportNumber = 0
    """Of the member's last `MemberAlive` before this report."""
    role: Phase
    node: Identifier
    place: ShortText = ""
    """The node's machine and run folder (`system.node_name.place_of`); no other place may use its name."""
    slots: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    endpoint: PathText
    """Where the process's PULL socket is bound."""
    curve_key: AnnouncedKey = ""
    tasks: Annotated[tuple[Task, ...], Meta(max_length=TASK_LIMIT)]
    welcomed: bool = False
    """The broker's welcome has arrived at `endpoint`; until then the process gets no job."""
    draining: bool = False
    """It accepts no more jobs and finishes those that it has; `StageLeaving` follows."""
    asks_answer: bool = False
    """Request a `StageWelcome`, which shows the member that its reports arrive."""
    running: dict[JobIdentifier, Attempt] = {}
    """Its jobs and their attempts."""
    origins: dict[JobIdentifier, Identifier] = {}
    """Of its running and ended jobs, as far as their `StartPhase` had one."""
    backends: dict[JobIdentifier, Identifier] = {}
    """RUN: the backends of its jobs, where assigned."""
    addresses: dict[JobIdentifier, PathText] = {}
    """RUN: the addresses at which outside programs reach the rollouts that they lead."""
    ended: dict[JobIdentifier, Attempt] = {}
    """Attempts of jobs whose phase ended here and whose event the broker has not noted yet."""
    kept: tuple[JobIdentifier, ...] | None = None
    """From a node's broker, of RUN: the `block_id`s of this rollout broker's trajectories that the node has."""
    facts: NodeFacts | None = None
    """Of the node."""

    @property
    def from_member(self) -> str:
        return self.member or self.stage_id


class MemberAlive(Message, frozen=True, kw_only=True):
    """Renews the leases of a member that has reported before, and reports what began since: sent with every heartbeat.

    A gap in the numbers tells the broker that a message was lost; it then asks for full reports.
    """

    member: Identifier
    number: ReportNumber
    began: dict[Identifier, dict[JobIdentifier, Attempt]] = {}
    """The phases that have arrived since the last report, by stage process; ends are reported separately."""
    backends: dict[JobIdentifier, tuple[Attempt, Identifier]] = {}
    """Backends assigned to attempts of jobs since the last report."""
    addresses: dict[JobIdentifier, tuple[Attempt, PathText]] = {}
    """Addresses of attempts of jobs that opened since the last report."""
    asks_demand: bool = False
    """Request a `SlotDemand`."""
    facts: NodeFacts | None = None
    """Those of the node, if they changed much since the last report."""


class StageLeaving(Message, frozen=True):
    """The stage process accepts no more jobs; its remaining jobs go to other processes."""

    stage_id: Identifier


class PhaseEnd(Message, frozen=True, kw_only=True):
    """Base of the two ends of a phase.

    RUN's have one further frame, the trajectory's block, if `tokens` is not 0 and the block is not `kept`. SCORE's have
    one, the block of their `records` without a trajectory, if they have records and these are not `kept`.
    """

    stage_id: Identifier
    job_id: JobIdentifier
    attempt: Attempt
    phase: Phase
    number: Annotated[int, Meta(ge=0)] = 0
    """Identifies the event within its process, which resends it until `EventsNoted` names it; 0: sent once."""
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
    conversations: Conversations = ()
    """From RUN, as in `Result`."""
    turn_rewards: TurnRewards = ()
    """From RUN, as in `Result`."""
    rewards: Annotated[dict[Identifier, float], Meta(max_length=CONVERSATIONS_LIMIT)] = {}
    """From EVAL: the rewards of conversations that have one of their own, by name."""
    logprobs_mode: LogprobsMode | Literal[""] = ""
    notes: Notes = {}
    """For people, from RUN and EVAL."""
    records: RecordForms = ()
    """From RUN, as in `Result`; from SCORE, the record `teacher`."""
    records_dropped: RecordsDropped = {}
    """From RUN and SCORE, as in `Result`."""
    chat: ChatSettings | None = None
    """From RUN of a job with a teacher: that of the policy's backend, whose token ids the trajectory has."""
    kept: BlockHandle | None = None
    """From a node's broker: the trajectory's block stays on the node. From SCORE on a node: the block with which it
    began; the node's broker adds the scores to it, and passes on the handle of the new block."""


class PhaseDone(PhaseEnd, frozen=True, kw_only=True):
    """A phase succeeded."""

    sandbox: SandboxHandle | None = None
    """The sandbox that stays open for the next phase, which must run on its node."""
    phase_data: dict[str, Any] = {}
    """Plain data for the next phase: INIT's for RUN, RUN's for EVAL."""
    reward: float | None = None
    """From EVAL."""


class PhaseFailed(PhaseEnd, frozen=True, kw_only=True):
    """A phase failed; its block is the partial trajectory."""

    outcome: Outcome
    error: ErrorInfo
    retry: bool = False
    """Nothing was observed, so the phase may be retried."""
    given_back: bool = False
    """Nothing was tried, so a retry spends no attempt."""
    sandbox_gone: bool = False
    """The sandbox of earlier phases is gone, so a retry begins with a new one."""
    reward: float | None = None
    """The reward of a job that the agent itself ended; finite."""


class BlockSent(Message, frozen=True, kw_only=True):
    """Moves a block to the broker: the answer to `SendBlocks`, and sent for each block by a node that exits.

    Further frame: the block, unless it is `lost`.
    """

    stage_id: Identifier
    block_id: JobIdentifier
    lost: bool = False
    """The node no longer has it."""


class TurnsShown(Message, frozen=True, kw_only=True):
    """Answer to `ShowTurns`. Further frame, if `shown_tokens` is not 0: the block of the shown turns."""

    stage_id: Identifier
    job_id: JobIdentifier
    attempt: Attempt
    known_tokens: Tokens = 0
    """Copied from the request."""
    origin: Identifier | Literal[""] = ""
    """Copied from the request."""
    so_far: TurnsSoFar | None = None
    """None: the process does not have that attempt (any more)."""

    @property
    def has_block(self) -> bool:
        return self.so_far is not None and self.so_far.shown_tokens > 0


StageEvent = StageReport | MemberAlive | StageLeaving | PhaseDone | PhaseFailed | BlockSent | TurnsShown


class StageWelcome(Message, frozen=True, kw_only=True):
    """Answer to a member's first `StageReport`, and to a sign that a report was lost: send a full report."""

    backend_broker: str
    heartbeat_s: Seconds
    """Reporting interval."""
    keep: Keep = "broker"
    """Where the blocks of trajectories stay until a client has them."""


class StageRefused(Message, frozen=True):
    """The process cannot work for this broker, and should exit."""

    error: ErrorInfo


class TextToScore(Part, frozen=True, kw_only=True):
    """A trajectory that a teacher is to score."""

    chat: ChatSettings
    """Of the engine whose token ids it has."""
    tokens: Count
    """T: its length."""
    ranges: Annotated[tuple[tuple[TokenPlace, TokenPlace], ...], Meta(max_length=SEGMENTS_LIMIT + 1)]
    """The segments to score: the first token of each, and the token after its last."""
    kept: BlockHandle | None = None
    """The trajectory's block, which the node keeps; None: the rollout broker has it."""


class StartPhase(Message, frozen=True, kw_only=True):
    """Run one phase of a job. Further frame: the packed `Job`.

    SCORE has one more, the token ids of the trajectory, int32 [T]: from the rollout broker, or from the node's broker
    if the node keeps the block. It is empty if they are lost.
    """

    job_id: JobIdentifier
    attempt: Attempt
    phase: Phase
    sandbox: SandboxHandle | None = None
    phase_data: dict[str, Any] = {}
    conversations: ConversationNames = ()
    """For EVAL: the names of RUN's conversations; empty: one, `main`."""
    text: TextToScore | None = None
    """For SCORE."""
    origin: Identifier | Literal[""] = ""
    """From a node's broker: the rollout broker that owns the job."""
    traceparent: ShortText = ""
    """The W3C trace context of the phase's span; empty: not traced."""


class StopPhase(Message, frozen=True):
    """Stop a phase whose result is not needed; ignored for another attempt than the running one."""

    job_id: JobIdentifier
    attempt: Attempt


class ShowTurns(Message, frozen=True, kw_only=True):
    """Send the last turns of a RUN phase, unless it has no more than `known_tokens`."""

    job_id: JobIdentifier
    attempt: Attempt
    known_tokens: Tokens = 0
    origin: Identifier | Literal[""] = ""
    """From a node's broker: the requesting rollout broker."""


class SlotDemand(Message, frozen=True):
    """How many slots of each stage this broker's jobs could use on the node, including those in use."""

    slots: dict[Phase, Annotated[int, Meta(ge=0)]]
    weight: Annotated[float, Meta(gt=0)] = 1.0
    """The total weight of the sessions that have jobs, by which slots are divided among brokers."""


class EventsNoted(Message, frozen=True):
    """The events of these numbers are in the broker's journal, or were stale: the process may drop them."""

    numbers: tuple[Count, ...]


class CloseSandbox(Message, frozen=True):
    """Remove a sandbox of the process's node that no phase will use."""

    sandbox: SandboxHandle


class ForgetBlocks(Message, frozen=True):
    """Delete these blocks."""

    block_ids: tuple[JobIdentifier, ...]


class SendBlocks(Message, frozen=True):
    """Send these blocks to the broker, which stores them from then on: clients cannot fetch them."""

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
