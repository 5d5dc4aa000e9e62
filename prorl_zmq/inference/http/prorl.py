"""The dialect of the ProRL Agent server's backends: `POST /generate`, prompt ids in, response ids and log-probs out.

The sampling parameters lie beside `prompt_ids`, under vLLM's names: those servers hand them on to `SamplingParams`.
The answer does not say why the turn ended, so it is inferred: `length` where the limit or the context was reached, else
`stop`. A turn that the server aborted (it does when it is put to sleep) cannot be told from one that ended: such
servers must be drained before they sleep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from ...errors import EngineFailed
from ..engine import Generation
from .dialect import TOP_K_ALL, UNTOLD, Turn, decoded, id_array, logprob_array, whole_span

if TYPE_CHECKING:
    from ...wire.messages.engines import FinishReason


class _Request(msgspec.Struct, omit_defaults=True):
    prompt_ids: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop_token_ids: list[int]
    stop: list[str] = []
    seed: int | None = None


class _Answer(msgspec.Struct):
    response_ids: list[int] | None = None
    logprobs: list[float | None] | None = None


class Prorl:
    """Implements `Dialect` for ProRL's token servers.

    Args:
        context_tokens: most tokens of a prompt and its answer together; 0: not known.
    """

    name: ClassVar[str] = "prorl"
    path: ClassVar[str] = "/generate"
    tells_spans: ClassVar[bool] = False

    def __init__(self, context_tokens: int = 0) -> None:
        self._context_tokens = context_tokens

    def request(self, turn: Turn) -> bytes:
        """Return the body of the request."""
        sampling = turn.sampling
        return msgspec.json.encode(
            _Request(
                prompt_ids=turn.token_ids.tolist(),
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k or TOP_K_ALL,
                min_p=sampling.min_p,
                stop_token_ids=list(turn.stop_token_ids),
                stop=list(sampling.stop),
                seed=sampling.seed,
            )
        )

    def generation(self, body: bytes, turn: Turn) -> Generation:
        """Read the body of an answer with status 200; see `Dialect`."""
        answer = decoded(body, _Answer)
        if answer.response_ids is None:
            raise EngineFailed("the server returned text only: its answer has no response_ids")
        if answer.logprobs is None:
            raise EngineFailed("the server gave no log-probs")
        return Generation(
            id_array(answer.response_ids),
            logprob_array(answer.logprobs),
            whole_span(len(answer.response_ids), UNTOLD),
            self._finish(answer.response_ids, turn),
        )

    def _finish(self, token_ids: list[int], turn: Turn) -> FinishReason:
        count = len(token_ids)
        if count and token_ids[-1] in turn.stop_token_ids:
            return "stop"
        full = self._context_tokens and len(turn.token_ids) + count >= self._context_tokens
        return "length" if full or count >= turn.sampling.max_tokens else "stop"
