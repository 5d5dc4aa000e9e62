"""The `score` task: a model's log-probs of a text. `RolloutClient.score` submits its jobs, and reads their arrays."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from ...data.scores import SCORES_TOP_LIMIT
from ...errors import InvalidJob
from ...wire.messages.base import SEGMENTS_LIMIT
from ...wire.messages.chat import ChatSettings  # noqa: TC001 - msgspec resolves it
from ...wire.records import TEACHER
from ..handler import AgentHandler, EvalPhase, Evaluation, PhaseData, RunPhase


class ScoreInstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A text to score."""

    token_ids: bytes
    """int32 [T], little-endian."""
    segments: Annotated[tuple[int, ...], Meta(max_length=SEGMENTS_LIMIT)] = ()
    """Where each segment but the first begins: nothing before a segment counts as its context."""
    top: Annotated[int, Meta(ge=0, le=SCORES_TOP_LIMIT)] = 20
    """How many of the likeliest tokens to list for each position."""
    chat: ChatSettings
    """Those of the engine whose token ids the text has: the model must have the same ids for the same tokens."""


class ScoreHandler(AgentHandler[ScoreInstance]):
    task = "score"
    instance_type = ScoreInstance

    async def run(self, phase: RunPhase[ScoreInstance]) -> PhaseData:
        text = phase.instance
        if not text.token_ids or len(text.token_ids) % 4:
            raise InvalidJob(f"token ids are int32, 4 bytes each; not {len(text.token_ids)} bytes", field="token_ids")
        token_ids = np.frombuffer(text.token_ids, np.int32)
        scores = await phase.score(TEACHER, token_ids, text.segments, text.top, text.chat)
        return {"mean_logprob": float(scores.logprobs.mean(dtype=np.float64))}

    async def eval(self, phase: EvalPhase[ScoreInstance]) -> Evaluation:
        """Give the mean log-prob as the reward."""
        return Evaluation(phase.data["mean_logprob"])
