"""What a dialect is: how one kind of server is asked for a generation or for scores, and how its answer is read.

A dialect encodes the request and decodes the answer, and does no I/O. Its answers go through `engine.checked`
afterwards; a dialect raises `EngineFailed` only for an answer that it cannot decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import msgspec

from ...wire.records import NO_RECORDS, Recorded

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ...data.scores import Scores
    from ...wire.messages.jobs import Sampling
    from ..engine import Generation

_BASE_BYTES: Final = 2**20
_TOKEN_BYTES: Final = 2**11
_ENTRY_BYTES: Final = 256
"""Of an entry of a scored token, which has its text."""
_CANDIDATE_BYTES: Final = 2**8
"""Of one of the likeliest tokens, in JSON."""
_PROMPT_TOKEN_BYTES: Final = 16
"""Some servers echo the prompt's ids."""
_MOST_BYTES: Final = 2**28
TOP_K_ALL = -1
"""Draw from all tokens, as every version of vLLM and SGLang understands it."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One generation to request."""

    token_ids: NDArray[np.int32]
    """int32 [P]: the prompt."""
    sampling: Sampling
    stop_token_ids: Sequence[int]
    """All of them, including those of the sampling."""
    asked: Recorded = NO_RECORDS
    rows_known: int = 0
    """As in `Wanted`."""
    model: str = ""
    """The adapter's name at the server; empty: the model that it was started with."""

    @property
    def answer_limit_bytes(self) -> int:
        if self.asked.mask or self.asked.experts:
            return _MOST_BYTES
        token_bytes = _TOKEN_BYTES + self.asked.top * _CANDIDATE_BYTES
        tokens = self.sampling.max_tokens * token_bytes + len(self.token_ids) * _PROMPT_TOKEN_BYTES
        return min(_BASE_BYTES + tokens, _MOST_BYTES)


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """One text to score."""

    token_ids: NDArray[np.int32]
    """int32 [T]."""
    top: int
    """How many of the likeliest tokens to list for each position."""
    model: str = ""
    """The server's name of an adapter; empty: the server's own weights."""

    @property
    def answer_limit_bytes(self) -> int:
        return min(_BASE_BYTES + len(self.token_ids) * (1 + self.top) * _ENTRY_BYTES, _MOST_BYTES)


class Dialect(Protocol):
    """The requests and answers of one kind of server that continues token ids."""

    name: ClassVar[str]
    """The value of `api=`."""
    path: ClassVar[str]
    """The path of generations."""
    tells_spans: ClassVar[bool]
    """Whether answers report which weights generated which tokens."""
    scores: ClassVar[bool]
    """Whether it is a `ScoringDialect`."""

    def request(self, turn: Turn) -> bytes:
        """Return the body of the request."""

    def records(self, body: bytes) -> tuple[str, ...]:
        """Return the names of the records that the server gives, by its answer to a plain request."""

    def generation(self, body: bytes, turn: Turn) -> Generation:
        """Decode the body of an answer with status 200. Spans may have `UNTOLD` or `LOADING` in place of a version.

        Records are those of the answer; what the server left out is missing.

        Raises:
            EngineFailed: the body is not JSON, has another form, or holds text only.
        """


class ScoringDialect(Dialect, Protocol):
    """A dialect in which a server scores texts."""

    def scoring(self, text: Text) -> bytes:
        """Return the body of the request."""

    def scores_of(self, body: bytes, text: Text) -> Scores:
        """Decode the body of an answer with status 200.

        Raises:
            EngineFailed: as `generation`, or it has no log-probs of this text.
        """


def cached(count: int, turn: Turn) -> int:
    """Return the number of cached tokens of the prompt, at most its length."""
    return min(max(count, 0), len(turn.token_ids))


def sampling_parameters(turn: Turn) -> dict[str, Any]:
    """Return the sampling parameters that all dialects share, under vLLM's names."""
    sampling = turn.sampling
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or TOP_K_ALL,
        "min_p": sampling.min_p,
        "stop_token_ids": list(turn.stop_token_ids),
        **({"stop": list(sampling.stop)} if sampling.stop else {}),
        **({} if sampling.seed is None else {"seed": sampling.seed}),
    }


def rest_of(sampling: Sampling, count: int) -> Sampling:
    """Return the sampling for the rest of a turn: the same seed would repeat the random numbers of its beginning."""
    seed = None if sampling.seed is None else (sampling.seed + 1 + count) % 2**63
    return msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - count, seed=seed)
