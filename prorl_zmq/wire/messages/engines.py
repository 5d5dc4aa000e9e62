"""Engine hosts: requests of stage processes and the backend broker, and the replies."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from .base import (
    FOR_OPERATORS,
    FOR_STAGES,
    FOR_TRAINERS,
    POLICY,
    Digest,
    Identifier,
    JobIdentifier,
    ModelName,
    Part,
    PathText,
    Refused,
    Reply,
    Request,
    Roles,
    Seconds,
    ShortText,
    WeightVersion,
)
from .jobs import ArrayForm, RecordAsked, Sampling
from .relay import WeightRelay

ENGINES_S = 30.0
"""How long the backend broker waits for engine hosts, unless a request says otherwise."""
UPDATE_LIMIT_S = 600.0
"""Default limit of an update, after which engines consider the trainer dead."""

UpdateStep = Literal["fetch", "begin", "transfer", "load", "end", "cancel", "set", "remove"]
UpdateMode = Literal["keep", "drain", "abort"]
"""What happens to running generations when new weights come. `keep`: they pause, and resume with the new weights.
`drain`: they end first, with the old ones, while new requests wait. `abort`: they end at once, and the agent loop has
the rest of the turn generated with the new ones."""

TransferCall = Literal["init", "update", "finish", "leave"]
"""Calls of vLLM's weight transfer, in their order. `init`: join the trainer's group. `update`: take tensors that the
trainer sends meanwhile; there may be several. `finish`: all have come. `leave`: leave the group."""
TRANSFER_INFO_CHARS = 8 * 2**20


class Receiver(Part, frozen=True):
    """A backend in a trainer's group."""

    backend_id: Identifier
    rank: Annotated[int, Meta(ge=1, le=65535)]
    """Of its first process. The trainer has rank 0."""


class Generate(Request, frozen=True, kw_only=True):
    """Continue a prompt. Further frame: its ids, int32 [P]."""

    roles: ClassVar[Roles] = FOR_STAGES
    job_id: JobIdentifier
    sampling: Sampling
    stop_token_ids: tuple[int, ...] = ()
    """The turn ends after any of these; the one that ended it is part of the answer."""
    life: Annotated[str, Meta(max_length=64)] = ""
    """The expected life of the host, since a restarted host may have older weights. Empty: any."""
    traceparent: ShortText = ""
    """The W3C trace context of the requesting span; empty: none."""
    record: Annotated[tuple[RecordAsked, ...], Meta(max_length=3)] = ()
    """As in `Job`."""
    rows_known: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """The rows of experts that the caller has: the engine gives those of the tokens from this one on."""
    model: ModelName | Literal[""] = ""
    """The model of an adapter that the host has loaded. Empty, or the backend's `name`: the engine's own weights."""
    weight_version: WeightVersion | None = None
    """Of the adapter; None: the version that was loaded last."""
    age_s: Annotated[float, Meta(ge=0)] = 0.0
    """Since the job's group began, or the job got its first backend: hosts park the turns of the newest groups."""


class Score(Request, frozen=True, kw_only=True):
    """Score a text: the log-probs of its tokens at temperature 1. Further frame: its ids, int32 [T]."""

    roles: ClassVar[Roles] = FOR_STAGES
    job_id: JobIdentifier
    top: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """How many of the likeliest tokens to list for each position."""
    life: Annotated[str, Meta(max_length=64)] = ""
    """As in `Generate`, like `model` and `weight_version`."""
    model: ModelName | Literal[""] = ""
    weight_version: WeightVersion | None = None


class Abort(Request, frozen=True):
    """Stop the generation or the scoring that `request_id` began; neither gets a reply."""

    roles: ClassVar[Roles] = FOR_STAGES


class EngineHealth(Request, frozen=True):
    """Ask whether the engine can serve."""

    roles: ClassVar[Roles] = FOR_STAGES


class WeightUpdate(Request, frozen=True):
    """Do one step of an update of a model's weights. The backend broker forwards it to the model's engine hosts.

    | step | an engine host |
    |---|---|
    | `fetch` | fetches the weights at `path`, and generates meanwhile; sent by the broker before a `load` |
    | `begin` | stops generating, as `mode` says; for the version already begun, only restarts `limit_s` |
    | `transfer` | does the `call` of vLLM's own weight transfer, between `begin` and `end`; only the `receivers` |
    | `load` | loads the weights at `path` and serves them: begin, load and end in one |
    | `end` | resumes with the weights that the trainer has put into the engine |
    | `cancel` | resumes with the weights that it has; without a `begin` it does nothing |
    | `set` | calls its weights `weight_version` from the next token on: they were changed by other means |
    | `remove` | unloads all versions of an adapter but those to `keep`, once their generations have ended |

    An engine host replies with `EngineReady` after the step. The backend broker replies after all hosts have, to a
    `load` with `WeightsServed`, otherwise with `Done`; to a `transfer` as soon as one host has failed. From `begin` on
    it assigns no job to a backend that does not serve this version, and it cancels a `begin` if one engine cannot stop.
    A `load` begins when all hosts have fetched the weights, or half of `timeout_s` is over. The front door accepts
    `load`, `end` and `set`, after the backend broker has replied: batches drop rollouts that are too old for the
    version. It accepts `remove` before the backend broker gets it, and `cancel` after the backend broker has refused
    that.

    For an adapter, a `model` other than the backend's `name`, there are only `load` and `remove`: its running
    generations end with the version that they began with, whatever the `mode`.
    """

    roles: ClassVar[Roles] = FOR_TRAINERS | FOR_OPERATORS
    step: UpdateStep
    weight_version: WeightVersion
    path: PathText = ""
    """For `fetch` and `load`: the path of the weights, as engine hosts see it."""
    mode: UpdateMode = "keep"
    """For `begin` and `load`."""
    limit_s: Seconds = UPDATE_LIMIT_S
    """For `begin`: after this time without an end or cancel, engines resume with the version that they had."""
    timeout_s: Seconds = ENGINES_S
    """How long the backend broker waits for engine hosts."""
    backend_id: Identifier | None = None
    """For `set`: only this backend, without asking its host; valid until the host's heartbeats report a change."""
    trainer: Identifier | Literal[""] = ""
    """The session of the trainer that holds the weights from then on; empty: an operator."""
    take_over: bool = False
    """Take the weights from another trainer, whose updates are refused from then on (otherwise: `weights_held`)."""
    model: ModelName = POLICY
    """With `backend_id`, the model of that backend counts instead."""
    base: ModelName | Literal[""] = ""
    """For the first `load` of an adapter: the `name` of the backends that it adapts; empty: the only one with slots."""
    keep: Annotated[tuple[WeightVersion, ...], Meta(max_length=4096)] = ()
    """Versions of an adapter that stay loaded. The backend broker sets them, for jobs that end on their version."""
    digest: Digest = ""
    """Expected digest of the weights' content, or of an adapter's files; others are rejected. Set by the trainer, or by
    the backend broker."""
    relay: WeightRelay | None = None
    """For `fetch` and `load`: where hosts fetch weights that they do not see at `path`; None: nowhere."""
    call: TransferCall | None = None
    """For `transfer`."""
    info: Annotated[str, Meta(max_length=TRANSFER_INFO_CHARS)] = ""
    """For `transfer`: JSON that vLLM's method expects. Hosts add their rank to a `rank_offset`."""
    receivers: Annotated[tuple[Receiver, ...], Meta(max_length=4096)] = ()
    """For `transfer`: all backends of the group; a host gets its own entry."""
    transferred: bool = False
    """For `end`: engines that took no whole transfer since the `begin` continue with the weights that they had."""


class VersionSpan(Part, frozen=True):
    """Generated tokens from `start` up to `end` (exclusive) have weights `weight_version`."""

    weight_version: int
    start: int
    end: int


FinishReason = Literal["stop", "length", "abort"]
"""`length`: the turn or the engine's context was full. `abort`: new weights came (see `UpdateMode`)."""


class Generated(Reply, frozen=True, kw_only=True):
    """Answer to `Generate`. Further frames: the ids, int32 [G], their log-probs, float32 [G], and `arrays`."""

    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]
    cached_tokens: Annotated[int, Meta(ge=0)] = 0
    """Prompt tokens found in the engine's prefix cache."""
    again_tokens: Annotated[int, Meta(ge=0)] = 0
    """Prompt tokens that had been cached and were computed again, as in `EngineLoad`."""
    parked_s: Annotated[float, Meta(ge=0)] = 0.0
    """How long the host held the turn back (see `Parked`)."""
    arrays: Annotated[tuple[ArrayForm, ...], Meta(max_length=8)] = ()
    """The arrays of the records, one frame each (see `wire.records`)."""


class Parked(Reply, frozen=True):
    """Answer to a `Generate` whose turn the host holds back, since the engine's KV cache is full.

    The final reply follows. The turn's time limits do not count meanwhile.
    """

    limit_s: Seconds
    """The turn continues after this time at the latest."""


class Scored(Reply, frozen=True, kw_only=True):
    """Answer to `Score`. Three further frames.

    They are the log-probs of the tokens, float32 [T]; for each position the likeliest tokens, int32 [T, top]; and their
    log-probs, float32 [T, top]. Nothing comes before the first token: its row has log-probs 0 and ids -1.
    """

    weight_version: WeightVersion


class UpdateTimes(Part, frozen=True):
    """What an update cost one engine, in seconds and bytes."""

    fetch_s: float = 0.0
    """Fetching the weights, while the engine generated."""
    load_s: float = 0.0
    """The engine's own update: its check of the weights, and the pause; of an adapter, its copy and load, without a
    pause."""
    pause_s: float = 0.0
    """Of that, from the beginning of its stop until it generated with the new weights."""
    read_bytes: int = 0
    """Read by the fetch where the trainer wrote the weights."""


class EngineReady(Reply, frozen=True):
    """Answer to `EngineHealth`, and to `WeightUpdate` once it is done."""

    weight_version: WeightVersion
    in_flight: int = 0
    """Running generations."""
    digest: Digest = ""
    """After the `load` of an adapter: the SHA-256 of its files as the host copied them, in hexadecimal."""
    times: UpdateTimes | None = None
    """After a `fetch` or `load` of weights: what it cost."""


class WeightsServed(Reply, frozen=True):
    """Answer of the backend broker to a `load` that all backends did."""

    backends: dict[Identifier, UpdateTimes]
    """What it cost each of them, unless its host does not say."""


AnyEngineRequest = Generate | Score | Abort | EngineHealth | WeightUpdate
AnyEngineReply = Generated | Parked | Scored | EngineReady | Refused
