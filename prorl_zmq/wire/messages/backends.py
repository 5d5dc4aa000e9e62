"""Backend broker: requests of stage processes, engine hosts and clients, and its replies.

The broker answers a `WeightUpdate` after all engine hosts have, within one deadline.
"""

from __future__ import annotations

import zlib
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from ..records import RECORD_TOP_LIMIT
from .base import (
    FOR_ALL,
    FOR_OPERATORS,
    FOR_STAGES,
    FOR_TRAINERS,
    POLICY,
    AnnouncedKey,
    Attempt,
    Count,
    CurveKey,
    Done,
    HolderIdentifier,
    Identifier,
    JobIdentifier,
    KeyRole,
    ModelName,
    Part,
    Refused,
    Reply,
    Request,
    Roles,
    Seconds,
    ShortText,
    WeightVersion,
    holder,
)
from .chat import ChatSettings
from .engines import WeightsServed, WeightUpdate
from .jobs import LogprobsMode, RecordName
from .relay import CopyState

TAKE_BACK_S = 5.0
"""How long after its `timeout_s` a `WeightUpdate` may be answered: a failed begin is cancelled first."""
STARTS_LIMIT = 1024
"""Most engines of one report."""

LoadedVersions = Annotated[tuple[WeightVersion, ...], Meta(min_length=1, max_length=4096)]
Adapters = Annotated[dict[ModelName, LoadedVersions], Meta(max_length=4096)]
"""The adapters that an engine host has loaded: the versions of each model. Requests without a version get the last."""


Rollouts = Annotated[int, Meta(ge=1, le=2**31 - 1)]
"""The number of rollouts that an engine takes: with 0, jobs would wait for ever."""


class Backend(Part, frozen=True, kw_only=True):
    """An inference engine that answers token ids with token ids."""

    backend_id: Identifier
    endpoint: str
    """Where the engine host's ROUTER is bound."""
    curve_key: AnnouncedKey = ""
    model: str = ""
    """The model name that the engine reports."""
    name: ModelName = POLICY
    """The model that it serves, by the service's name: only jobs' requests for this name reach it."""
    frozen: bool = False
    """It takes no weight updates, and its version is not compared with the wanted one."""
    chat: ChatSettings = ChatSettings()
    weight_version: WeightVersion = 0
    node: Identifier = "local"
    """Jobs whose RUN is on this node are preferred."""
    weight: Annotated[float, Meta(gt=0, le=1_000_000)] = 1.0
    """Relative load: a backend with weight 2 gets twice as many jobs."""
    max_in_flight: Count = 256
    """Jobs from which it counts as full: others are preferred, and a group is split."""
    context_tokens: Annotated[int, Meta(ge=0)] = 0
    """Most tokens of a prompt and its answer together; 0: not known."""
    logprobs_mode: LogprobsMode = "processed_logprobs"
    records: Annotated[tuple[RecordName, ...], Meta(max_length=3)] = ()
    """The records that its engine gives (see `Job.record`)."""
    top_limit: Annotated[int, Meta(ge=1, le=RECORD_TOP_LIMIT)] = RECORD_TOP_LIMIT
    """The largest number of `top_logprobs` that its engine gives, if it gives them."""
    unrecorded: Annotated[dict[RecordName, Annotated[str, Meta(max_length=256)]], Meta(max_length=3)] = {}
    """Why its engine does not give other records."""
    scores: bool = False
    """Whether it answers `Score`."""
    adapter_slots: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Adapters whose generations run at the same time; 0: it takes none."""
    adapters: Adapters = {}
    transfer: ShortText = ""
    """The backend of vLLM's weight transfer that its engine was started with, such as `nccl`; empty: none."""
    transfer_ranks: Annotated[int, Meta(ge=0, le=65535)] = 0
    """How many of its engine's processes join a trainer's group."""
    life: Annotated[str, Meta(max_length=64)] = ""
    """An identifier of its host's current life, which rejects requests for another life. Empty: no engine host."""
    version: ShortText = ""
    """Of its host's prorl-zmq package; empty: no engine host."""
    warning: Annotated[str, Meta(max_length=512)] = ""
    """A limit of how its model's output is read, such as that its tool calls are not read."""


class EngineLoad(Part, frozen=True):
    """What an engine host reported in its last heartbeat."""

    running: Annotated[int, Meta(ge=0)] = 0
    """Running generations."""
    tokens_per_s: Annotated[float, Meta(ge=0)] = 0.0
    """Generated tokens per second since the previous heartbeat, of the turns that have ended in it."""
    prompt_tokens: Annotated[int, Meta(ge=0)] = 0
    """Tokens of all prompts since the host started."""
    cached_tokens: Annotated[int, Meta(ge=0)] = 0
    """Prompt tokens that were found in the prefix cache."""
    generated_tokens: Annotated[int, Meta(ge=0)] = 0
    memory_bytes: Annotated[int, Meta(ge=0)] = 0
    """Resident memory of the host's process and its children; 0: not known."""
    kv_tokens: Annotated[int, Meta(ge=0)] = 0
    """Tokens that the engine's KV cache holds; 0: it reports nothing of it."""
    kv_used: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of it that running requests use, smoothed over a minute. Cached prefixes of others do not count."""
    queued: Annotated[int, Meta(ge=0)] = 0
    """Requests that wait in the engine."""
    preempted: Annotated[int, Meta(ge=0)] = 0
    """Preemptions since the host started."""
    again_tokens: Annotated[int, Meta(ge=0)] = 0
    """Prompt tokens that had been cached and were computed again."""
    parked: Annotated[int, Meta(ge=0)] = 0
    """Turns that the host holds back now, since the KV cache is full. They are not running."""
    lacks_events: bool = False
    """Whether its host is to keep an index of the prefix cache, and the engine publishes no usable events."""


class BackendStatus(Part, frozen=True, kw_only=True):
    """One backend, as the backend broker sees it."""

    backend: Backend
    state: Literal["ready", "draining", "updating", "behind", "probation", "unwell"]
    """`updating`: it does not serve the new weights yet, so it gets no jobs. `behind`: it serves other weights than the
    trainer announced last, so it gets no jobs; `problem` says what to do. `probation`: a job could not reach it, or its
    generation failed there; single jobs try it, at growing intervals, until one succeeds. `unwell`: its host reports
    that the engine cannot serve now, so it gets no jobs."""
    problem: str = ""
    """Why it is behind, unwell or on probation."""
    adapter_problems: dict[ModelName, str] = {}
    """Why it gets no jobs of an adapter, by the adapter's model."""
    next_try_s: float | None = None
    """Seconds until a job may try a backend on probation; 0: the next job does."""
    in_flight: int
    """Current assignments."""
    assigned: int
    """Assignments since it was added."""
    room: Annotated[int, Meta(ge=0)] | None = None
    """Assignments from which it gets no new rollouts; None: there is no such number (see `BackendAlive.room`). 0: the
    broker has restarted, and does not know yet which it has."""
    load: EngineLoad | None = None
    """None: it sends no heartbeats."""
    copy: CopyState | None = None
    """As in `BackendAlive`."""
    fetching: WeightVersion | None = None
    """The version that its host fetches now, before the engine loads it; it gets jobs meanwhile."""
    silent_s: float | None = None
    """Seconds since its last heartbeat; None: it sends none."""
    lease_s: float = 0.0
    """Seconds of silence after which it is removed; 0: it sends no heartbeats and is not removed."""


class AdapterModel(Part, frozen=True):
    """An adapter that was published as a model of its own."""

    model: ModelName
    base: ModelName
    """The `name` of the backends whose weights it adapts."""
    weight_version: WeightVersion
    """The current version: jobs go to backends that have it."""
    in_flight: Annotated[int, Meta(ge=0)] = 0
    """Current assignments."""


class EngineStart(Part, frozen=True):
    """An engine that is expected to register as a backend, or whose start failed."""

    backend_id: Identifier
    state: Literal["starting", "failed"]
    """`failed`: it exited before it was ready, and is not restarted."""
    problem: Annotated[str, Meta(max_length=1000)] = ""
    """Why it failed, or exited the last time."""
    name: ModelName = POLICY
    """As in `Backend`."""


class Assign(Request, frozen=True, kw_only=True):
    """Assign a backend of a model to a job; a job that has one gets the same. The reply waits until one is available.

    A job may hold one backend of each model.
    """

    roles: ClassVar[Roles] = FOR_STAGES
    owner: Identifier
    """The stage process that runs the job: when it falls silent its assignments are released."""
    job_id: JobIdentifier
    attempt: Attempt
    wait_s: Seconds
    group_id: Identifier | Literal[""] = ""
    """The job's group, for `affinity = "group"`."""
    node: Identifier = "local"
    """Where the job's RUN is."""
    leaving: Identifier | Literal[""] = ""
    """The backend that the job has and cannot continue with: assign another, or wait until that one may be tried."""
    model: ModelName = POLICY
    named: bool = True
    """Whether the job names the model, so that the front door has checked it. If not, a model that the service does not
    have is refused at once."""
    pin: bool = False
    """As `Job.pin`, if the model is an adapter."""
    pinned: WeightVersion | None = None
    """The version that the attempt is pinned to already."""

    @property
    def holder(self) -> str:
        return self.job_id if self.model == POLICY else holder(self.job_id, self.model)


class GenerationFailed(Request, frozen=True):
    """Put a backend on probation: a job could not reach it, or its generation failed."""

    roles: ClassVar[Roles] = FOR_STAGES
    job_id: JobIdentifier
    backend_id: Identifier
    problem: Annotated[str, Meta(min_length=1, max_length=1000)]
    life: Annotated[str, Meta(max_length=64)] = ""
    """The backend's life at the assignment; a later life is not put on probation."""


class Release(Request, frozen=True):
    """End a job's assignment to a backend of a model; ignored if a newer attempt has it."""

    roles: ClassVar[Roles] = FOR_STAGES
    job_id: JobIdentifier
    attempt: Attempt
    served: Annotated[int, Meta(ge=0)] = 0
    """As in `HeldAssignment`."""
    model: Annotated[str, Meta(pattern=r"^(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,63})?\Z")] = POLICY
    """Empty: the assignments of all models."""
    context_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """The longest prompt of the attempt with its answer; 0: not known."""


class HeldAssignment(Part, frozen=True, array_like=True):
    """A job's assignment, as its stage process has it."""

    attempt: Attempt
    backend_id: Identifier | None = None
    """None: the job waits for one."""
    served: Annotated[int, Meta(ge=0)] = 0
    """Generations that the backend completed for the job."""
    pinned: WeightVersion | None = None
    """As in `Assigned`."""


class OwnerAlive(Request, frozen=True):
    """Keep the assignments of a stage process, and list those that it still needs, or those that changed.

    A broker whose assignments differ, such as a restarted one, answers with `NameAll` and learns where each job is.
    """

    roles: ClassVar[Roles] = FOR_STAGES
    owner: Identifier
    jobs: dict[HolderIdentifier, HeldAssignment] = {}
    digest: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    """The sum of `assignment_digest` over all jobs with a backend. None: `jobs` is complete, waiting jobs included."""


def assignment_digest(holder_id: str, attempt: int, backend_id: str) -> int:
    """Return an assignment's term in its owner's digest."""
    return zlib.crc32(f"{holder_id} {attempt} {backend_id}".encode())


class AddBackend(Request, frozen=True):
    """Register a backend; refused if a live one has its id at another endpoint."""

    roles: ClassVar[Roles] = FOR_OPERATORS | FOR_STAGES
    backend: Backend
    heartbeats: bool = False
    """The backend sends `BackendAlive`, and is removed when it falls silent."""
    room: Rollouts | None = None
    """As in `BackendAlive`."""
    copy: CopyState | None = None
    """As in `BackendAlive`."""


class BackendAlive(Request, frozen=True):
    """Heartbeat of an engine host; refused with `unknown_backend` if the host must register (again)."""

    roles: ClassVar[Roles] = FOR_STAGES
    backend_id: Identifier
    weight_version: WeightVersion
    load: EngineLoad = EngineLoad()
    problem: Annotated[str, Meta(max_length=1000)] = ""
    """Why the engine cannot serve now; empty: it can."""
    adapters: Adapters = {}
    room: Rollouts | None = None
    """The most rollouts that the engine takes, by its KV cache: beyond it, jobs without a backend wait. None: it
    reports nothing of its KV cache, and jobs do not wait."""
    copy: CopyState | None = None
    """Of the model's weights; None: its engine reads them where the trainer wrote them."""
    resident: Annotated[tuple[JobIdentifier, ...], Meta(max_length=1024)] | None = None
    """The jobs whose first prompts are in the prefix cache, of those that it served last; None: as it said last, or it
    keeps no index."""


class BackendHeld(Reply, frozen=True):
    """Answer to `BackendAlive` with a room: the rollouts of the backend, from which the host decides on its room."""

    rollouts: Annotated[int, Meta(ge=0)] = 0
    """Assignments that the backend has now."""
    ended: Annotated[int, Meta(ge=0)] = 0
    """Assignments that ended after a generation, since the backend registered."""
    known: Annotated[int, Meta(ge=0)] = 0
    """Ended rollouts of the backend's model whose contexts the mean counts."""
    mean_tokens: Annotated[float, Meta(ge=0)] = 0.0
    """The mean of `Release.context_tokens` over these."""


class DrainBackend(Request, frozen=True):
    """Assign no more jobs to a backend; existing assignments stay."""

    roles: ClassVar[Roles] = FOR_OPERATORS | FOR_STAGES
    backend_id: Identifier


class RemoveBackend(Request, frozen=True):
    """Remove a backend and its assignments."""

    roles: ClassVar[Roles] = FOR_OPERATORS | FOR_STAGES
    backend_id: Identifier


class ClearBackends(Request, frozen=True):
    """Remove all backends."""

    roles: ClassVar[Roles] = FOR_OPERATORS


class ListBackends(Request, frozen=True):
    """Describe all backends."""

    roles: ClassVar[Roles] = FOR_ALL


class ListModels(Request, frozen=True):
    """Name the models that backends serve, or will once they have started."""

    roles: ClassVar[Roles] = FOR_ALL


class ReportStarts(Request, frozen=True):
    """List the engines that are not ready; while one is `starting`, jobs' waits for a backend do not expire.

    The process that starts engines sends this every second while one is not ready. It replaces the owner's last report
    and expires after the lease. An engine that registers is no longer starting.
    """

    roles: ClassVar[Roles] = FOR_STAGES
    owner: Identifier
    engines: Annotated[tuple[EngineStart, ...], Meta(max_length=STARTS_LIMIT)] = ()


class HoldWeights(Request, frozen=True):
    """Renew the lease of a trainer that has sent a `WeightUpdate` of a model, or end it."""

    roles: ClassVar[Roles] = FOR_TRAINERS | FOR_OPERATORS
    trainer: Identifier
    goodbye: bool = False
    model: ModelName = POLICY


class ListKeys(Request, frozen=True):
    """List the keys that the service accepts, for an engine host or a trainer whose list is of this state."""

    roles: ClassVar[Roles] = FOR_STAGES | FOR_TRAINERS
    state: str = ""


class Assigned(Reply, frozen=True):
    """Answer to `Assign`."""

    backend: Backend
    pinned: WeightVersion | None = None
    """The version of the model's adapter that stays loaded for the attempt; None: it goes by the current one."""
    group_age_s: Annotated[float, Meta(ge=0)] = 0.0
    """Since the group's first job was admitted to an engine that reports on its KV cache; 0: none was, or not known."""
    room_wait_s: Annotated[float, Meta(ge=0)] = 0.0
    """How long the job waited while ready backends had no room for it."""


class WaitLonger(Reply, frozen=True):
    """Answer to an `Assign` while its wait does not expire: a backend is starting, or a ready one has no room.

    The final reply follows. A stage process that receives none resends the same request.
    """


class NameAll(Reply, frozen=True):
    """Answer to an `OwnerAlive` whose digest differs from the broker's: list all assignments."""


class BackendList(Reply, frozen=True):
    """Answer to `ListBackends`."""

    backends: tuple[BackendStatus, ...] = ()
    waiting: int = 0
    """Jobs that wait for a backend."""
    starts: tuple[EngineStart, ...] = ()
    """Engines that have not registered yet."""
    adapters: tuple[AdapterModel, ...] = ()


class LackedRecord(Part, frozen=True, array_like=True):
    """A backend that does not give a record, or of all backends the fewest `top_logprobs`."""

    model: ModelName
    record: RecordName
    backend_id: Identifier
    engine: str
    """The model name that its engine reports."""
    reason: str = ""
    """Why it does not; empty: unknown."""
    top_limit: Annotated[int, Meta(ge=0)] = 0
    """The largest number of `top_logprobs` that it gives; 0: none."""


class ModelList(Reply, frozen=True):
    """Answer to `ListModels`."""

    models: tuple[ModelName, ...] = ()
    lacking: tuple[LackedRecord, ...] = ()
    """The records that not every backend of a model gives, and each limit of `top_logprobs` below `RECORD_TOP_LIMIT`;
    of models without a backend, nothing is known."""


class AllowedKey(Part, frozen=True):
    """A key that the service accepts."""

    name: Identifier
    role: KeyRole
    public_key: CurveKey


class KeyList(Reply, frozen=True):
    """Answer to `ListKeys`."""

    state: str
    """An identifier of the list's content."""
    keys: tuple[AllowedKey, ...] | None = None
    """None: unchanged since the requested state."""


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
    | ListModels
    | ReportStarts
    | WeightUpdate
    | HoldWeights
    | ListKeys
)
AnyBackendReply = (
    Assigned | WaitLonger | NameAll | BackendHeld | Done | WeightsServed | BackendList | ModelList | KeyList | Refused
)
