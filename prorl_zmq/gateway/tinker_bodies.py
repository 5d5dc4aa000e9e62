"""Requests for samples of Tinker's API, checked, and their replies in protobuf's wire format.

    SampleResponse   1 sequences: SampledSequence, repeated    2 prompt_logprobs: float32, as bytes
                     3 topk_prompt_logprobs: TopkLogprobs      4 prompt_cache_hit_tokens: int32
                     5 target_prompt_logprobs: Tensor
    SampledSequence  1 stop_reason: 0 stop, 1 length    2 tokens: int32, as bytes    3 logprobs: float32, as bytes
                     4 topk_sampled_logprobs: TopkLogprobs
    TopkLogprobs     1 token_ids: int32, as bytes    2 logprobs: float32, as bytes    3 k    4 length
    Tensor           1 dense: bytes, or 2 sparse_csr: SparseCsr    3 dtype: 1 float32    4 shape: int64, repeated
    SparseCsr        1 values: bytes    2 crow_indices: int64, as bytes    3 col_indices: int64, as bytes

Messages of so few fields need no library and no generated classes, whose versions must fit each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from ..data.scores import SCORES_TOP_LIMIT
from ..model_proxy.dialects.common import invalid
from ..wire.records import NO_TOKEN
from .samples import CHOICES_LIMIT, LONGEST, Asked, checked_sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..data.scores import Scores
    from .samples import Sample

TARGETS_TOP = 20
"""Likeliest tokens to ask for where log-probs of targets are wanted: most targets are among them."""
ALONE_LIMIT = 64
"""Most targets of a request that are not among the likeliest tokens: each is scored in a text of its own."""
AT_ONCE = 16_384
"""Targets that are looked up at once: each is compared with up to 65 ids."""
EMPTY_LOGPROB = -99999.0
"""Of a place without a token, whose id is 0."""
VARINT, BYTES = 0, 2
"""Wire types of protobuf."""
FLOAT32 = 1

Top = Annotated[int, Meta(ge=0, le=SCORES_TOP_LIMIT)]
Index = Annotated[int, Meta(ge=0, lt=2**31)]


class Body(msgspec.Struct, frozen=True):
    """Base of the bodies; fields that are not listed are ignored."""


class Chunk(Body, frozen=True):
    """A part of a prompt."""

    tokens: list[int] = []
    type: str = "encoded_text"


class Prompt(Body, frozen=True):
    """Token ids in parts."""

    chunks: tuple[Chunk, ...]


class SamplingParams(Body, frozen=True):
    """As in Tinker."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    """None: what ends a turn of the model ends the reply. `[]`: nothing does."""
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Targets(Body, frozen=True):
    """Token ids for the positions of a prompt but the first, `shape` [P - 1, K]; -1: none."""

    data: list[Annotated[int, Meta(ge=NO_TOKEN, lt=2**31)]]
    shape: tuple[Index, Index]
    dtype: Literal["int64"] = "int64"
    sparse_crow_indices: list[Index] | None = None
    """With `sparse_col_indices`: `data` has the values of a sparse matrix in CSR form."""
    sparse_col_indices: list[Index] | None = None

    def rows(self, prompt_tokens: int) -> NDArray[np.int64]:
        """Return the row of each value, int64 [N].

        Raises:
            CallRefused: it does not have one row for each token of the prompt but the first.
        """
        height, width = self.shape
        if height != prompt_tokens - 1:
            words = f"target_prompt_logprobs has {height} rows, not {prompt_tokens - 1}"
            raise invalid(f"{words}: one for each token of the prompt but the first")
        if self.sparse_crow_indices is None or self.sparse_col_indices is None:
            if self.sparse_crow_indices is not self.sparse_col_indices or len(self.data) != height * width:
                raise invalid(f"target_prompt_logprobs has {len(self.data)} values, not {height} x {width}")
            return np.repeat(np.arange(height), width)
        edges, columns = np.array(self.sparse_crow_indices, np.int64), self.sparse_col_indices
        lengths = np.diff(edges)
        is_whole = len(edges) == height + 1 and edges[0] == 0 and edges[-1] == len(self.data) == len(columns)
        if not is_whole or lengths.min(initial=0) < 0 or max(columns, default=-1) >= width:
            raise invalid("the indices of target_prompt_logprobs are not those of a matrix in CSR form")
        return np.repeat(np.arange(height), lengths)


class NewSample(Body, frozen=True):
    """Ask for replies to one prompt, and for log-probs."""

    sampling_session_id: str
    seq_id: int
    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: Annotated[int, Meta(ge=1, le=CHOICES_LIMIT)] = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Top = 0
    topk_sample_logprobs: Top = 0
    target_prompt_logprobs: Targets | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request for samples, and which log-probs of its prompt the reply has."""

    asked: Asked
    logprobs: bool
    top: int
    last: int
    """How many tokens at the prompt's end are scored."""
    targets: Targets | None
    positions: NDArray[np.int64]
    """Of each target, in the prompt; int64 [N]"""


def read_sample(body: NewSample, model: str) -> Wanted:
    """Check a request.

    Raises:
        CallRefused: it is wrong, or not supported.
    """
    if body.prompt_alt_tokens_k:
        raise invalid("prompt_alt_tokens_k is not supported: tokens are only drawn after the prompt")
    for chunk in body.prompt.chunks:
        if chunk.type != "encoded_text":
            raise invalid(f"the prompt has a chunk of type {chunk.type!r:.50}; only encoded_text is supported")
    tokens = [token for chunk in body.prompt.chunks for token in chunk.tokens]
    if not tokens:
        raise invalid("the prompt has no tokens")
    params, targets = body.sampling_params, body.target_prompt_logprobs
    stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
    sampling = checked_sampling(
        max_tokens=LONGEST if params.max_tokens is None else params.max_tokens,
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        seed=params.seed,
        stop=[one for one in stop if isinstance(one, str)],
        stop_token_ids=[one for one in stop if isinstance(one, int)],
    )
    scores = bool(body.prompt_logprobs or body.topk_prompt_logprobs)
    top = max(body.topk_prompt_logprobs, TARGETS_TOP if targets else 0)
    asked = Asked(
        model=model,
        instances=({"token_ids": tokens, "turn_ends": params.stop is None},),
        count=body.num_samples,
        sampling=sampling,
        top=body.topk_sample_logprobs,
        prompt_top=top if scores or targets else None,
    )
    return Wanted(
        asked,
        bool(body.prompt_logprobs),
        body.topk_prompt_logprobs,
        _last(body, len(tokens)),
        targets,
        targets.rows(len(tokens)) + 1 if targets else np.zeros(0, np.int64),
    )


def _last(body: NewSample, tokens: int) -> int:
    last = body.prompt_logprobs_last_n
    if last is None:
        return tokens - 1
    if not body.prompt_logprobs and not body.topk_prompt_logprobs:
        raise invalid("prompt_logprobs_last_n needs prompt_logprobs or topk_prompt_logprobs")
    if not 1 <= last < tokens:
        raise invalid(
            f"prompt_logprobs_last_n must be 1 to {tokens - 1}, the prompt without its first token; not {last}"
        )
    return last


class TargetLogprobs:
    """The log-probs of a request's targets: from the prompt's scores where they list it, else from a text of its own.

    Args:
        wanted: the request.
        prompt: its token ids, int32 [P].
        scores: of the prompt.

    Raises:
        CallRefused: more than `ALONE_LIMIT` targets need a text.
    """

    def __init__(self, wanted: Wanted, prompt: NDArray[np.int32], scores: Scores) -> None:
        assert wanted.targets is not None
        targets, at = np.array(wanted.targets.data, np.int64), wanted.positions
        ids = np.concatenate([prompt[:, None], scores.top_ids], axis=1)
        known = np.concatenate([scores.logprobs[:, None], scores.top_logprobs], axis=1)
        self.values = np.zeros(len(targets), np.float32)
        found = targets == NO_TOKEN
        for start in range(0, len(targets), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            places = ids[at[part]] == targets[part, None]
            own = np.take_along_axis(known[at[part]], places.argmax(1)[:, None], 1)[:, 0]
            self.values[part] = np.where(found[part], 0, own)
            found[part] |= places.any(1)
        self._alone = np.flatnonzero(~found)
        if len(self._alone) > ALONE_LIMIT:
            raise invalid(
                f"{len(self._alone)} ids of target_prompt_logprobs are not among the {scores.top_ids.shape[1]} "
                f"likeliest tokens, and at most {ALONE_LIMIT} may be: each of them is scored in a text of its own"
            )
        self.texts = [np.append(prompt[: at[one]], targets[one]).astype(np.int32) for one in self._alone]
        """The texts to score, int32 [T] each: the last token of each is a target."""

    def add(self, scores: Sequence[Scores]) -> None:
        """Take the scores of `texts`."""
        self.values[self._alone] = [one.logprobs[-1] for one in scores]


def sample_response(wanted: Wanted, samples: Sequence[Sample], targets: NDArray[np.float32] | None) -> bytes:
    """Return replies to one prompt as `SampleResponse`; `targets` are the log-probs of its targets, float32 [N]."""
    parts = [_field(1, _sequence(sample)) for sample in samples]
    scores = samples[0].prompt_scores
    if scores is not None:
        first = len(scores.logprobs) - wanted.last
        if wanted.logprobs:
            own = np.where(np.arange(len(scores.logprobs)) < first, np.nan, scores.logprobs)
            parts.append(_field(2, own.astype("<f4").tobytes()))
        if wanted.top:
            ids = scores.top_ids[:, : wanted.top].copy()
            ids[:first] = NO_TOKEN
            parts.append(_field(3, _topk(ids, scores.top_logprobs[:, : wanted.top])))
    parts.append(_number(4, max(sample.reply.cached_tokens for sample in samples)))
    if wanted.targets is not None and targets is not None:
        parts.append(_field(5, _tensor(wanted.targets, targets)))
    return b"".join(parts)


def _sequence(sample: Sample) -> bytes:
    parts = [
        _number(1, int(sample.reply.finish_reason == "length")),
        _field(2, sample.token_ids.astype("<i4").tobytes()),
        _field(3, sample.logprobs.astype("<f4").tobytes()),
    ]
    if sample.top_ids is not None and sample.top_logprobs is not None:
        parts.append(_field(4, _topk(sample.top_ids, sample.top_logprobs)))
    return b"".join(parts)


def _topk(ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> bytes:
    empty = ids == NO_TOKEN
    return b"".join(
        [
            _field(1, np.where(empty, 0, ids).astype("<i4").tobytes()),
            _field(2, np.where(empty, EMPTY_LOGPROB, logprobs).astype("<f4").tobytes()),
            _number(3, ids.shape[1]),
            _number(4, ids.shape[0]),
        ]
    )


def _tensor(targets: Targets, values: NDArray[np.float32]) -> bytes:
    data = values.astype("<f4").tobytes()
    if targets.sparse_crow_indices is None or targets.sparse_col_indices is None:
        layout = _field(1, data)
    else:
        edges, columns = (
            np.array(one, "<i8").tobytes() for one in (targets.sparse_crow_indices, targets.sparse_col_indices)
        )
        layout = _field(2, b"".join([_field(1, data), _field(2, edges), _field(3, columns)]))
    return b"".join([layout, _number(3, FLOAT32), *(_number(4, size) for size in targets.shape)])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | BYTES) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | VARINT) + _varint(value)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
