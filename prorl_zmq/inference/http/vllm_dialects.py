"""The dialects of vLLM servers: their token API, and completions with token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from ...errors import EngineFailed
from ...wire.messages.engines import VersionSpan
from ...wire.records import EXPERTS, NO_LOGPROB, SAMPLING_MASK, TOP_LOGPROBS
from ..engine import Generation, whole_span
from ..prompt_logprobs import scores_by_rank
from ..records import rows_wanted
from .answers import UNTOLD, decoded, finish, id_array, logprob_array, small_number, version_number
from .dialects import cached, sampling_parameters
from .record_fields import decoded_npy, mask_of, top_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...data.scores import Scores
    from ..records import Arrays
    from .dialects import Text, Turn

_ID = "token_id:"
TEXT_ONLY = (
    "the server returned text only, and tokenising text again gives other tokens than were sampled; serve the model "
    "with vLLM 0.10.2 or later, which has return_token_ids"
)


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """vLLM's count of tokens, with details from `--enable-prompt-tokens-details`."""

    prompt_tokens_details: _PromptDetails | None = None


class _Candidate(msgspec.Struct):
    token_id: int
    logprob: float | None


class _LogProb(_Candidate):
    top_logprobs: list[_Candidate] = []


class _LogProbs(msgspec.Struct):
    """`content` is the token API's, the rest that of completions."""

    content: list[_LogProb] | None = None
    token_logprobs: list[float | None] | None = None
    tokens: list[str] = []
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Entry(msgspec.Struct):
    logprob: float
    rank: int


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Entry] | None] | None = None
    token_ids: list[int] | None = None
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None
    routed_experts: str | None = None
    sampling_mask: list[list[int]] | None = None

    def records(self, turn: Turn, candidates: Sequence[Sequence[tuple[int, float | None]]]) -> Arrays:
        """Return the records of an answer: `candidates` are the likeliest of each token, or more."""
        found: Arrays = {}
        if turn.asked.top:
            found |= top_of(candidates, turn.asked.top)
        if turn.asked.mask and self.sampling_mask is not None:
            found |= mask_of(self.sampling_mask)
        if turn.asked.experts and self.routed_experts is not None:
            positions = len(turn.token_ids) + len(candidates) - 1
            routes = decoded_npy(self.routed_experts)[: positions - turn.rows_known]
            found |= rows_wanted(routes, turn.rows_known, turn.rows_known)
        return found


class _VllmAnswer(msgspec.Struct):
    """`prompt_logprobs` is the token API's; completions have them in the choice."""

    choices: list[_Choice]
    usage: _Usage | None = None
    prompt_logprobs: list[dict[str, _Entry] | None] | None = None

    def choice(self) -> _Choice:
        if len(self.choices) != 1:
            raise EngineFailed(f"the server gave {len(self.choices)} answers to one prompt")
        return self.choices[0]

    def cached_tokens(self, turn: Turn) -> int:
        details = self.usage and self.usage.prompt_tokens_details
        return cached((details and details.cached_tokens) or 0, turn)

    def scores(self, text: Text) -> Scores:
        listed = self.choice().prompt_logprobs or self.prompt_logprobs
        if not listed:
            raise EngineFailed("the server gave no log-probs of the text")
        each = [entries or {} for entries in listed[1:]]
        counts = [len(entries) for entries in each]
        ids = [number if (number := small_number(key)) is not None else -1 for entries in each for key in entries]
        found = [entry for entries in each for entry in entries.values()]
        numbers = (ids, [entry.logprob for entry in found], [entry.rank for entry in found])
        return scores_by_rank(text.token_ids, text.top, counts, numbers)


class VllmGenerate:
    """Implements `Dialect` for `POST /inference/v1/generate`: ids both ways, and a weight version per token.

    Servers have it with `--enable-scale-out`. The log-probs are those of vLLM's `--logprobs-mode`.
    """

    name: ClassVar[str] = "vllm"
    path: ClassVar[str] = "/inference/v1/generate"
    tells_spans: ClassVar[bool] = True
    scores: ClassVar[bool] = True

    def request(self, turn: Turn) -> bytes:
        # Only the requested ids end a turn.
        parameters = {"logprobs": 0, "detokenize": bool(turn.sampling.stop), "ignore_eos": True}
        parameters |= sampling_parameters(turn)
        if turn.asked.top:
            parameters["logprobs"] = turn.asked.top + 1  # the server counts the drawn token as one of them
        if turn.asked.experts:
            parameters["routed_experts_prompt_start"] = turn.rows_known
        named = _named(turn.model)
        return msgspec.json.encode({"token_ids": turn.token_ids.tolist(), "sampling_params": parameters, **named})

    def scoring(self, text: Text) -> bytes:
        parameters = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": text.top, "detokenize": False}
        named = _named(text.model)
        return msgspec.json.encode({"token_ids": text.token_ids.tolist(), "sampling_params": parameters, **named})

    def scores_of(self, body: bytes, text: Text) -> Scores:
        return decoded(body, _VllmAnswer).scores(text)

    def records(self, body: bytes) -> tuple[str, ...]:
        choice = decoded(body, _VllmAnswer).choice()
        masks = () if choice.sampling_mask is None else (SAMPLING_MASK,)
        return (TOP_LOGPROBS, *masks, *(() if choice.routed_experts is None else (EXPERTS,)))

    def generation(self, body: bytes, turn: Turn) -> Generation:
        answer = decoded(body, _VllmAnswer)
        choice = answer.choice()
        if choice.token_ids is None:
            raise EngineFailed("the server returned text only; token ids need a newer vLLM")
        if choice.logprobs is None or choice.logprobs.content is None:
            raise EngineFailed("the server gave no log-probs")
        content = choice.logprobs.content
        if any(entry.token_id != token for entry, token in zip(content, choice.token_ids, strict=False)):
            raise EngineFailed("the server gave log-probs of other tokens than those it generated")
        spans = whole_span(len(choice.token_ids), UNTOLD)
        if choice.weight_versions is not None:
            spans = tuple(
                VersionSpan(version_number(span.version), span.start, span.end)
                for span in choice.weight_versions
                if span.end > span.start  # weights may change before the first token
            )
        return Generation(
            id_array(choice.token_ids),
            logprob_array([_number(entry.logprob) for entry in content]),
            spans,
            finish(choice.finish_reason),
            answer.cached_tokens(turn),
            choice.records(turn, [[(one.token_id, one.logprob) for one in entry.top_logprobs] for entry in content]),
        )


class Completions:
    """Implements `Dialect` for `POST /v1/completions` with token ids, which any recent vLLM has.

    Ids come back as `token_ids` (vLLM 0.10.2 and later) or, from older ones, as `token_id:N` in place of each token's
    text. All parameters are sent, since the server takes missing ones from the model's generation_config.json. The
    answer does not name its weights.
    """

    name: ClassVar[str] = "completions"
    path: ClassVar[str] = "/v1/completions"
    tells_spans: ClassVar[bool] = False
    scores: ClassVar[bool] = True

    def __init__(self, model: str = "") -> None:
        self._model = model

    def request(self, turn: Turn) -> bytes:
        ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        parameters = {"repetition_penalty": 1.0, "logprobs": turn.asked.top, "ignore_eos": True}
        parameters |= sampling_parameters(turn)
        if turn.asked.experts:
            parameters["routed_experts_prompt_start"] = turn.rows_known
        return msgspec.json.encode(
            {"prompt": turn.token_ids.tolist(), **parameters, **ids, **_named(turn.model or self._model)}
        )

    def scoring(self, text: Text) -> bytes:
        parameters = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": text.top}
        named = _named(text.model or self._model)
        return msgspec.json.encode({"prompt": text.token_ids.tolist(), **parameters, **named})

    def scores_of(self, body: bytes, text: Text) -> Scores:
        return decoded(body, _VllmAnswer).scores(text)

    def records(self, body: bytes) -> tuple[str, ...]:
        choice = decoded(body, _VllmAnswer).choice()
        return (TOP_LOGPROBS, *(() if choice.routed_experts is None else (EXPERTS,)))

    def generation(self, body: bytes, turn: Turn) -> Generation:
        answer = decoded(body, _VllmAnswer)
        choice = answer.choice()
        token_ids = choice.token_ids if choice.token_ids is not None else _ids_in_texts(choice)
        if choice.logprobs is None or choice.logprobs.token_logprobs is None:
            raise EngineFailed("the server gave no log-probs")
        return Generation(
            id_array(token_ids),
            logprob_array([_number(logprob) for logprob in choice.logprobs.token_logprobs]),
            whole_span(len(token_ids), UNTOLD),
            finish(choice.finish_reason),
            answer.cached_tokens(turn),
            choice.records(
                turn,
                _candidates(choice.logprobs.top_logprobs, len(token_ids)) if turn.asked.top else [()] * len(token_ids),
            ),
        )


def _named(model: str) -> dict[str, str]:
    return {"model": model} if model else {}


def _candidates(
    rows: Sequence[dict[str, float | None] | None] | None, count: int
) -> list[list[tuple[int, float | None]]]:
    if rows is None or len(rows) != count:
        raise EngineFailed(f"the server gave {len(rows or ())} top_logprobs with {count} tokens")
    return [list(zip(_numbers([*(row or {})]), (row or {}).values(), strict=True)) for row in rows]


def _ids_in_texts(choice: _Choice) -> list[int]:
    tokens = choice.logprobs.tokens if choice.logprobs else []
    if not tokens:
        raise EngineFailed(TEXT_ONLY)
    return _numbers(tokens)


def _numbers(tokens: Sequence[str]) -> list[int]:
    """Return the ids in tokens such as `token_id:7`."""
    numbers = [small_number(token[len(_ID) :]) if token.startswith(_ID) else None for token in tokens]
    ids = [number for number in numbers if number is not None]
    if len(ids) != len(tokens):
        raise EngineFailed(TEXT_ONLY)
    return ids


def _number(logprob: float | None) -> float | None:
    """Return None for a log-prob that is NaN or minus infinity, for which vLLM gives `NO_LOGPROB`."""
    return None if logprob is None or logprob <= NO_LOGPROB else logprob
