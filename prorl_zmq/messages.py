"""Every message of the service: reading this file is reading the protocol.

A message is one MessagePack header frame, followed by raw frames where its docstring says so. Behind a ROUTER the
header comes after an empty delimiter frame, for REQ and DEALER clients alike; PUSH/PULL messages have no delimiter.
Each header is a map whose `type` names the class (`phase_done` is `PhaseDone`); unknown fields are refused. Times are
seconds, sizes are bytes, and no message carries a clock's reading, since two nodes have two clocks
(but `JobTrace.accepted_at`, for people).

    trainer        ⇄ rollout broker    Request / Reply              ROUTER, the front door
    stage process  → rollout broker    StageEvent                   PUSH → PULL
    rollout broker → stage process     StageCommand                 PUSH → PULL
    anyone         ⇄ backend broker    BackendRequest / BackendReply  ROUTER
    stage process  ⇄ engine host       EngineRequest / EngineReply  ROUTER
"""

from __future__ import annotations

import os
import re
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from .errors import ErrorInfo  # noqa: TC001 - msgspec reads the annotations at run time

PROTOCOL_VERSION = 1
"""Raised with every incompatible change; the hello of a peer with another one is refused."""

JOB_LIMIT_BYTES = 4 * 2**20
"""Default limit on one packed job."""
MAX_FRAMES = 4096
"""Most frames of one message."""
ATTEMPT_LIMIT = 2**20
"""Largest attempt: every attempt crosses the wire and lies in the journal."""
TASK_LIMIT = 256
"""Most tasks of one stage process, and most fields of one task."""
METRICS_LIMIT = 512
"""Most metrics of one phase: a result carries those of three, and must fit into one header with its error."""
NOTES_LIMIT = 16
"""Most notes of one job."""
NOTE_LIMIT = 16_000
"""Most characters of one note, beside what says how many were left out."""
TIMINGS_LIMIT = 64
"""Most timings of one phase."""
SEGMENTS_LIMIT = 16_384
"""Most segments of one trajectory."""
GROUP_LIMIT = 1024
"""Most rollouts of a group, which crosses the wire in one message of two frames each."""
GIVEN_UP_LIMIT = 32
"""Most given-up groups that a report names."""


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of what messages are made of."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag=_snake):
    """Base of all messages."""


Identifier = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}\Z")]
"""The name of a job, group, session, stage process or backend: it may become part of a file's name."""
JobIdentifier = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z")]
BatchIdentifier = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]{0,39}\Z")]
"""The ids of its groups and jobs begin with it."""
GroupIdentifier = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,51}\Z")]
FieldName = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\"\\]{1,256}\Z")]
Seconds = Annotated[float, Meta(gt=0, le=7 * 86400)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Attempt = Annotated[int, Meta(ge=1, le=ATTEMPT_LIMIT)]
MeasureName = Annotated[str, Meta(max_length=128)]
Metrics = Annotated[dict[MeasureName, float], Meta(max_length=METRICS_LIMIT)]
Note = Annotated[str, Meta(max_length=NOTE_LIMIT + 96)]
Notes = Annotated[dict[MeasureName, Note], Meta(max_length=NOTES_LIMIT)]
Timings = Annotated[dict[MeasureName, float], Meta(max_length=TIMINGS_LIMIT)]
Segments = Annotated[tuple[Count, ...], Meta(max_length=SEGMENTS_LIMIT)]
ShortText = Annotated[str, Meta(max_length=128)]
PathText = Annotated[str, Meta(max_length=4096)]
WeightVersion = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
CurveKey = Annotated[str, Meta(pattern=r"^[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}\Z")]
"""32 bytes as ZeroMQ writes keys; there are neither quotes nor backslashes in it."""
AnnouncedKey = Annotated[str, Meta(pattern=r"^(?:[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40})?\Z")]
"""The public key that a socket proves; empty: it takes plaintext."""


def new_id() -> str:
    """Give a fresh random identifier: 32 hexadecimal digits."""
    return os.urandom(16).hex()


class Phase(StrEnum):
    """A job's passage through a stage; also the role of the stage's processes."""

    INIT = "init"
    RUN = "run"
    EVAL = "eval"


class Outcome(StrEnum):
    """How a job ended. Only `completed` carries a reward."""

    COMPLETED = "completed"
    FAILED = "failed"
    INFRASTRUCTURE_ERROR = "infrastructure_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


class KeyRole(StrEnum):
    """What a key is for (see `security.rights`)."""

    TRAINER = "trainer"
    """Submits jobs, collects trajectories, gives engines new weights."""
    STAGE = "stage"
    """A node's stage processes and engine hosts."""
    OPERATOR = "operator"
    """Looks at the service, cancels jobs, manages backends; neither submits jobs nor sees trajectories."""
    SERVICE = "service"
    """The brokers themselves."""


# Jobs ---------------------------------------------------------------------------------------------------------------


class Sampling(Part, frozen=True):
    """How the policy's tokens are drawn. The names and meanings are vLLM's."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    """0 takes the likeliest token, whose log-prob is then that at temperature 1."""
    max_tokens: Count = 1024
    """Most tokens of one turn."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """The job's random seed; each turn derives its own from it. None: the engine's own randomness."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that have this share of the probability together."""
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Draw from so many of the likeliest tokens; 0: from all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Draw from tokens at least this share as likely as the likeliest."""
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()
    """A turn ends after any of these, beside those of the chat format; the one that ended it is part of the turn."""
    stop: Annotated[tuple[StopText, ...], Meta(max_length=16)] = ()
    """A turn ends with the token that completes any of these texts."""


class EpisodeLimits(Part, frozen=True):
    """Where an episode stops if the policy does not."""

    max_turns: Count = 16
    """Most turns of the policy."""
    max_tokens: Count = 32_768
    """Most tokens of the whole conversation, prompt included."""
    tool_call_s: Seconds = 60.0
    """Longest single tool call."""
    generation_s: Seconds = 600.0
    """Longest that an engine may take for one turn; beyond it the engine hangs, and the turn is asked of another."""


class PhaseLimits(Part, frozen=True):
    """Longest time in each phase, queue time excluded."""

    init_s: Seconds = 120.0
    run_s: Seconds = 1800.0
    eval_s: Seconds = 600.0

    def of(self, phase: Phase) -> float:
        """Give the limit of one phase in seconds."""
        return float(getattr(self, f"{phase}_s"))


class Job(Part, frozen=True, kw_only=True):
    """One rollout of one task instance."""

    task: Identifier
    """Names the `AgentHandler`."""
    instance: dict[str, Any]
    """The handler's own fields: plain data."""
    job_id: JobIdentifier = msgspec.field(default_factory=new_id)
    group_id: Identifier | Literal[""] = ""
    """Shared by the jobs of one prompt."""
    sampling: Sampling = Sampling()
    episode: EpisodeLimits = EpisodeLimits()
    limits: PhaseLimits = PhaseLimits()
    backend_wait_s: Seconds = 60.0
    """How long RUN may wait for an inference backend before the job ends with `no_backend`."""
    stage_wait_s: Seconds = 60.0
    """How long a phase may wait while no live stage process could take it before the job ends with `no_stage`."""
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    """How many times the job is started before a loss is final."""


SandboxKind = Literal["apptainer", "bubblewrap", "process"]
"""What a sandbox is made of; `process` is no isolation at all."""


class SandboxHandle(Part, frozen=True):
    """Where a sandbox lives, as plain data: enough for another process of the same node to attach to it."""

    kind: SandboxKind
    path: PathText
    """The sandbox's own directory on its node."""
    node: Identifier = "local"


LogprobsMode = Literal["processed_logprobs", "raw_logprobs", "tempered_logprobs"]
"""Which distribution log-probs are of: in vLLM's words, the one that was sampled from, after temperature, top-p, top-k
and min-p, or the model's own at temperature 1, before all of them; SGLang's are after the temperature alone."""


class Result(Part, frozen=True, kw_only=True):
    """Everything about an ended job that is not an array."""

    job_id: JobIdentifier
    task: Identifier
    outcome: Outcome
    group_id: Identifier | Literal[""] = ""
    attempt: Attempt = 1
    reward: float | None = None
    """None unless the outcome is `completed`."""
    error: ErrorInfo | None = None
    stop_reason: str = ""
    """Why the episode stopped (see `stages.agent_loop.StopReason`); empty if RUN did not end."""
    backend: str = ""
    """The backend that the job was assigned to."""
    metrics: dict[MeasureName, float] = {}
    """Counts and measures of the agent loop (`turns`, `tool_calls`, …) and those of the handler."""
    timings: dict[MeasureName, float] = {}
    """Seconds per phase (`init`, `run`, `eval`), queue (`init_queue`, …), tool (`tool.bash`), and in the `engine`."""
    notes: dict[MeasureName, str] = {}
    """What EVAL wrote down for people: a judge's verdict, a report of tests, a patch."""
    tokens: Annotated[int, Meta(ge=0)] = 0
    """T: the length of the trajectory's arrays."""
    turns: Annotated[int, Meta(ge=0)] = 0
    """n: the number of its turns."""
    segments: Segments = ()
    """Where in the arrays a segment begins, but for the first: each is a prompt of its own (see `ChatSettings`)."""
    logprobs_mode: LogprobsMode | Literal[""] = ""
    """Which distribution the log-probs are of; empty if nothing was generated."""


# Trainer ⇄ rollout broker: the front door ---------------------------------------------------------------------------


class Request(Message, frozen=True):
    """Base of what a client asks; `request_id` comes back in the reply."""

    request_id: Identifier


class Hello(Request, frozen=True):
    """First request of a client."""

    protocol: int = PROTOCOL_VERSION


class Submit(Request, frozen=True):
    """Accept these jobs, all or none. Further frames: one packed `Job` each. A job already here is not added twice."""

    session: Identifier


class Collect(Request, frozen=True):
    """Wait for finished jobs of a session and take them; the results of earlier replies are acknowledged first.

    A result that was sent to this client and is not among `acknowledge` was lost on the way, and is sent again.
    """

    session: Identifier
    client_id: Identifier
    acknowledge: tuple[JobIdentifier, ...] = ()
    max_results: Annotated[int, Meta(ge=0, le=1024)] = 64
    """0 only acknowledges."""
    goodbye: bool = False
    """The client will not ask again: what it was given and did not acknowledge is for the session's next client."""
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """Hold the reply for so long while there is nothing to give."""


class Cancel(Request, frozen=True):
    """End these jobs with outcome `cancelled`."""

    job_ids: tuple[JobIdentifier, ...]


class Keep(Part, frozen=True):
    """Which groups a batch keeps (see `brokers.keep_policies`)."""

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


Carry = Literal["nothing", "finished", "running"]
"""What of a batch's unneeded groups goes on into its session's next one: nothing, rollouts that are in, or those that
run too."""


class BatchOptions(Part, frozen=True, kw_only=True):
    """What a batch is to be."""

    target_groups: Count
    group_size: Annotated[int, Meta(ge=1, le=GROUP_LIMIT)]
    keep: Keep = Keep()
    carry: Carry = "running"
    weight: Annotated[float, Meta(gt=0, le=1_000_000)] = 1.0
    """Of its share of the slots, where there are several batches."""
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
    """How long nothing may be heard of its session, batch or no batch."""


class OpenBatch(Request, frozen=True):
    """Begin to collect groups. A batch that is open under this id with the same options is not opened again."""

    session: Identifier
    batch_id: BatchIdentifier
    options: BatchOptions


class Feed(Request, frozen=True):
    """Give a batch prompts. Further frames: one packed `Job` each, the template of a group's jobs."""

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

    session: Identifier
    batch_id: BatchIdentifier
    client_id: Identifier
    acknowledge: tuple[GroupIdentifier, ...] = ()
    feeds: bool = False
    """The client has more prompts, and is to be told when they are wanted."""
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """Hold the reply for so long while there is nothing to say."""


class CloseBatch(Request, frozen=True):
    """End a batch. What it has under way, and groups that are not acknowledged, go on as its `carry` says."""

    session: Identifier
    batch_id: BatchIdentifier
    acknowledge: tuple[GroupIdentifier, ...] = ()


class SessionAlive(Request, frozen=True):
    """The client of a session's batches lives."""

    session: Identifier


class NoteWeights(Request, frozen=True):
    """These weights are the current ones: batches drop what is too old beside them."""

    weight_version: WeightVersion


class Status(Request, frozen=True):
    """Describe the service."""


class Trace(Request, frozen=True):
    """Tell what a job went through; `job_id` is its id, or a beginning that no other job's has."""

    job_id: JobIdentifier


class Reply(Message, frozen=True):
    """Base of the answers to a client."""

    request_id: Identifier


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
    """Answer to `Collect`. Further frames: one trajectory block for each result whose `tokens` is not 0, in order."""

    results: tuple[Result, ...] = ()
    remaining: int = 0
    """Jobs of the session that have not ended, or whose results are neither in this reply nor acknowledged."""
    journal_id: str = ""
    """As in `Accepted`."""


class Cancelled(Reply, frozen=True):
    """Answer to `Cancel`: what became of each id."""

    jobs: dict[str, Literal["cancelled", "finished", "unknown"]] = {}


BatchState = Literal["open", "met", "short", "failed"]
"""`met`: the target is reached. `short`: the stream of prompts ended before it. `failed`: its keep policy raised, or
too many groups in a row could not be completed."""


class Spread(Part, frozen=True, kw_only=True):
    """How some numbers are spread; of none at all, everything is 0."""

    count: int = 0
    mean: float = 0.0
    least: float = 0.0
    most: float = 0.0
    p50: float = 0.0
    """The median, to a few percent, as are the others."""
    p90: float = 0.0


class RolloutSpread(Part, frozen=True, kw_only=True):
    """How rollouts are spread."""

    reward: Spread = Spread()
    tokens: Spread = Spread()
    seconds: Spread = Spread()
    """From start to end, in all phases."""


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
    kept: RolloutSpread = RolloutSpread()
    """Rollouts of the groups that were kept."""
    dropped: RolloutSpread = RolloutSpread()
    """Rollouts of those that were not: are they longer?"""


class BatchStatus(Part, frozen=True, kw_only=True):
    """One batch, as the rollout broker sees it."""

    batch_id: str
    session: str
    state: BatchState
    problem: str = ""
    """What is the matter with one that failed."""
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
    block if `tokens` is not 0.
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


class Noted(Reply, frozen=True):
    """Answer to `SessionAlive` and `NoteWeights`."""


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
    """When the broker was started anew."""
    outcome: Outcome | None = None
    """None: the job has not ended; then what follows is not known either."""
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


class Refused(Reply, frozen=True):
    """The request was not done, and changed nothing."""

    error: ErrorInfo


FrontDoorRequest = (
    Hello
    | Submit
    | Collect
    | Cancel
    | OpenBatch
    | Feed
    | NextGroup
    | CloseBatch
    | SessionAlive
    | NoteWeights
    | Status
    | Trace
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
    | Noted
    | ServiceStatus
    | JobTrace
    | Refused
)


# Stage process → rollout broker -------------------------------------------------------------------------------------


class Task(Part, frozen=True):
    """A task that a stage process serves, with what the front door checks of an instance."""

    name: Identifier
    fields: Annotated[dict[FieldName, ShortText], Meta(max_length=TASK_LIMIT)] = {}
    """The instance's fields and their types: `str`, `int`, `float`, `bool`, `list[str]`, `dict[str, str]` or `any`."""
    optional: Annotated[tuple[FieldName, ...], Meta(max_length=TASK_LIMIT)] = ()
    """Those of the fields that may be left out."""


class StageReport(Message, frozen=True, kw_only=True):
    """Announces a stage process, and keeps its leases: sent at the start and with every heartbeat.

    Because each report says everything, a broker that starts anew knows its stage processes after one heartbeat.
    """

    protocol: int = PROTOCOL_VERSION
    stage_id: Identifier
    """Names one process for its lifetime, never another one."""
    role: Phase
    node: Identifier
    slots: Count
    endpoint: PathText
    """Where the process's PULL is bound."""
    curve_key: AnnouncedKey = ""
    tasks: Annotated[tuple[Task, ...], Meta(max_length=TASK_LIMIT)]
    welcomed: bool = False
    """The broker's welcome has arrived at `endpoint`; before that, the process is given no job."""
    running: dict[JobIdentifier, Attempt] = {}
    """The jobs that it holds, with their attempts."""
    backends: dict[JobIdentifier, Identifier] = {}
    """RUN: the backends of those that have one."""
    ended: dict[JobIdentifier, Attempt] = {}
    """The jobs whose phase ended here and whose event the broker has not noted yet, with their attempts."""


class StageLeaving(Message, frozen=True):
    """The stage process takes no more jobs; those that it still holds are to be given to others."""

    stage_id: Identifier


class PhaseDone(Message, frozen=True, kw_only=True):
    """A phase ended well. RUN's has one further frame, the trajectory's block, if `tokens` is not 0."""

    stage_id: Identifier
    job_id: JobIdentifier
    attempt: Attempt
    phase: Phase
    number: Annotated[int, Meta(ge=0)] = 0
    """Names the event among those of its process, which sends it again until `EventsNoted` names it; 0: only once."""
    sandbox: SandboxHandle | None = None
    """The sandbox that lives on, for the next phase; its node is where that phase must run."""
    carry: dict[str, Any] = {}
    """Plain data for the next phase: INIT's for RUN, RUN's for EVAL."""
    reward: float | None = None
    """From EVAL."""
    notes: Notes = {}
    """From EVAL."""
    stop_reason: ShortText = ""
    backend: Identifier | Literal[""] = ""
    metrics: Metrics = {}
    timings: Timings = {}
    tokens: Annotated[int, Meta(ge=0)] = 0
    turns: Annotated[int, Meta(ge=0)] = 0
    segments: Segments = ()
    logprobs_mode: LogprobsMode | Literal[""] = ""


class PhaseFailed(Message, frozen=True, kw_only=True):
    """A phase ended badly. RUN's has one further frame, what there is of the trajectory, if `tokens` is not 0."""

    stage_id: Identifier
    job_id: JobIdentifier
    attempt: Attempt
    phase: Phase
    outcome: Outcome
    error: ErrorInfo
    number: Annotated[int, Meta(ge=0)] = 0
    """Names the event among those of its process, which sends it again until `EventsNoted` names it; 0: only once."""
    retry: bool = False
    """Nothing was observed, so the phase may be tried again."""
    sandbox_gone: bool = False
    """The sandbox that earlier phases left for this one is no more, so trying again means to begin with a new one."""
    stop_reason: ShortText = ""
    backend: Identifier | Literal[""] = ""
    metrics: Metrics = {}
    timings: Timings = {}
    tokens: Annotated[int, Meta(ge=0)] = 0
    turns: Annotated[int, Meta(ge=0)] = 0
    segments: Segments = ()
    logprobs_mode: LogprobsMode | Literal[""] = ""


StageEvent = StageReport | StageLeaving | PhaseDone | PhaseFailed


# Rollout broker → stage process -------------------------------------------------------------------------------------


class StageWelcome(Message, frozen=True, kw_only=True):
    """Answer to the first `StageReport` of a process."""

    backend_broker: str
    heartbeat_s: Seconds
    """How often to report."""


class StageRefused(Message, frozen=True):
    """The process cannot work for this broker, and should end."""

    error: ErrorInfo


class StartPhase(Message, frozen=True, kw_only=True):
    """Run one phase of a job. Further frame: the packed `Job`."""

    job_id: JobIdentifier
    attempt: Attempt
    phase: Phase
    sandbox: SandboxHandle | None = None
    carry: dict[str, Any] = {}


class StopPhase(Message, frozen=True):
    """End a phase that is no longer wanted; nobody waits for its result. Of another attempt than given: do nothing."""

    job_id: JobIdentifier
    attempt: Attempt


class EventsNoted(Message, frozen=True):
    """The events of these numbers are in the broker's journal, or were stale: the process may forget them."""

    numbers: tuple[Count, ...]


class CloseSandbox(Message, frozen=True):
    """Remove a sandbox of the process's node that no phase will use."""

    sandbox: SandboxHandle


StageCommand = StageWelcome | StageRefused | StartPhase | StopPhase | EventsNoted | CloseSandbox


# Backend broker -----------------------------------------------------------------------------------------------------


ToolCallForm = Literal["", "hermes", "llama3", "mistral", "fenced"]
History = Literal["template", "append"]


class ChatSettings(Part, frozen=True):
    """How conversations become tokens for a model (see `prorl_zmq.inference.chat`)."""

    kind: Literal["embedded", "transformers"] = "embedded"
    """`transformers`: by the chat template of the model's tokenizer."""
    tokenizer: str = ""
    """A directory as the stage processes see it, or a hub name; for kind `transformers`."""
    tool_calls: ToolCallForm = ""
    """How the model writes tool calls; empty: as its template does."""
    history: History = "template"
    """Where the template changes earlier turns (as those do that drop old reasoning): `template` follows it and begins
    a new segment of the trajectory; `append` keeps what the engine saw, so that there is always one segment."""


class Backend(Part, frozen=True, kw_only=True):
    """An inference engine that answers token ids with token ids."""

    backend_id: Identifier
    endpoint: str
    """Where the engine host's ROUTER is bound."""
    curve_key: AnnouncedKey = ""
    model: str = ""
    """What the engine says that it serves."""
    chat: ChatSettings = ChatSettings()
    weight_version: WeightVersion = 0
    node: Identifier = "local"
    """Jobs whose RUN is on this node are preferred."""
    weight: Annotated[float, Meta(gt=0, le=1_000_000)] = 1.0
    """How much it takes beside others: one of weight 2 gets twice the jobs."""
    max_in_flight: Count = 256
    """Jobs at once beyond which it counts as full: others are preferred, and a group is split."""
    context_tokens: Annotated[int, Meta(ge=0)] = 0
    """Most tokens of a prompt and its answer together; 0: it did not say."""
    logprobs_mode: LogprobsMode = "processed_logprobs"


class EngineLoad(Part, frozen=True):
    """What an engine host is doing, as of its last heartbeat."""

    running: Annotated[int, Meta(ge=0)] = 0
    """Generations going on."""
    tokens_per_s: Annotated[float, Meta(ge=0)] = 0.0
    """Generated tokens per second since the heartbeat before."""
    prompt_tokens: Annotated[int, Meta(ge=0)] = 0
    """Of all prompts since the host started."""
    cached_tokens: Annotated[int, Meta(ge=0)] = 0
    """Those of them that were found in the prefix cache."""
    generated_tokens: Annotated[int, Meta(ge=0)] = 0


class BackendStatus(Part, frozen=True, kw_only=True):
    """One backend, as the backend broker sees it."""

    backend: Backend
    state: Literal["ready", "draining", "updating", "probation", "unwell"]
    """`updating`: new weights are on their way and it does not serve them yet, so it gets no jobs.
    `probation`: a job could not reach it, or its generation failed there; single jobs try it, at growing intervals,
    until one is served. `unwell`: its host says that the engine cannot serve now, so it gets none."""
    problem: str = ""
    """What is the matter with one that is unwell or on probation."""
    next_try_s: float | None = None
    """How soon a job may try one on probation; 0: the next one does."""
    in_flight: int
    """Assignments held now."""
    assigned: int
    """Assignments ever made."""
    load: EngineLoad | None = None
    """None: it sends no heartbeats."""


class BackendRequest(Message, frozen=True):
    """Base of what the backend broker is asked."""

    request_id: Identifier


class Assign(BackendRequest, frozen=True, kw_only=True):
    """Give the job a backend; a job that holds one gets the same. The reply waits while there is none."""

    owner: Identifier
    """The stage process that holds the job: when it falls silent its assignments are released."""
    job_id: JobIdentifier
    attempt: Attempt
    wait_s: Seconds
    group_id: Identifier | Literal[""] = ""
    """The job's group, for `affinity = "group"`."""
    node: Identifier = "local"
    """Where the job's RUN is."""
    leaving: Identifier | Literal[""] = ""
    """The backend that the job holds and cannot go on with: give it another one, or wait until that may be tried."""


class GenerationFailed(BackendRequest, frozen=True):
    """A backend could not be reached by a job, or failed its generation: put it on probation."""

    job_id: JobIdentifier
    backend_id: Identifier
    problem: Annotated[str, Meta(min_length=1, max_length=1000)]


class Release(BackendRequest, frozen=True):
    """End a job's assignment. Of an older attempt than the one that holds it: do nothing."""

    job_id: JobIdentifier
    attempt: Attempt
    served: Annotated[int, Meta(ge=0)] = 0
    """As in `HeldAssignment`."""


class HeldAssignment(Part, frozen=True, array_like=True):
    """An assignment, as the stage process knows it that holds its job."""

    attempt: Attempt
    backend_id: Identifier | None = None
    """None: it waits for one."""
    served: Annotated[int, Meta(ge=0)] = 0
    """Generations that the backend has done for the job, failed ones not counted."""


class OwnerAlive(BackendRequest, frozen=True):
    """Keep the assignments of a stage process, and name those it still wants.

    A broker that was started anew learns from it which jobs are where.
    """

    owner: Identifier
    jobs: dict[JobIdentifier, HeldAssignment] = {}


class AddBackend(BackendRequest, frozen=True):
    """Register a backend. Under the id of a live one at another endpoint it is refused."""

    backend: Backend
    heartbeats: bool = False
    """The backend will send `BackendAlive`, and is removed when it falls silent."""


class BackendAlive(BackendRequest, frozen=True):
    """Heartbeat of an engine host. It is told `unknown_backend` if it has to register (again)."""

    backend_id: Identifier
    weight_version: WeightVersion
    load: EngineLoad = EngineLoad()
    problem: Annotated[str, Meta(max_length=1000)] = ""
    """Why the engine cannot serve now; empty: it can."""


class DrainBackend(BackendRequest, frozen=True):
    """Assign no more jobs to a backend; those that hold it keep it."""

    backend_id: Identifier


class RemoveBackend(BackendRequest, frozen=True):
    """Forget a backend and the assignments on it."""

    backend_id: Identifier


class ClearBackends(BackendRequest, frozen=True):
    """Forget all backends."""


class ListBackends(BackendRequest, frozen=True):
    """Describe all backends."""


class SetWeightVersion(BackendRequest, frozen=True):
    """Note which weights a backend (None: each) serves from now on.

    It holds until a heartbeat reports another version than the host's heartbeat before: engines that were updated by
    other means go on reporting what they know.
    """

    weight_version: WeightVersion
    backend_id: Identifier | None = None


class BeginWeights(BackendRequest, frozen=True):
    """Weights of this version are on their way: assign no job to a backend that does not serve them.

    Begun again for the same version, only the limit begins anew.
    """

    weight_version: WeightVersion
    limit_s: Seconds
    """If neither end nor cancel comes for so long, jobs get any backend again."""


class EndWeights(BackendRequest, frozen=True):
    """Engines serve these weights now: those that do not, get no jobs until they do."""

    weight_version: WeightVersion


class CancelWeights(BackendRequest, frozen=True):
    """The weights that were on their way will not come: jobs get any backend again."""

    weight_version: WeightVersion


class ListKeys(BackendRequest, frozen=True):
    """Tell an engine host which keys the service lets in; it has the list of that state."""

    state: str = ""


class BackendReply(Message, frozen=True):
    """Base of the backend broker's answers."""

    request_id: Identifier


class Assigned(BackendReply, frozen=True):
    """Answer to `Assign`."""

    backend: Backend


class Done(BackendReply, frozen=True):
    """The request was done."""


class BackendList(BackendReply, frozen=True):
    """Answer to `ListBackends`."""

    backends: tuple[BackendStatus, ...] = ()
    waiting: int = 0
    """Jobs that wait for a backend."""


class AllowedKey(Part, frozen=True):
    """A key that the service lets in."""

    name: Identifier
    role: KeyRole
    public_key: CurveKey


class KeyList(BackendReply, frozen=True):
    """Answer to `ListKeys`."""

    state: str
    """Names what the list holds."""
    keys: tuple[AllowedKey, ...] | None = None
    """None: the list has not changed since the state that was named."""


class BackendRefused(BackendReply, frozen=True):
    """The request was not done, and changed nothing."""

    error: ErrorInfo


AnyBackendRequest = (
    Assign
    | GenerationFailed
    | Release
    | OwnerAlive
    | AddBackend
    | BackendAlive
    | DrainBackend
    | RemoveBackend
    | ClearBackends
    | ListBackends
    | SetWeightVersion
    | BeginWeights
    | EndWeights
    | CancelWeights
    | ListKeys
)
AnyBackendReply = Assigned | Done | BackendList | KeyList | BackendRefused


# Engine host --------------------------------------------------------------------------------------------------------


UpdateMode = Literal["keep", "drain", "abort"]
"""What becomes of the generations that are running when new weights come: they pause and go on with the new ones; they
end first, with the old ones, while new requests wait; or they are ended as they are, and the agent loop has the rest of
the turn generated with the new ones."""


class EngineRequest(Message, frozen=True):
    """Base of what an engine host is asked."""

    request_id: Identifier


class Generate(EngineRequest, frozen=True, kw_only=True):
    """Continue a prompt. Further frame: its ids, int32 [P]."""

    job_id: JobIdentifier
    sampling: Sampling
    stop_token_ids: tuple[int, ...] = ()
    """The turn ends after any of these; the one that ended it is part of the answer."""


class Abort(EngineRequest, frozen=True):
    """Stop the generation that `request_id` began; there is no reply to either."""


class EngineHealth(EngineRequest, frozen=True):
    """Ask whether the engine can serve."""


class UpdateWeights(EngineRequest, frozen=True):
    """Serve the weights at `path` (seen from the engine host) from the next token on, as `weight_version`."""

    path: str
    weight_version: WeightVersion
    mode: UpdateMode = "keep"


class BeginUpdate(EngineRequest, frozen=True):
    """Generate nothing from here on: somebody is about to change the weights, and to send `EndUpdate`.

    The answer comes when nothing is generated any more, as `mode` says. Begun again for the same version, only the
    limit begins anew.
    """

    weight_version: WeightVersion
    limit_s: Seconds
    """If neither end nor cancel comes for so long after this, the engine goes on with the version that it had."""
    mode: UpdateMode = "keep"


class EndUpdate(EngineRequest, frozen=True):
    """The weights are in the engine; it goes on, and what it generates from now on is of this version."""

    weight_version: WeightVersion


class CancelUpdate(EngineRequest, frozen=True):
    """The weights are what they were, and the engine goes on. Nothing was begun: there is nothing to do."""

    weight_version: WeightVersion


class NoteWeightVersion(EngineRequest, frozen=True):
    """The weights were changed by other means; tokens that are generated from now on carry this version."""

    weight_version: WeightVersion


class EngineReply(Message, frozen=True):
    """Base of an engine host's answers."""

    request_id: Identifier


class VersionSpan(Part, frozen=True):
    """Generated tokens `start` up to `end` came from weights `weight_version`."""

    weight_version: int
    start: int
    end: int


FinishReason = Literal["stop", "length", "abort"]
"""`length`: the turn or the engine's context was full. `abort`: new weights came (see `UpdateMode`)."""


class Generated(EngineReply, frozen=True, kw_only=True):
    """Answer to `Generate`. Further frames: the ids, int32 [G], and their log-probs, float32 [G]."""

    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]
    cached_tokens: Annotated[int, Meta(ge=0)] = 0
    """Of the prompt, found in the engine's prefix cache."""


class EngineReady(EngineReply, frozen=True):
    """Answer to `EngineHealth`, and to all that is about weights, once it is done."""

    weight_version: WeightVersion
    in_flight: int = 0
    """Generations going on."""


class EngineRefused(EngineReply, frozen=True):
    """The request was not done; an update changed nothing."""

    error: ErrorInfo


AnyEngineRequest = (
    Generate | Abort | EngineHealth | UpdateWeights | BeginUpdate | EndUpdate | CancelUpdate | NoteWeightVersion
)
AnyEngineReply = Generated | EngineReady | EngineRefused
