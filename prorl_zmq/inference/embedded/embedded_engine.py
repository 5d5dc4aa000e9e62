"""The embedded engine: serves a `Policy` in the host's process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...data.scores import Scores
from ...errors import InvalidWeights
from ...wire.messages.chat import ChatSettings
from ...wire.records import EXPERTS, RECORD_TOP_LIMIT, SAMPLING_MASK, TOP_LOGPROBS
from ..engine import EngineDescription
from ..local_engine import LocalEngine
from ..policy import Policy, log_softmax
from ..tokenizer import PAD, VOCABULARY_SIZE
from .base_policy import base_policy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

CONTEXT_LIMIT = 32_768
"""Most tokens of a prompt and its answer together. The window slides, so the limit only keeps requests finite."""
MAX_IN_FLIGHT = 64
"""Generations at once beyond which each is noticeably slower."""
SCORED_TOKENS = 512
"""Tokens of a text that are scored between two steps of generations."""


class EmbeddedEngine(LocalEngine):
    """Implements `engine.Engine` with a `Policy`, which never changes; an update swaps the whole policy."""

    def __init__(self, policy: Policy, weight_version: int = 0, model: str = "embedded") -> None:
        vocabulary = policy.shape.vocabulary
        super().__init__(
            EngineDescription(
                model,
                ChatSettings(),
                CONTEXT_LIMIT,
                vocabulary,
                MAX_IN_FLIGHT,
                "processed_logprobs",
                records=(TOP_LOGPROBS, SAMPLING_MASK),
                top_limit=min(RECORD_TOP_LIMIT, vocabulary),
                unrecorded={EXPERTS: "its policy is dense"},
                scores=True,
            ),
            weight_version,
        )
        self._policy = policy

    def _step(self) -> None:
        window = self._policy.shape.window
        contexts = np.full((len(self._running), window), PAD, np.int32)
        for row, running in enumerate(self._running):
            last = running.tokens[-window:]
            contexts[row, window - len(last) :] = last
        self._draw(self._running, self._policy.logits(contexts))

    def _score_parts(
        self,
        token_ids: NDArray[np.int32],
        top: int,
        adapter: tuple[str, int] | None,  # noqa: ARG002 - it has none
    ) -> Iterator[Scores]:
        policy = self._policy
        contexts = policy.contexts(token_ids)
        for start in range(1, len(token_ids), SCORED_TOKENS):
            part = slice(start, start + SCORED_TOKENS)
            logprobs = log_softmax(policy.logits(contexts[part]))
            rows = np.arange(len(logprobs))[:, None]
            likeliest = np.argsort(-logprobs, axis=1, kind="stable")[:, :top]
            yield Scores(logprobs[rows[:, 0], token_ids[part]], likeliest.astype(np.int32), logprobs[rows, likeliest])

    def _read_weights(self, path: Path) -> Policy:
        return Policy.load(path, self._policy.shape)

    def _take_weights(self, weights: Policy) -> None:
        self._policy = weights


def load_embedded_engine(model: Path | None, weight_version: int = 0) -> EmbeddedEngine:
    """Return an engine with the policy of an .npz file; None: the base policy.

    Raises:
        InvalidWeights: the model cannot be used.
    """
    policy = base_policy() if model is None else Policy.load(model)
    if policy.shape.vocabulary != VOCABULARY_SIZE:
        raise InvalidWeights(
            f"{model} has {policy.shape.vocabulary} tokens, the embedded chat format {VOCABULARY_SIZE}", path=str(model)
        )
    return EmbeddedEngine(policy, weight_version, "base policy" if model is None else str(model))
