"""Top-k, top-p and min-p for the engines of this package: which tokens may be drawn.

The order is vLLM's: temperature, min-p, top-k, top-p. Tokens and log-probs are then those of the remaining tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..wire.messages.jobs import Sampling


def truncates(sampling: Sampling) -> bool:
    """Return whether any token is excluded; the likeliest one, which temperature 0 takes, never is."""
    narrow = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    return narrow and sampling.temperature > 0


def truncated(logits: NDArray[np.float32], sampling: Sampling) -> NDArray[np.float32]:
    """Return the logits of one token, float32 [vocabulary], with minus infinity for excluded tokens.

    Of equally likely tokens at the edge of top-k or top-p, the smallest ids stay.
    """
    scaled = (logits.astype(np.float64) - logits.max()) / sampling.temperature
    if sampling.min_p > 0:
        scaled[scaled < np.log(sampling.min_p)] = -np.inf
    order = np.argsort(-scaled, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        probabilities = np.exp(scaled[order])
        before = np.cumsum(probabilities) - probabilities
        order = order[before < sampling.top_p * probabilities.sum()]
    kept = np.full_like(logits, -np.inf)
    kept[order] = np.where(np.isneginf(scaled[order]), -np.inf, logits[order])
    return kept
