"""The dialect of `POST /v1/completions` with token ids, which any vLLM has, of late years at least.

Ids come back as `token_ids` (vLLM 0.10.2 and later) or, from older ones, as `token_id:N` in place of each token's text.
Parameters are all spelled out, since the server fills in what is left out from the model's generation_config.json.
The answer does not say which weights made it, and -9999 stands for what is not a number.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from ...errors import EngineFailed
from ..engine import Generation
from .dialect import TOP_K_ALL, UNTOLD, Turn, cached, decoded, finish, id_array, logprob_array, small_number, whole_span
from .vllm_generate import Usage, undone

_ID = "token_id:"


class _Request(msgspec.Struct, omit_defaults=True):
    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    logprobs: int
    return_token_ids: bool
    return_tokens_as_token_ids: bool
    ignore_eos: bool
    stop_token_ids: list[int]
    stop: list[str] = []
    seed: int | None = None
    model: str = ""


class _LogProbs(msgspec.Struct):
    token_logprobs: list[float | None]
    tokens: list[str] = []


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: Usage | None = None


class Completions:
    """Implements `Dialect` for completions with token ids.

    Args:
        model: what the server calls its model; empty: it serves only one.
    """

    name: ClassVar[str] = "completions"
    path: ClassVar[str] = "/v1/completions"
    tells_spans: ClassVar[bool] = False

    def __init__(self, model: str = "") -> None:
        self._model = model

    def request(self, turn: Turn) -> bytes:
        """Return the body of the request."""
        sampling = turn.sampling
        return msgspec.json.encode(
            _Request(
                prompt=turn.token_ids.tolist(),
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k or TOP_K_ALL,
                min_p=sampling.min_p,
                repetition_penalty=1.0,
                logprobs=0,
                return_token_ids=True,
                return_tokens_as_token_ids=True,
                ignore_eos=True,  # only the ids that are asked for end a turn
                stop_token_ids=list(turn.stop_token_ids),
                stop=list(sampling.stop),
                seed=sampling.seed,
                model=self._model,
            )
        )

    def generation(self, body: bytes, turn: Turn) -> Generation:
        """Read the body of an answer with status 200; see `Dialect`."""
        answer = decoded(body, _Answer)
        if len(answer.choices) != 1:
            raise EngineFailed(f"the server gave {len(answer.choices)} answers to one prompt")
        choice = answer.choices[0]
        token_ids = _token_ids(choice)
        if choice.logprobs is None:
            raise EngineFailed("the server gave no log-probs")
        return Generation(
            id_array(token_ids),
            logprob_array([undone(logprob) for logprob in choice.logprobs.token_logprobs]),
            whole_span(len(token_ids), UNTOLD),
            finish(choice.finish_reason),
            cached(answer.usage.cached_tokens if answer.usage else 0, turn),
        )


def _token_ids(choice: _Choice) -> list[int]:
    if choice.token_ids is not None:
        return choice.token_ids
    tokens = choice.logprobs.tokens if choice.logprobs else []
    numbers = [small_number(token[len(_ID) :]) if token.startswith(_ID) else None for token in tokens]
    ids = [number for number in numbers if number is not None]
    if not tokens or len(ids) != len(tokens):
        raise EngineFailed(
            "the server returned text only, and tokenising text again gives other tokens than were sampled; serve the "
            "model with vLLM 0.10.2 or later, which has return_token_ids"
        )
    return ids
