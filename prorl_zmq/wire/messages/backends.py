"""The backend broker: requests of stage processes, engine hosts and clients, and its replies.

A `WeightUpdate` is answered when all engine hosts have done their part: the broker asks them with one deadline.
"""

from __future__ import annotations

import zlib
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta
from msgspec.json import decode, encode
from msgspec.structs import replace

from .base import (
    FOR_ALL,
    FOR_OPERATORS,
    FOR_STAGES,
    FOR_TRAINERS,
    AnnouncedKey,
    Attempt,
    Count,
    CurveKey,
    Done,
    FieldName,
    Identifier,
    JobIdentifier,
    KeyRole,
    Part,
    Refused,
    Reply,
    Request,
    Roles,
    Seconds,
    ShortText,
    WeightVersion,
)
from .engines import WeightUpdate
from .jobs import LogprobsMode

TAKE_BACK_S = 5.0
"""How much later than its `timeout_s` a `WeightUpdate` may be answered: a begin that failed is taken back first."""
STARTS_LIMIT = 1024
"""Most engines of one report."""

ToolCallFormatName = Literal[
    "",
    "apertus",
    "apriel",
    "command_r",
    "deepseek_v3",
    "deepseek_v31",
    "dsml",
    "gemma4",
    "gigachat",
    "glm",
    "granite3",
    "harmony",
    "hermes",
    "inkling",
    "kimi_k2",
    "kimi_k3",
    "lfm2",
    "llama3",
    "llama4",
    "minicpm5",
    "minimax_m2",
    "minimax_m3",
    "mistral",
    "muse",
    "nemotron_v2",
    "olmo3",
    "phi4_mini",
    "qwen3_coder",
    "seed_oss",
    "solar_open",
    "fenced",
]
History = Literal["template", "append"]
TemplateArguments = Annotated[dict[FieldName, Any], Meta(max_length=32)]
"""What a chat template is given by name, such as `enable_thinking`."""
ParserUrl = Annotated[str, Meta(pattern="^(https?://[^/].*)?$", max_length=2048)]


class ChatSettings(Part, frozen=True):
    """How conversations become tokens for a model (see `prorl_zmq.inference.chat`)."""

    kind: Literal["embedded", "transformers"] = "embedded"
    """`transformers`: by the chat template of the model's tokenizer."""
    tokenizer: str = ""
    """A directory as the stage processes see it, or a hub name; for kind `transformers`."""
    tool_calls: ToolCallFormatName = ""
    """How the model writes tool calls; empty: as its template does."""
    history: History = "template"
    """Where the template changes earlier turns (as those do that drop old reasoning): `template` follows it and begins
    a new segment of the trajectory; `append` keeps what the engine saw, so that there is always one segment."""
    parser_url: ParserUrl = ""
    """A server of `vllm launch render`, as stage processes reach it: its parsers of tool calls and reasoning read what
    the policy says to a harness. The agent loop reads by the formats above. Empty: that is done for harnesses too."""
    template_arguments: str = ""
    """The `TemplateArguments` as JSON, its names in order; empty: none. Text, so that settings can be compared."""

    def with_arguments(self, arguments: dict[str, Any]) -> ChatSettings:
        """Return the same settings with more template arguments, which count more than those of the settings."""
        if not arguments:
            return self
        merged = {**self.arguments(), **arguments}
        return replace(self, template_arguments=encode(merged, order="deterministic").decode())

    def arguments(self) -> dict[str, Any]:
        """Return the template arguments.

        Raises:
            ValueError: they are no JSON object.
        """
        return decode(self.template_arguments, type=dict[str, Any]) if self.template_arguments else {}


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
    """Relative load: a backend with weight 2 gets twice as many jobs."""
    max_in_flight: Count = 256
    """Jobs at once beyond which it counts as full: others are preferred, and a group is split."""
    context_tokens: Annotated[int, Meta(ge=0)] = 0
    """Most tokens of a prompt and its answer together; 0: it did not say."""
    logprobs_mode: LogprobsMode = "processed_logprobs"
    life: Annotated[str, Meta(max_length=64)] = ""
    """Names one life of its host: who was sent to another one is refused there. Empty: it has no host of ours."""
    version: ShortText = ""
    """Of its host's package; empty: it has no host of ours."""
    warning: Annotated[str, Meta(max_length=512)] = ""
    """What its users must know of how its model is understood, such as that its tool calls are not read."""


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
    memory_bytes: Annotated[int, Meta(ge=0)] = 0
    """That its host's process, and those that it has started, have in memory; 0: not known."""


class BackendStatus(Part, frozen=True, kw_only=True):
    """One backend, as the backend broker sees it."""

    backend: Backend
    state: Literal["ready", "draining", "updating", "behind", "probation", "unwell"]
    """`updating`: new weights are on their way and it does not serve them yet, so it gets no jobs.
    `behind`: it serves other weights than the trainer announced last, so it gets no jobs; `problem` says what to do.
    `probation`: a job could not reach it, or its generation failed there; single jobs try it, at growing intervals,
    until one is served. `unwell`: its host says that the engine cannot serve now, so it gets none."""
    problem: str = ""
    """Why it is behind, unwell or on probation."""
    next_try_s: float | None = None
    """How soon a job may try one on probation; 0: the next one does."""
    in_flight: int
    """Assignments held now."""
    assigned: int
    """Assignments ever made."""
    load: EngineLoad | None = None
    """None: it sends no heartbeats."""
    silent_s: float | None = None
    """Seconds since its last heartbeat; None: it sends none."""
    lease_s: float = 0.0
    """How long it may be silent before it is removed; 0: it sends no heartbeats, and stays."""


class EngineStart(Part, frozen=True):
    """An engine that is expected to register as a backend, or was."""

    backend_id: Identifier
    state: Literal["starting", "failed"]
    """`failed`: it ended before it was ready, and is not started again."""
    problem: Annotated[str, Meta(max_length=1000)] = ""
    """Why it failed, or ended the last time."""


class Assign(Request, frozen=True, kw_only=True):
    """Assign a backend to the job; a job that holds one gets the same. The reply waits while there is none."""

    roles: ClassVar[Roles] = FOR_STAGES
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
    """The backend that the job holds and cannot continue with: assign another one, or wait until that may be tried."""


class GenerationFailed(Request, frozen=True):
    """A backend could not be reached by a job, or failed its generation: put it on probation."""

    roles: ClassVar[Roles] = FOR_STAGES
    job_id: JobIdentifier
    backend_id: Identifier
    problem: Annotated[str, Meta(min_length=1, max_length=1000)]
    life: Annotated[str, Meta(max_length=64)] = ""
    """Of the backend as it was assigned; a later life is not held to it."""


class Release(Request, frozen=True):
    """End a job's assignment. Of an older attempt than the one that holds it: do nothing."""

    roles: ClassVar[Roles] = FOR_STAGES
    job_id: JobIdentifier
    attempt: Attempt
    served: Annotated[int, Meta(ge=0)] = 0
    """As in `HeldAssignment`."""


class HeldAssignment(Part, frozen=True, array_like=True):
    """An assignment, as known to the stage process that holds its job."""

    attempt: Attempt
    backend_id: Identifier | None = None
    """None: it waits for one."""
    served: Annotated[int, Meta(ge=0)] = 0
    """Generations that the backend has done for the job, failed ones not counted."""


class OwnerAlive(Request, frozen=True):
    """Keep the assignments of a stage process, and name those it still wants, or those that have changed.

    A broker that holds others, as one that was restarted, answers with `NameAll`, and learns which jobs are where.
    """

    roles: ClassVar[Roles] = FOR_STAGES
    owner: Identifier
    jobs: dict[JobIdentifier, HeldAssignment] = {}
    digest: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    """The sum of `assignment_digest` over all that have a backend. None: `jobs` names all, also those that wait."""


def assignment_digest(job_id: str, attempt: int, backend_id: str) -> int:
    """Return what an assignment adds to the digest of those of its owner."""
    return zlib.crc32(f"{job_id} {attempt} {backend_id}".encode())


class AddBackend(Request, frozen=True):
    """Register a backend. Under the id of a live one at another endpoint it is refused."""

    roles: ClassVar[Roles] = FOR_OPERATORS | FOR_STAGES
    backend: Backend
    heartbeats: bool = False
    """The backend will send `BackendAlive`, and is removed when it falls silent."""


class BackendAlive(Request, frozen=True):
    """Heartbeat of an engine host. It is refused with `unknown_backend` if it has to register (again)."""

    roles: ClassVar[Roles] = FOR_STAGES
    backend_id: Identifier
    weight_version: WeightVersion
    load: EngineLoad = EngineLoad()
    problem: Annotated[str, Meta(max_length=1000)] = ""
    """Why the engine cannot serve now; empty: it can."""


class DrainBackend(Request, frozen=True):
    """Assign no more jobs to a backend; those that hold it keep it."""

    roles: ClassVar[Roles] = FOR_OPERATORS | FOR_STAGES
    backend_id: Identifier


class RemoveBackend(Request, frozen=True):
    """Forget a backend and the assignments on it."""

    roles: ClassVar[Roles] = FOR_OPERATORS | FOR_STAGES
    backend_id: Identifier


class ClearBackends(Request, frozen=True):
    """Forget all backends."""

    roles: ClassVar[Roles] = FOR_OPERATORS


class ListBackends(Request, frozen=True):
    """Describe all backends."""

    roles: ClassVar[Roles] = FOR_ALL


class ReportStarts(Request, frozen=True):
    """Name the engines that are not ready yet: while one is `starting`, the waits of jobs for a backend do not run out.

    Whoever starts engines sends it every second while one of them is not ready. It replaces the owner's report before,
    and expires after the lease. An engine that registers is not starting any more.
    """

    roles: ClassVar[Roles] = FOR_STAGES
    owner: Identifier
    engines: Annotated[tuple[EngineStart, ...], Meta(max_length=STARTS_LIMIT)] = ()


class HoldWeights(Request, frozen=True):
    """Renew the lease of a trainer that has sent a `WeightUpdate`, while its client lives; or end it."""

    roles: ClassVar[Roles] = FOR_TRAINERS | FOR_OPERATORS
    trainer: Identifier
    goodbye: bool = False


class ListKeys(Request, frozen=True):
    """List the keys that the service lets in, for an engine host, which has the list of this state."""

    roles: ClassVar[Roles] = FOR_STAGES
    state: str = ""


class Assigned(Reply, frozen=True):
    """Answer to `Assign`."""

    backend: Backend


class WaitLonger(Reply, frozen=True):
    """Answer to an `Assign` that came while a backend is starting: its wait begins when none is.

    The answer proper follows. A stage process that hears nothing more asks again with the same request.
    """


class NameAll(Reply, frozen=True):
    """Answer to an `OwnerAlive` with another digest than that of the assignments here: name all of them."""


class BackendList(Reply, frozen=True):
    """Answer to `ListBackends`."""

    backends: tuple[BackendStatus, ...] = ()
    waiting: int = 0
    """Jobs that wait for a backend."""
    starts: tuple[EngineStart, ...] = ()
    """Engines that are no backends yet."""


class AllowedKey(Part, frozen=True):
    """A key that the service lets in."""

    name: Identifier
    role: KeyRole
    public_key: CurveKey


class KeyList(Reply, frozen=True):
    """Answer to `ListKeys`."""

    state: str
    """Names what the list holds."""
    keys: tuple[AllowedKey, ...] | None = None
    """None: the list has not changed since the state that was named."""


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
    | ReportStarts
    | WeightUpdate
    | HoldWeights
    | ListKeys
)
AnyBackendReply = Assigned | WaitLonger | NameAll | Done | BackendList | KeyList | Refused
