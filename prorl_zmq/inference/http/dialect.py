"""The interface of a dialect, which writes the request and reads the answer of one generation, and what dialects share.

A dialect does no I/O. What it reads goes through `engine.checked` afterwards; a dialect refuses an answer only where
nothing can be made of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, TypeVar

import msgspec
import numpy as np

from ...errors import EngineFailed
from ...wire.messages.engines import VersionSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ...wire.messages.engines import FinishReason
    from ...wire.messages.jobs import Sampling
    from ..engine import Generation

FINISH_REASONS: Final[dict[str | None, FinishReason]] = {"stop": "stop", "length": "length", "abort": "abort"}
"""In the words of vLLM and SGLang, which are ours."""

UNTOLD: Final = -1
"""In a dialect's spans: the server gave no number."""
LOADING: Final = -2
"""In a dialect's spans: the server was taking new weights."""
LOADING_WORD: Final = "prorl-loading"
"""The name of a server's weights while it takes new ones; a later engine host finds it if this one dies."""
_DIGITS: Final = 10
"""Of an int32."""
_BASE_BYTES: Final = 2**20
_TOKEN_BYTES: Final = 2**11
_PROMPT_TOKEN_BYTES: Final = 16
"""Some servers echo the prompt's ids."""
_MOST_BYTES: Final = 2**28

_Body = TypeVar("_Body", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One generation to ask for."""

    token_ids: NDArray[np.int32]
    """int32 [P]: the prompt."""
    sampling: Sampling
    stop_token_ids: Sequence[int]
    """All of them."""

    @property
    def answer_limit_bytes(self) -> int:
        """How long an answer may be."""
        tokens = self.sampling.max_tokens * _TOKEN_BYTES + len(self.token_ids) * _PROMPT_TOKEN_BYTES
        return min(_BASE_BYTES + tokens, _MOST_BYTES)


class Dialect(Protocol):
    """How to ask one kind of server to continue token ids."""

    name: ClassVar[str]
    """What `api=` calls it."""
    path: ClassVar[str]
    """Where generations are posted."""
    tells_spans: ClassVar[bool]
    """Whether answers say which weights made which tokens."""

    def request(self, turn: Turn) -> bytes:
        """Return the body of the request."""

    def generation(self, body: bytes, turn: Turn) -> Generation:
        """Read the body of an answer with status 200. Spans may have `UNTOLD` or `LOADING` in place of a version.

        Raises:
            EngineFailed: the body is no JSON, of another form, or holds text only.
        """


def decoded(body: bytes, kind: type[_Body]) -> _Body:
    """Decode an answer; unknown fields are skipped.

    Raises:
        EngineFailed: it is not JSON, or of another form.
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
        EngineFailed: one is no int32.
    """
    try:
        return np.array(ids, np.int32)
    except OverflowError:
        raise EngineFailed(f"the server gave the token id {max(ids, key=abs)}, which no vocabulary holds") from None


def logprob_array(logprobs: Sequence[float | None]) -> NDArray[np.float32]:
    """Return log-probs as float32 [G], with NaN where the server gave none: JSON has no NaN, and some write null."""
    with np.errstate(over="ignore"):  # what float32 cannot hold is infinite, and refused as such
        return np.array([np.nan if value is None else value for value in logprobs], np.float32)


def version_number(text: str) -> int:
    """Read a server's name for its weights: ours are integers; any word (`default`) is `UNTOLD`."""
    if text == LOADING_WORD:
        return LOADING
    number = small_number(text)
    return UNTOLD if number is None else number


def small_number(text: str) -> int | None:
    """Read digits; None: they are none, or no int32."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
        return None
    return int(text) if int(text) < 2**31 else None


def cached(count: int, turn: Turn) -> int:
    """Return how much of the prompt was cached, which is no more than there is of it."""
    return min(max(count, 0), len(turn.token_ids))


def with_version(spans: Sequence[VersionSpan], weight_version: int) -> tuple[VersionSpan, ...]:
    """Return spans with this version where the server gave none."""
    return tuple(
        span if span.weight_version >= 0 else VersionSpan(weight_version, span.start, span.end) for span in spans
    )


def whole_span(count: int, weight_version: int) -> tuple[VersionSpan, ...]:
    """Say that one version made all tokens."""
    return (VersionSpan(weight_version, 0, count),) if count else ()


def finish(reason: str | None) -> FinishReason:
    """Read a server's reason for the end of a turn.

    Raises:
        EngineFailed: it is an error, or unknown.
    """
    if reason in FINISH_REASONS:
        return FINISH_REASONS[reason]
    raise EngineFailed(f"the server ended the turn for the reason {reason!r}, which means nothing to us")
