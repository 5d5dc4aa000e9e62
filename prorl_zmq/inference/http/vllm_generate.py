"""The dialect of vLLM's token API, `POST /inference/v1/generate`: ids both ways, and a weight version per token.

Servers have it with `--enable-scale-out`. The log-probs are those of vLLM's `--logprobs-mode`; where one is not a
number, vLLM writes -9999, which is undone here.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from ...errors import EngineFailed
from ...wire.messages.engines import VersionSpan
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

NOT_A_NUMBER = -9999.0
"""At and below this, a log-prob was NaN or minus infinity."""


class _Sampling(msgspec.Struct, omit_defaults=True):
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    logprobs: int
    stop_token_ids: list[int]
    detokenize: bool
    ignore_eos: bool
    stop: list[str] = []
    seed: int | None = None


class _Request(msgspec.Struct):
    token_ids: list[int]
    sampling_params: _Sampling


class _LogProb(msgspec.Struct):
    token_id: int
    logprob: float | None


class _LogProbs(msgspec.Struct):
    content: list[_LogProb] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class PromptDetails(msgspec.Struct):
    """What vLLM tells of a prompt with `--enable-prompt-tokens-details`."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """vLLM's count of tokens."""

    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, found in the prefix cache; 0 where the server does not tell."""
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: Usage | None = None


class VllmGenerate:
    """Implements `Dialect` for vLLM's token API."""

    name: ClassVar[str] = "vllm"
    path: ClassVar[str] = "/inference/v1/generate"
    tells_spans: ClassVar[bool] = True

    def request(self, turn: Turn) -> bytes:
        """Return the body of the request."""
        sampling = turn.sampling
        parameters = _Sampling(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or TOP_K_ALL,
            min_p=sampling.min_p,
            logprobs=0,
            stop_token_ids=list(turn.stop_token_ids),
            detokenize=bool(sampling.stop),
            ignore_eos=True,  # only the ids that are asked for end a turn
            stop=list(sampling.stop),
            seed=sampling.seed,
        )
        return msgspec.json.encode(_Request(turn.token_ids.tolist(), parameters))

    def generation(self, body: bytes, turn: Turn) -> Generation:
        """Read the body of an answer with status 200; see `Dialect`."""
        answer = decoded(body, _Answer)
        if len(answer.choices) != 1:
            raise EngineFailed(f"the server gave {len(answer.choices)} answers to one prompt")
        choice = answer.choices[0]
        if choice.token_ids is None:
            raise EngineFailed("the server returned text only; token ids need a newer vLLM")
        if choice.logprobs is None or choice.logprobs.content is None:
            raise EngineFailed("the server gave no log-probs")
        content = choice.logprobs.content
        if any(entry.token_id != token for entry, token in zip(content, choice.token_ids, strict=False)):
            raise EngineFailed("the server gave log-probs of other tokens than those it generated")
        return Generation(
            id_array(choice.token_ids),
            logprob_array([undone(entry.logprob) for entry in content]),
            _spans(choice),
            finish(choice.finish_reason),
            cached(answer.usage.cached_tokens if answer.usage else 0, turn),
        )


def _spans(choice: _Choice) -> tuple[VersionSpan, ...]:
    if choice.weight_versions is None:
        return whole_span(len(choice.token_ids or ()), UNTOLD)
    return tuple(
        VersionSpan(version_number(span.version), span.start, span.end)
        for span in choice.weight_versions
        if span.end > span.start  # weights may change before the first token
    )


def undone(logprob: float | None) -> float | None:
    """Return None for what vLLM writes where a log-prob is not a number."""
    return None if logprob is None or logprob <= NOT_A_NUMBER else logprob
