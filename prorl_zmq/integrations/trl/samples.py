"""What both of TRL's trainers need of rows: their length, and the sampling parameters that TRL was given."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

from ...errors import ConfigError
from ..sampling import sampling_of

if TYPE_CHECKING:
    from ...data.rows import Row
    from ...wire.messages.jobs import Sampling

log = logging.getLogger("prorl.trainer")

TESTED = "1.16"
TooLong = Literal["drop", "truncate"]


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


def response_room(row: Row, most: int | None, too_long: TooLong) -> int:
    """Return how many tokens of a row's response are trained on: at most `max_completion_length`; 0: none."""
    tokens = len(row) - row.prompt_tokens
    if most is None or tokens <= most:
        return tokens
    return most if too_long == "truncate" else 0


def check_too_long(too_long: str) -> None:
    if too_long not in ("drop", "truncate"):
        raise ConfigError(f'too_long is "drop" or "truncate", not {too_long!r}', key="too_long")
