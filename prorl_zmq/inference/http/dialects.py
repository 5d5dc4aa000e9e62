"""The dialects of known servers: vLLM's token API, completions with token ids, SGLang, and ProRL's token servers.

A dialect encodes the request and decodes the answer of one generation, and does no I/O. Its answers go through
`engine.checked` afterwards; a dialect raises `EngineFailed` only for an answer that it cannot decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import msgspec

from ...errors import EngineFailed
from ...wire.messages.engines import VersionSpan
from ...wire.records import EXPERTS, NO_RECORDS, SAMPLING_MASK, TOP_LOGPROBS, Recorded
from ..engine import Generation, whole_span
from ..prompt_logprobs import scores_by_rank
from ..records import rows_wanted
from .answers import UNTOLD, decoded, finish, id_array, logprob_array, small_number, version_number
from .record_fields import decoded_npy, decoded_rows, mask_of, top_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ...data.scores import Scores
    from ...wire.messages.engines import FinishReason
    from ...wire.messages.jobs import Sampling
    from ..records import Arrays
    from .record_fields import MixtureShape

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
NOT_A_NUMBER = -9999.0
"""vLLM's value for a log-prob that is NaN or minus infinity."""
_ID = "token_id:"
TEXT_ONLY = (
    "the server returned text only, and tokenising text again gives other tokens than were sampled; serve the model "
    "with vLLM 0.10.2 or later, which has return_token_ids"
)


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
        parameters = {"logprobs": 0, "detokenize": bool(turn.sampling.stop), "ignore_eos": True, **_sampling(turn)}
        if turn.asked.top:
            parameters["logprobs"] = turn.asked.top + 1  # the server counts the drawn token as one of them
        if turn.asked.experts:
            parameters["routed_experts_prompt_start"] = turn.rows_known
        named = _named(turn.model)
        return msgspec.json.encode({"token_ids": turn.token_ids.tolist(), "sampling_params": parameters, **named})

    def scoring(self, text: Text) -> bytes:
        parameters = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": text.top, "detokenize": False}
        return msgspec.json.encode({"token_ids": text.token_ids.tolist(), "sampling_params": parameters})

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
        parameters = {"repetition_penalty": 1.0, "logprobs": turn.asked.top, "ignore_eos": True, **_sampling(turn)}
        if turn.asked.experts:
            parameters["routed_experts_prompt_start"] = turn.rows_known
        return msgspec.json.encode(
            {"prompt": turn.token_ids.tolist(), **parameters, **ids, **_named(turn.model or self._model)}
        )

    def scoring(self, text: Text) -> bytes:
        parameters = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": text.top}
        return msgspec.json.encode({"prompt": text.token_ids.tolist(), **parameters, **_named(self._model)})

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


class _Finish(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    """Per token: log-prob, id, text."""
    output_top_logprobs: list[list[tuple[float | None, int, str | None]] | None] | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    routed_experts: str | None = None
    cached_tokens: int = 0
    weight_version: str | int | None = None


class _SglangAnswer(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] | None = None


class Sglang:
    """Implements `Dialect` for SGLang's `POST /generate` with `input_ids`.

    The log-probs are of the distribution after temperature, before top-p, top-k and min-p (at temperature 1 with
    SGLANG_RETURN_ORIGINAL_LOGPROB). Seeds hold only with `--enable-deterministic-inference`. The answer names the
    weights that the server had at its end: drain a server before another program updates it.
    """

    name: ClassVar[str] = "sglang"
    path: ClassVar[str] = "/generate"
    tells_spans: ClassVar[bool] = False
    scores: ClassVar[bool] = False

    def __init__(self, mixture: MixtureShape | None = None) -> None:
        self._mixture = mixture

    def request(self, turn: Turn) -> bytes:
        given = _sampling(turn)
        names = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
        parameters = {"repetition_penalty": 1.0, "skip_special_tokens": False, "no_stop_trim": True}
        parameters |= {names.get(key, key): value for key, value in given.items()}
        # Log-probs of the answer only: those of the prompt would cost a prefill without the cache.
        more = {"return_logprob": True, "logprob_start_len": -1}
        if turn.asked.top:
            more["top_logprobs_num"] = turn.asked.top
        if turn.asked.mask:
            more["return_sampling_mask"] = True
        if turn.asked.experts:
            more |= {"return_routed_experts": True, "routed_experts_start_len": turn.rows_known}
        return msgspec.json.encode({"input_ids": turn.token_ids.tolist(), "sampling_params": parameters, **more})

    def records(self, body: bytes) -> tuple[str, ...]:  # noqa: ARG002 - the others are asked for by request
        return (TOP_LOGPROBS,)

    def generation(self, body: bytes, turn: Turn) -> Generation:
        answer = decoded(body, _SglangAnswer)
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
            self._records(meta, len(token_ids), turn),
        )

    def _records(self, meta: _Meta, count: int, turn: Turn) -> Arrays:
        found: Arrays = {}
        if turn.asked.top and count:
            rows = meta.output_top_logprobs or []
            if len(rows) != count:
                raise EngineFailed(f"the server gave {len(rows)} output_top_logprobs with {count} tokens")
            found |= top_of([[(token, value) for value, token, _ in row or ()] for row in rows], turn.asked.top)
        if turn.asked.mask and meta.output_token_sampling_mask is not None:
            found |= mask_of(meta.output_token_sampling_mask)
        if turn.asked.experts and meta.routed_experts is not None and self._mixture is not None:
            routes = decoded_rows(meta.routed_experts, self._mixture)
            # Servers that do not know `routed_experts_start_len` give all rows.
            first = turn.rows_known if len(routes) <= len(turn.token_ids) + count - 1 - turn.rows_known else 0
            routes = routes[: len(turn.token_ids) + count - 1 - first]
            found |= rows_wanted(routes, first, turn.rows_known)
        return found


class _ProrlAnswer(msgspec.Struct):
    response_ids: list[int] | None = None
    logprobs: list[float | None] | None = None


class Prorl:
    """Implements `Dialect` for the backends of a ProRL Agent server: `POST /generate` with `prompt_ids`.

    The answer has no finish reason, so it is inferred: `length` at the limit or the end of the context, else `stop`. A
    turn that the server aborted when it was put to sleep looks like a finished one: drain such servers first.
    """

    name: ClassVar[str] = "prorl"
    path: ClassVar[str] = "/generate"
    tells_spans: ClassVar[bool] = False
    scores: ClassVar[bool] = False

    def __init__(self, context_tokens: int = 0) -> None:
        self._context_tokens = context_tokens

    def request(self, turn: Turn) -> bytes:
        return msgspec.json.encode({"prompt_ids": turn.token_ids.tolist(), **_sampling(turn)})

    def records(self, body: bytes) -> tuple[str, ...]:  # noqa: ARG002 - it has none
        return ()

    def generation(self, body: bytes, turn: Turn) -> Generation:
        answer = decoded(body, _ProrlAnswer)
        if answer.response_ids is None:
            raise EngineFailed("the server returned text only: its answer has no response_ids")
        if answer.logprobs is None:
            raise EngineFailed("the server gave no log-probs")
        count = len(answer.response_ids)
        full = self._context_tokens and len(turn.token_ids) + count >= self._context_tokens
        stopped = count and answer.response_ids[-1] in turn.stop_token_ids
        reason: FinishReason = "length" if (full or count >= turn.sampling.max_tokens) and not stopped else "stop"
        return Generation(
            id_array(answer.response_ids), logprob_array(answer.logprobs), whole_span(count, UNTOLD), reason
        )


def _sampling(turn: Turn) -> dict[str, Any]:
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


def _number(logprob: float | None) -> float | None:
    """Return None for vLLM's value of a log-prob that is not a number."""
    return None if logprob is None or logprob <= NOT_A_NUMBER else logprob
