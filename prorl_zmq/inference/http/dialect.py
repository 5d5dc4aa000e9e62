"""What a server speaks: a class per dialect, which writes the request and reads the answer of one generation.

A dialect does no I/O. What it reads goes through `engine.checked` afterwards; here, an answer is refused only where
nothing can be made of it. The helpers that all dialects share are here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, TypeVar

import msgspec
import numpy as np

from ...errors import EngineFailed
from ...messages import VersionSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ...messages import FinishReason, Sampling
    from ..engine import Generation

TOP_K_ALL = -1
"""Draw from all tokens, as every version of vLLM and SGLang understands it."""

FINISH_REASONS: Final[dict[str | None, FinishReason]] = {"stop": "stop", "length": "length", "abort": "abort"}
"""In the words of vLLM and SGLang, which are ours."""

_Body = TypeVar("_Body", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What is asked of a server."""

    token_ids: NDArray[np.int32]
    """int32 [P]: the prompt."""
    sampling: Sampling
    stop_token_ids: Sequence[int]
    """All of them."""
    weight_version: int = 0
    """Of the weights that the server has when it is asked, for servers that do not say."""


class Dialect(Protocol):
    """How one kind of server is asked to continue token ids."""

    name: ClassVar[str]
    """What `api=` calls it."""
    path: ClassVar[str]
    """Where generations are posted."""
    tells_spans: ClassVar[bool]
    """Whether answers say which weights made which tokens."""

    def request(self, turn: Turn) -> bytes:
        """Give the body of the request."""

    def generation(self, body: bytes, turn: Turn) -> Generation:
        """Read the body of an answer with status 200.

        Raises:
            EngineFailed: nothing can be made of it: not JSON, of another form, or text only.
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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineFailed(f"the server's answer is not JSON ({error}): {body[:120]!r}") from None


def id_array(ids: Sequence[int]) -> NDArray[np.int32]:
    """Give token ids as int32 [G].

    Raises:
        EngineFailed: one is no int32.
    """
    try:
        return np.array(ids, np.int32)
    except OverflowError:
        raise EngineFailed(f"the server gave the token id {max(ids, key=abs)}, which no vocabulary holds") from None


def logprob_array(logprobs: Sequence[float | None]) -> NDArray[np.float32]:
    """Give log-probs as float32 [G], with NaN where the server gave none: JSON has no NaN, and some write null."""
    return np.array([np.nan if value is None else value for value in logprobs], np.float32)


def version_number(text: str, initial: int) -> int:
    """Read a server's name for its weights: ours are integers; any word (`default`) is what it was started with."""
    return int(text) if text.isdecimal() and int(text) < 2**31 else initial


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
