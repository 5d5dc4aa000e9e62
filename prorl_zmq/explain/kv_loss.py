"""Find backends whose KV cache is too small for their rollouts: they compute prefixes again that they had cached.

The engine hosts count the tokens (`Generated.again_tokens`), so neither new weights nor a change of backend is a loss.
A backend's time is divided by a regression of the seconds of its generations on the prompt tokens that they computed
and the tokens that they generated; the part of the prompts shrinks with their tokens. If the regression leaves it
open, all of the time is taken to be the prompts', since the gain without a cause is an upper bound in all of `explain`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .recording import Recording
    from .rollout import EngineCall

SHARE, WINDOW_S = 0.2, 60.0
"""A backend is named if more than this share of its prompt tokens was computed again for this time."""
SHORT = 0.5
"""Of a shorter recording, this share of its time counts instead."""
FEW_CALLS = 10
"""In a time with fewer generations, a share says nothing."""
ERRORS = 2.0
"""How many standard errors the cost of a prompt token may be larger."""
KNOWN = 0.5
"""If the prompts' share of the time may be this much smaller, it is not known."""


class KvLoss(NamedTuple):
    """What a backend computed again."""

    share: float
    """Of its prompt tokens, at the worst time."""
    window_s: float
    """The length of that time."""
    again_tokens: int
    """In the whole recording."""
    prompt_tokens: int
    of_time: float
    """Share of the time of its generations that this took, at most."""
    is_known: bool
    """Whether that is more than an upper bound."""


def kv_losses(recording: Recording) -> dict[str, KvLoss]:
    """Return the backends that computed much again."""
    calls: dict[str, list[EngineCall]] = defaultdict(list)
    for work in recording.works:
        calls[work.backend] += work.calls
    found = {backend: _loss(each) for backend, each in calls.items() if any(call.tokens.again for call in each)}
    return {backend: loss for backend, loss in found.items() if loss is not None}


def _loss(calls: list[EngineCall]) -> KvLoss | None:
    calls = sorted(calls, key=lambda call: call.ended)
    began, ended, prompt, cached, again, generated = np.array(
        [(call.began, call.ended, *_counts(call)) for call in calls], float
    ).T
    first = began.min()
    window_s = min(WINDOW_S, SHORT * (ended[-1] - first))
    since = np.searchsorted(ended, ended - window_s, side="right")
    sums = np.concatenate([np.zeros((2, 1)), np.cumsum([prompt, again], axis=1)], axis=1)
    prompts, agains = sums[:, 1:] - sums[:, since]
    whole = (ended - window_s >= first) & (np.arange(1, len(calls) + 1) - since >= FEW_CALLS) & (prompts > 0)
    share = float(np.max(agains[whole] / prompts[whole], initial=0.0))
    if share <= SHARE:
        return None
    computed = (prompt - cached).clip(min=0.0)
    least, most = _prompts_share(ended - began, computed, generated, _busy_s(began, ended))
    of_time = most * min(1.0, again.sum() / max(computed.sum(), 1.0))
    return KvLoss(share, window_s, int(again.sum()), int(prompt.sum()), of_time, most - least < KNOWN)


def _counts(call: EngineCall) -> tuple[int, int, int, int]:
    tokens = call.tokens
    return tokens.prompt, tokens.cached, min(tokens.again, tokens.prompt), tokens.generated


def _prompts_share(
    seconds: NDArray[np.float64], computed: NDArray[np.float64], generated: NDArray[np.float64], busy_s: float
) -> tuple[float, float]:
    """Return the least and the largest probable share of an engine's busy time that went into computing prompts."""
    counts = [tokens / max(tokens.mean(), 1.0) for tokens in (computed, generated)]
    columns = np.stack([np.ones_like(seconds), *counts], 1)
    freedom = len(seconds) - np.linalg.matrix_rank(columns)
    if freedom < 1 or np.ptp(columns[:, 1]) < KNOWN:  # the prompts hardly differ
        return 0.0, 1.0
    costs, *_ = np.linalg.lstsq(columns, seconds)
    variance = ((seconds - columns @ costs) ** 2).sum() / freedom
    error = ERRORS * np.sqrt(variance * np.linalg.pinv(columns.T @ columns)[1, 1])
    shares = (costs[1] + np.array([-error, error])) * len(seconds) / max(busy_s, 1e-9)
    least, most = shares.clip(0.0, 1.0)
    return float(least), float(most)


def _busy_s(began: NDArray[np.float64], ended: NDArray[np.float64]) -> float:
    """Return for how long at least one of these was under way."""
    order = np.argsort(began)
    starts, ends = began[order], np.maximum.accumulate(ended[order])
    before = np.concatenate([[starts[0]], ends[:-1]])
    return float((ends - np.maximum(starts, before)).clip(min=0.0).sum())
