"""Jobs that a client submits, and the results that it gets with their trajectories."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ...errors import ErrorInfo
from .base import (
    CONVERSATIONS_LIMIT,
    POLICY,
    SEGMENTS_LIMIT,
    TURN_REWARDS_LIMIT,
    AnnouncedKey,
    Argument,
    Attempt,
    Count,
    FieldName,
    Identifier,
    JobIdentifier,
    MeasureName,
    ModelName,
    Part,
    PathText,
    Seconds,
    Segments,
    ShortText,
    StopText,
    TokenId,
    in_form,
    new_id,
)


class Phase(StrEnum):
    """A job's passage through a stage; also the role of the stage's processes."""

    INIT = "init"
    RUN = "run"
    EVAL = "eval"
    SCORE = "score"
    """Only of a job with a `teacher`."""


class Outcome(StrEnum):
    """How a job ended. Only `completed` carries a reward, unless the agent itself caused the failure."""

    COMPLETED = "completed"
    FAILED = "failed"
    INFRASTRUCTURE_ERROR = "infrastructure_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


class Sampling(Part, frozen=True):
    """How the policy's tokens are sampled. Names and meanings are vLLM's."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    """0 takes the likeliest token, whose log-prob is then at temperature 1."""
    max_tokens: Count = 1024
    """Most tokens of one turn."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """The job's random seed; each turn derives its own from it. None: the engine's own randomness."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens with this total probability."""
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Sample from this many of the likeliest tokens; 0: from all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Sample from tokens with at least this share of the likeliest one's probability."""
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()
    """A turn ends after any of these or of the chat format's; the one that ended it is part of the turn."""
    stop: Annotated[tuple[StopText, ...], Meta(max_length=16)] = ()
    """A turn ends with the token that completes any of these texts."""


class EpisodeLimits(Part, frozen=True):
    """Limits that stop an episode if the policy does not."""

    max_turns: Count = 16
    """Most turns of the policy."""
    max_tokens: Count = 32_768
    """Most tokens of the whole conversation, prompt included."""
    tool_call_s: Seconds = 60.0
    """Longest single tool call."""
    generation_s: Seconds = 600.0
    """Longest time of an engine for one turn; then the engine counts as hung, and another one generates the turn."""


class PhaseLimits(Part, frozen=True):
    """Longest time in each phase, queue time excluded."""

    init_s: Seconds = 120.0
    run_s: Seconds = 1800.0
    eval_s: Seconds = 600.0
    teacher_s: Seconds = 600.0
    """Of SCORE: the answer of the job's `teacher`. Beyond it, the result has no scores."""

    def of(self, phase: Phase) -> float:
        """Return the limit of one phase, in seconds."""
        limits: dict[Phase, float] = {Phase.INIT: self.init_s, Phase.RUN: self.run_s, Phase.EVAL: self.eval_s}
        return float(limits.get(phase, self.teacher_s))


TrainedOn = Literal["main", "subagent", "side", "compaction", "all"]
TrainOn = Annotated[tuple[TrainedOn, ...], Meta(min_length=1, max_length=5)]


HarnessName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}(==[0-9A-Za-z.+!_-]{1,64})?\Z")]


class Harness(Part, frozen=True):
    """An agent program that leads a rollout in place of the service's agent loop (see `docs/harnesses.md`)."""

    name: Identifier
    """A name that `prorl harness list` prints, such as `claude-code`."""
    version: ShortText = ""
    """An installed version; empty: the newest."""
    train_on: TrainOn = ("main",)
    """The kinds of calls whose tokens are in the trajectory: of the main conversation, of sub-agents, others (titles,
    memories), summaries of a history that became too long, or all. Every call counts in the metrics."""
    arguments: Annotated[tuple[Argument, ...], Meta(max_length=64)] = ()
    """Added to its command line; for `command`, all of it, with placeholders `{url}`, `{key}`, `{model}` and
    `{prompt}`."""
    environment: Annotated[dict[FieldName, Argument], Meta(max_length=64)] = {}
    """Added to its environment."""

    @classmethod
    def of(cls, named: Harness | str) -> Harness:
        """Return the harness for a job's `harness`: NAME, NAME==VERSION or a `Harness`."""
        if isinstance(named, Harness):
            return named
        name, _, version = named.partition("==")
        return cls(name, version)


class Outside(Part, frozen=True, kw_only=True):
    """A program outside of the service that leads a rollout (see `docs/outside-programs.md`)."""

    key_sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """SHA-256 of the key that each call presents. The service never has the key."""
    idle_s: Seconds = 600.0
    """How long the program may make no call before the rollout ends with `phase_timeout`."""
    train_on: TrainOn = ("all",)
    """As in `Harness`."""


class McpServer(Part, frozen=True, kw_only=True):
    """An MCP server whose tools the policy gets (see `docs/mcp.md`): a program of the job's sandbox, or an address."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,32}\Z")]
    """Unique in the job; put before the names of its tools where names collide."""
    command: Annotated[tuple[Argument, ...], Meta(max_length=64)] = ()
    """Starts it in the job's sandbox; it speaks over its standard input and output."""
    environment: Annotated[dict[FieldName, Argument], Meta(max_length=64)] = {}
    """Added to the sandbox's environment for `command`."""
    directory: PathText = ""
    """Where `command` starts; empty: where all commands of the sandbox do."""
    url: PathText = ""
    """The address of a server that runs already, which speaks streamable HTTP: one of the service's `[[mcp]]`."""
    tools: Annotated[tuple[ShortText, ...], Meta(max_length=256)] = ()
    """Names of the tools to offer; empty: all."""
    start_s: Seconds = 60.0
    """Longest time of its start."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError(f"MCP server {self.name}: give one of command and url")
        if self.url and (self.environment or self.directory):
            raise ValueError(f"MCP server {self.name}: environment and directory are for a command")


ModelRole = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\"\\]{1,96}\Z")]
"""A task's or a program's own name for a model that it talks to, such as `user` or `openai/gpt-4.1`."""


class NamedModel(Part, frozen=True):
    """A model that a rollout talks to, and how that one is sampled."""

    name: ModelName
    """`policy`, another `name` of `[[backends]]`, or an endpoint of the service's environment (`docs/models.md`)."""
    sampling: Sampling | None = None
    """None: as the job's policy."""

    @classmethod
    def of(cls, named: NamedModel | str) -> NamedModel:
        """Return the model for a value of a job's `models`."""
        return cls(named) if isinstance(named, str) else named


RecordAsked = Annotated[
    str,
    in_form(
        r"^(top_logprobs:[1-9][0-9]{0,3}|sampling_mask|experts)\Z",
        "the name of a record: top_logprobs:K with a number K, sampling_mask or experts",
    ),
]
RecordName = Literal["top_logprobs", "sampling_mask", "experts", "teacher"]
TeacherAsked = Annotated[
    str,
    in_form(
        r"^([A-Za-z0-9_][A-Za-z0-9._-]{0,63}(:([1-9]|[1-5][0-9]|6[0-4]))?)?\Z",
        "the name of a model, or MODEL:K with a number K from 1 to 64",
    ),
]
ArrayType = Literal["int32", "float32", "uint8", "uint16"]


class Job(Part, frozen=True, kw_only=True):
    """One rollout of one task instance."""

    task: Identifier
    """Names the `AgentHandler`."""
    instance: dict[str, Any]
    """The handler's fields: plain data."""
    job_id: JobIdentifier = msgspec.field(default_factory=new_id)
    group_id: Identifier | Literal[""] = ""
    """Shared by the jobs of one prompt."""
    sampling: Sampling = Sampling()
    episode: EpisodeLimits = EpisodeLimits()
    limits: PhaseLimits = PhaseLimits()
    backend_wait_s: Seconds = 60.0
    """How long RUN may wait for an inference backend before the job ends with `no_backend`. Neither this wait nor RUN's
    limit runs while a backend is starting."""
    stage_wait_s: Seconds = 60.0
    """How long a phase may wait while no live stage process can run it before the job ends with `no_stage`."""
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    """How many times the job is started before a loss is final."""
    template_arguments: Annotated[dict[FieldName, Any], Meta(max_length=32)] = {}
    """Arguments of the model's chat template, such as `{"enable_thinking": false}`; they override the backend's."""
    harness: Harness | HarnessName | None = None
    """The harness that leads the rollout, or its name (`codex`, `codex==0.169.0`); None: the service's agent loop. The
    task prepares and judges in both cases."""
    outside: Outside | None = None
    """An outside program leads the rollout in place of `harness`, at the address in `JobTrace`. Clients fill it in: see
    `RolloutClient.endpoint`."""
    model: ModelName = POLICY
    """The model that takes the job's own turns, which are trained on: a `name` of `[[backends]]`. A service may train
    several models, each with weight versions of its own."""
    models: Annotated[dict[ModelRole, NamedModel | ModelName], Meta(max_length=16)] = {}
    """Models that the rollout talks to besides `model`, by the task's or the program's own names for them:
    `{"user": "sim"}`. Their turns are context for the policy and are not trained on, unless the task says so."""
    pin: bool = False
    """If an adapter takes its turns, an attempt ends on the version that it began with, which stays loaded for it; else
    the next turn goes to the newest version."""
    mcp: Annotated[tuple[McpServer, ...], Meta(max_length=16)] = ()
    """MCP servers whose tools the policy gets in addition to the task's, in a session of this rollout's own."""
    record: Annotated[tuple[RecordAsked, ...], Meta(max_length=3)] = ()
    """What the trajectory's `records` hold beside its tokens (see `docs/records.md`): `top_logprobs:K`,
    `sampling_mask`, `experts`. The service refuses what the policy's engines cannot give."""
    teacher: TeacherAsked = ""
    """The model that scores the trajectory when it has its reward, as `teacher` or, with the K likeliest tokens at each
    place (1 to 64), as `teacher:K`; its scores are the record `teacher` (see `docs/models.md`). Empty: none."""
    traceparent: str = ""
    """The W3C trace context of the parent of the job's span (see `docs/traces.md`): the client fills in that of the
    current OpenTelemetry span. Malformed values are ignored."""


SandboxKind = Identifier
"""A sandbox implementation, by the name that an installed package registers as an entry point in `prorl_zmq.sandboxes`,
such as `apptainer`, `bubblewrap`, or `process`, which isolates nothing. Checked when a sandbox is made."""


class SandboxHandle(Part, frozen=True):
    """A sandbox's location as plain data, with which another process of the same node can attach to it."""

    kind: SandboxKind
    path: PathText
    """The sandbox's own directory on its node."""
    node: Identifier = "local"


LogprobsMode = Literal["processed_logprobs", "raw_logprobs", "tempered_logprobs"]
"""The distribution of the log-probs, in vLLM's words: the sampled one, after temperature, top-p, top-k and min-p, or
the model's own at temperature 1, before all of them; SGLang's are after the temperature only."""


class BlockHandle(Part, frozen=True, kw_only=True):
    """The location of a trajectory's block on the node that keeps it (`keep = "node"`). The handle is a capability."""

    node: Identifier
    block_id: JobIdentifier
    """A random name, disclosed only with the result."""
    checksum: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    """CRC-32 of the block; of records, of their sums (see `blocks.block_checksum`)."""
    endpoint: PathText
    """Where the node's broker serves blocks."""
    curve_key: AnnouncedKey = ""
    socket: PathText = ""
    """The Unix socket at which the node's broker serves blocks to programs on its machine."""
    oldest_version: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    """The oldest weight version of a token; -1: nothing was generated."""
    records_at: Annotated[int, Meta(ge=0, le=2**40)] = 0
    """The byte of the block at which records begin (see `block_checksum`); 0: there are none."""


STEPS_LIMIT = 512
"""Most steps of one job."""


class StepTokens(Part, frozen=True, array_like=True):
    """The tokens of one generation."""

    prompt: Annotated[int, Meta(ge=0)]
    cached: Annotated[int, Meta(ge=0)] = 0
    """Tokens of the prompt found in the engine's prefix cache."""
    again: Annotated[int, Meta(ge=0)] = 0
    """Tokens of the prompt that had been cached, with the same weights, and were computed again."""
    generated: Annotated[int, Meta(ge=0)] = 0


class Step(Part, frozen=True, array_like=True):
    """One timed step of an episode."""

    name: MeasureName
    """As in `Result.timings`: `engine`, `chat`, `tool.bash`, …"""
    turn: Annotated[int, Meta(ge=0)]
    """The policy's turn of this step, or the one before it; 0: before the first turn."""
    start_s: Annotated[float, Meta(ge=0)]
    """Seconds after RUN began, on the clock of its node."""
    seconds: Annotated[float, Meta(ge=0)]
    tokens: StepTokens | None = None
    """Of a generation that ended; None: it is another step."""


Steps = Annotated[tuple[Step, ...], Meta(max_length=STEPS_LIMIT)]


MAIN = "main"
"""The conversation of a rollout that names none."""


class ConversationPart(Part, frozen=True):
    """One conversation of a rollout, and the segments of the trajectory that are its own."""

    name: Identifier
    """Unique within the rollout."""
    first_segment: Annotated[int, Meta(ge=0, le=SEGMENTS_LIMIT)]
    """The index of its first segment. Conversations follow each other in the arrays."""
    segments: Annotated[int, Meta(ge=0, le=SEGMENTS_LIMIT)]
    """0: none of its tokens are in the arrays."""
    trained: bool = True
    """False: context only, such as a simulated user."""
    reward: float | None = None
    """Its own reward, from EVAL; None: the rollout's reward."""
    stop_reason: ShortText = ""
    """Why it stopped, as in `Result`."""
    model: ModelName | Literal[""] = ""
    """The model that took its turns; empty: the job's own. The other fields below are only for another model."""
    logprobs_mode: LogprobsMode | Literal[""] = ""
    """The distribution of its log-probs."""
    oldest_version: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    """The oldest weight version of its tokens in the arrays; -1: none was generated."""


Conversations = Annotated[tuple[ConversationPart, ...], Meta(max_length=CONVERSATIONS_LIMIT)]
TurnIndex = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TurnRewards = Annotated[tuple[tuple[TurnIndex, float], ...], Meta(max_length=TURN_REWARDS_LIMIT)]


class ArrayForm(Part, frozen=True, array_like=True):
    """An array of a record, as it lies in a frame: contiguous, little-endian."""

    name: Annotated[str, Meta(pattern=r"^[a-z_]{1,32}\Z")]
    dtype: ArrayType
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], ...], Meta(min_length=1, max_length=4)]


class RecordForm(Part, frozen=True, array_like=True):
    """A record behind the five arrays of a trajectory's block (see `data.records`)."""

    name: RecordName
    runs: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    """How many ranges of tokens its rows are of."""
    arrays: Annotated[tuple[ArrayForm, ...], Meta(min_length=1, max_length=4)]
    complete: bool = True
    """Whether all rows are there that training on the job's own model needs (see `data.records.needed_rows`)."""


RecordForms = Annotated[tuple[RecordForm, ...], Meta(max_length=4)]
RecordsDropped = Annotated[dict[RecordName, ShortText], Meta(max_length=4)]


class Result(Part, frozen=True, kw_only=True):
    """Everything about an ended job except its arrays."""

    job_id: JobIdentifier
    task: Identifier
    outcome: Outcome
    group_id: Identifier | Literal[""] = ""
    attempt: Attempt = 1
    reward: float | None = None
    """None unless the outcome is `completed`, or the agent itself caused the failure (see `stages.handler.Failure`)."""
    error: ErrorInfo | None = None
    stop_reason: str = ""
    """Why the episode stopped (see `stages.episode.StopReason`); empty if RUN did not end."""
    model: ModelName = POLICY
    """The model of its own turns, as in the job: the weight versions of its tokens are this model's, except in the
    `conversations` that name another model."""
    agent: Identifier | Literal[""] = ""
    """The conversation's name in a trajectory that `Trajectory.split` returned; else empty."""
    backend: str = ""
    """The backend that the job was assigned to."""
    metrics: dict[MeasureName, float] = {}
    """Counts and measures of the agent loop (`turns`, `tool_calls`, …) and those of the handler."""
    timings: dict[MeasureName, float] = {}
    """Seconds per phase (`init`, `run`, `eval`, `score`), queue (`init_queue`, …), tool (`tool.bash`), in the `engine`,
    and of the waits for a `backend` and for `room` in a full one, if these were long."""
    steps: Steps = ()
    """The timed steps of RUN, ordered by their ends, the first if there are very many; without those under a
    millisecond."""
    notes: dict[MeasureName, str] = {}
    """Text from EVAL for people: a judge's verdict, a report of tests, a patch."""
    tokens: Annotated[int, Meta(ge=0)] = 0
    """T: the length of the trajectory's arrays."""
    turns: Annotated[int, Meta(ge=0)] = 0
    """n: the number of its turns."""
    segments: Segments = ()
    """The array offset of each segment after the first; each segment is a prompt of its own (see `ChatSettings`)."""
    conversations: Conversations = ()
    """The conversations, in the order of their segments; empty: one, `main`, with all segments and the reward."""
    turn_rewards: TurnRewards = ()
    """The turns with a reward of their own: the index in `turns`, ascending, and the reward, which is a part of the
    conversation's reward."""
    logprobs_mode: LogprobsMode | Literal[""] = ""
    """The distribution of the log-probs; empty if nothing was generated."""
    records: RecordForms = ()
    """The records behind the arrays, in the order of the block."""
    records_dropped: RecordsDropped = {}
    """Records that the job asked for and that are not there, with the reason of each."""
    kept: BlockHandle | None = None
    """The block's location, if a node keeps it; None: the broker keeps it, or there is none."""
