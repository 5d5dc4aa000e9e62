"""Engine hosts: what stage processes and the backend broker ask them, and their replies."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from .base import (
    FOR_OPERATORS,
    FOR_STAGES,
    FOR_TRAINERS,
    Identifier,
    JobIdentifier,
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
from .jobs import Sampling

ENGINES_S = 30.0
"""How long engine hosts have to answer the backend broker, unless a request says otherwise."""
UPDATE_LIMIT_S = 600.0
"""How long engines wait for the end of an update by default; then the trainer counts as dead."""

UpdateStep = Literal["begin", "load", "end", "cancel", "set"]
UpdateMode = Literal["keep", "drain", "abort"]
"""What becomes of running generations when new weights come: they pause and continue with the new ones; they end first,
with the old ones, while new requests wait; or they are ended at once, and the agent loop has the rest of the turn
generated with the new ones."""


class Generate(Request, frozen=True, kw_only=True):
    """Continue a prompt. Further frame: its ids, int32 [P]."""

    roles: ClassVar[Roles] = FOR_STAGES
    job_id: JobIdentifier
    sampling: Sampling
    stop_token_ids: tuple[int, ...] = ()
    """The turn ends after any of these; the one that ended it is part of the answer."""
    life: Annotated[str, Meta(max_length=64)] = ""
    """The host's life that is meant; a host that was started anew may have older weights. Empty: any."""
    traceparent: ShortText = ""
    """The W3C trace context of the span that asks; empty: there is none."""


class Abort(Request, frozen=True):
    """Stop the generation that `request_id` began; there is no reply to either."""

    roles: ClassVar[Roles] = FOR_STAGES


class EngineHealth(Request, frozen=True):
    """Ask whether the engine can serve."""

    roles: ClassVar[Roles] = FOR_STAGES


class WeightUpdate(Request, frozen=True):
    """Do one step of an update of weights. The backend broker passes it on to every engine host.

    | step | an engine host |
    |---|---|
    | `begin` | stops generating, as `mode` says; of the version that was begun already, only `limit_s` starts over |
    | `load` | loads the weights at `path` and serves them: begin, load and end in one |
    | `end` | resumes with the weights that the trainer has put into the engine |
    | `cancel` | resumes with the weights that it has; without a `begin` it does nothing |
    | `set` | calls its weights `weight_version` from the next token on: they were changed by other means |

    An engine host replies with `EngineReady` after the step. The backend broker replies after all hosts have; from
    `begin` on it assigns no job to a backend that does not serve this version, and takes a `begin` back if one engine
    cannot stop. The front door takes `load`, `end` and `set`, after the backend broker has replied: batches drop what
    is too old for the version.
    """

    roles: ClassVar[Roles] = FOR_TRAINERS | FOR_OPERATORS
    step: UpdateStep
    weight_version: WeightVersion
    path: PathText = ""
    """Of `load`: where the weights are, as engine hosts see it."""
    mode: UpdateMode = "keep"
    """Of `begin` and `load`."""
    limit_s: Seconds = UPDATE_LIMIT_S
    """Of `begin`: without an end or cancel for so long, engines resume with the version that they had."""
    timeout_s: Seconds = ENGINES_S
    """How long engine hosts have to answer the backend broker."""
    backend_id: Identifier | None = None
    """Of `set`: only this backend, whose host is not asked. It holds until the host's heartbeats report a change."""
    trainer: Identifier | Literal[""] = ""
    """The session of the trainer whose weights they are from then on; empty: an operator's."""
    take_over: bool = False
    """Do so although another trainer holds the weights (refused with `weights_held` else); it is refused from then on.
    """


class VersionSpan(Part, frozen=True):
    """Generated tokens `start` up to `end` came from weights `weight_version`."""

    weight_version: int
    start: int
    end: int


FinishReason = Literal["stop", "length", "abort"]
"""`length`: the turn or the engine's context was full. `abort`: new weights came (see `UpdateMode`)."""


class Generated(Reply, frozen=True, kw_only=True):
    """Answer to `Generate`. Further frames: the ids, int32 [G], and their log-probs, float32 [G]."""

    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]
    cached_tokens: Annotated[int, Meta(ge=0)] = 0
    """Of the prompt, found in the engine's prefix cache."""


class EngineReady(Reply, frozen=True):
    """Answer to `EngineHealth`, and to `WeightUpdate` once it is done."""

    weight_version: WeightVersion
    in_flight: int = 0
    """Generations going on."""


AnyEngineRequest = Generate | Abort | EngineHealth | WeightUpdate
AnyEngineReply = Generated | EngineReady | Refused
