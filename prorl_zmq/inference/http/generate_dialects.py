"""The dialects of servers with `POST /generate`: SGLang, and ProRL's token servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from ...errors import EngineFailed
from ...wire.records import TOP_LOGPROBS
from ..engine import Generation, whole_span
from ..records import rows_wanted
from .answers import UNTOLD, decoded, finish, id_array, logprob_array, version_number
from .dialects import cached, sampling_parameters
from .record_fields import decoded_rows, mask_of, top_of

if TYPE_CHECKING:
    from ...wire.messages.engines import FinishReason
    from ..records import Arrays
    from .dialects import Turn
    from .record_fields import MixtureShape


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
        given = sampling_parameters(turn)
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
        return msgspec.json.encode({"prompt_ids": turn.token_ids.tolist(), **sampling_parameters(turn)})

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
