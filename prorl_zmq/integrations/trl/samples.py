"""How tokens are drawn, as both of TRL's trainers say it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ..sampling import sampling_of

if TYPE_CHECKING:
    from ...wire.messages.jobs import Sampling

log = logging.getLogger("prorl.trainer")

TESTED = "1.16"


def sampling_of_args(args: Any) -> Sampling:
    """Return how tokens are drawn, by a `GRPOConfig` or `AsyncGRPOConfig`.

    Raises:
        InvalidJob: a parameter cannot be used here; `field` names it.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    sampling = sampling_of({name: getattr(args, name) for name in names})
    if sampling.top_p < 1 or sampling.top_k or sampling.min_p:
        log.warning("top_p, top_k and min_p make importance ratios too small: TRL's log-probs are of all tokens")
    return sampling
