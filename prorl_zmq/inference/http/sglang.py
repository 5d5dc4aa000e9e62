"""The dialect of SGLang's `POST /generate` with `input_ids`.

The log-probs are of the distribution after temperature, before top-p, top-k and min-p (that at temperature 1 with
SGLANG_RETURN_ORIGINAL_LOGPROB). Seeds hold only with `--enable-deterministic-inference`. The answer names the weights
that the server had at its end: a server that others update must be drained first.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from ...errors import EngineFailed
from ..engine import Generation
from .dialect import (
    TOP_K_ALL,
    UNTOLD,
    Turn,
    cached,
    decoded,
    finish,
    id_array,
    logprob_array,
    version_number,
    whole_span,
)


class _Sampling(msgspec.Struct, omit_defaults=True):
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    stop_token_ids: list[int]
    skip_special_tokens: bool
    no_stop_trim: bool
    stop: list[str] = []
    sampling_seed: int | None = None


class _Request(msgspec.Struct):
    input_ids: list[int]
    sampling_params: _Sampling
    return_logprob: bool = True
    logprob_start_len: int = -1
    """Of the answer only: those of the prompt would cost a prefill without the cache."""


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    """Per token: log-prob, id, text."""
    cached_tokens: int = 0
    weight_version: str | int | None = None


class _Answer(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] | None = None


class Sglang:
    """Implements `Dialect` for SGLang."""

    name: ClassVar[str] = "sglang"
    path: ClassVar[str] = "/generate"
    tells_spans: ClassVar[bool] = False

    def request(self, turn: Turn) -> bytes:
        """Return the body of the request."""
        sampling = turn.sampling
        parameters = _Sampling(
            max_new_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or TOP_K_ALL,
            min_p=sampling.min_p,
            repetition_penalty=1.0,
            stop_token_ids=list(turn.stop_token_ids),
            skip_special_tokens=False,
            no_stop_trim=True,
            stop=list(sampling.stop),
            sampling_seed=sampling.seed,
        )
        return msgspec.json.encode(_Request(turn.token_ids.tolist(), parameters))

    def generation(self, body: bytes, turn: Turn) -> Generation:
        """Read the body of an answer with status 200; see `Dialect`."""
        answer = decoded(body, _Answer)
        meta = answer.meta_info
        reason = meta.finish_reason.type if meta.finish_reason else None
        entries = meta.output_token_logprobs
        if entries is None and reason == "abort":
            entries = []  # aborted while it waited
        if entries is None:
            raise EngineFailed("the server returned text only: its answer has no meta_info.output_token_logprobs")
        token_ids = [token for _, token, _ in entries]
        if answer.output_ids is not None and entries and answer.output_ids != token_ids:
            raise EngineFailed(
                f"the server gave {len(answer.output_ids)} token ids with {len(entries)} log-probs, or log-probs of "
                "other tokens than those it generated"
            )
        version = UNTOLD if meta.weight_version is None else version_number(str(meta.weight_version))
        return Generation(
            id_array(token_ids),
            logprob_array([logprob for logprob, _, _ in entries]),
            whole_span(len(token_ids), version),
            finish(reason),
            cached(meta.cached_tokens, turn),
        )
