"""The parts that the answers of all servers have: JSON, ids and log-probs, versions of weights, reasons for the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import numpy as np

from ...errors import EngineFailed
from ...wire.messages.engines import VersionSpan
from ..engine import FINISH_REASONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ...wire.messages.engines import FinishReason

UNTOLD: Final = -1
"""In a dialect's spans: the server reported no number."""
LOADING: Final = -2
"""In a dialect's spans: the server was taking new weights."""
LOADING_WORD: Final = "prorl-loading"
"""The name of a server's weights during an update; a later engine host finds it if this one dies."""
_DIGITS: Final = 10
"""Of an int32."""

_Body = TypeVar("_Body", bound=msgspec.Struct)


def decoded(body: bytes, kind: type[_Body]) -> _Body:
    """Decode an answer; unknown fields are skipped.

    Raises:
        EngineFailed: it is not JSON, or has another form.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise EngineFailed(f"the server's answer has another form than expected: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineFailed(f"the server's answer is not JSON ({error}): {body[:120]!r}") from None


def id_array(ids: Sequence[int]) -> NDArray[np.int32]:
    """Return token ids as int32 [G].

    Raises:
        EngineFailed: one is not an int32.
    """
    try:
        return np.array(ids, np.int32)
    except OverflowError:
        raise EngineFailed(f"the server gave the token id {max(ids, key=abs)}, which no vocabulary holds") from None


def logprob_array(logprobs: Sequence[float | None]) -> NDArray[np.float32]:
    """Return log-probs as float32 [G], with NaN for missing ones: JSON has no NaN, and some servers write null."""
    with np.errstate(over="ignore"):  # values beyond float32 become infinite, and are rejected as such
        return np.array([np.nan if value is None else value for value in logprobs], np.float32)


def version_number(text: str) -> int:
    """Parse a server's name for its weights: ours are integers; any word (`default`) is `UNTOLD`."""
    if text == LOADING_WORD:
        return LOADING
    number = small_number(text)
    return UNTOLD if number is None else number


def small_number(text: str) -> int | None:
    """Parse digits; None: they are none, or not an int32."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
        return None
    return int(text) if int(text) < 2**31 else None


def with_version(spans: Sequence[VersionSpan], weight_version: int) -> tuple[VersionSpan, ...]:
    """Return spans with this version where the server reported none."""
    return tuple(
        span if span.weight_version >= 0 else VersionSpan(weight_version, span.start, span.end) for span in spans
    )


def finish(reason: str | None) -> FinishReason:
    """Convert a server's reason for the end of a turn.

    Raises:
        EngineFailed: it is an error, or unknown.
    """
    if reason in FINISH_REASONS:
        return FINISH_REASONS[reason]
    raise EngineFailed(f"the server ended the turn for the reason {reason!r}, which means nothing to us")
