"""Engine hosts: what stage processes and the backend broker ask them, and their replies."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from ...errors import ErrorInfo
from .base import Identifier, JobIdentifier, Message, Part, Seconds, ShortText, WeightVersion
from .jobs import Sampling

UpdateMode = Literal["keep", "drain", "abort"]
"""What becomes of running generations when new weights come: they pause and continue with the new ones; they end first,
with the old ones, while new requests wait; or they are ended at once, and the agent loop has the rest of the turn
generated with the new ones."""


class EngineRequest(Message, frozen=True):
    """Base of what an engine host is asked."""

    request_id: Identifier


class Generate(EngineRequest, frozen=True, kw_only=True):
    """Continue a prompt. Further frame: its ids, int32 [P]."""

    job_id: JobIdentifier
    sampling: Sampling
    stop_token_ids: tuple[int, ...] = ()
    """The turn ends after any of these; the one that ended it is part of the answer."""
    life: Annotated[str, Meta(max_length=64)] = ""
    """The host's life that is meant; a host that was started anew may have older weights. Empty: any."""
    traceparent: ShortText = ""
    """The W3C trace context of the span that asks; empty: there is none."""


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
    """Generate nothing from now on: a trainer is about to change the weights, and `EndUpdate` follows.

    The answer comes when nothing is generated any more, as `mode` says. For the same version begun again, only the
    limit starts over.
    """

    weight_version: WeightVersion
    limit_s: Seconds
    """If neither end nor cancel comes for so long after this, the engine continues with the version that it had."""
    mode: UpdateMode = "keep"


class EndUpdate(EngineRequest, frozen=True):
    """The weights are in the engine; it continues, and what it generates from now on is of this version."""

    weight_version: WeightVersion


class CancelUpdate(EngineRequest, frozen=True):
    """The weights are what they were, and the engine continues. Nothing was begun: there is nothing to do."""

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
