"""Log-probs of a completion's tokens and prompt, in OpenAI's and vLLM's form. Tokens are named by their ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .samples import Sample

NAMED_TOKEN = "token_id:{}"  # noqa: S105 - no password
"""How vLLM names a token in log-probs where texts would not be unique."""


def completion_logprobs(sample: Sample, top: int, *, echo: bool, replies: bool) -> dict[str, Any]:
    """Return `logprobs` of a completion's choice.

    Args:
        sample: the reply.
        top: how many likely tokens to list in place of each token, with the token itself; 0: none.
        echo: whether the prompt's tokens come first.
        replies: whether the reply's tokens are there.
    """
    tokens: list[int] = []
    own: list[float | None] = []
    likely: list[dict[int, float] | None] = []
    if echo and sample.prompt_scores is not None:
        scores = sample.prompt_scores
        tokens += sample.prompt_token_ids.tolist()
        own += [None, *scores.logprobs[1:].tolist()]
        rows = _rows(sample.prompt_token_ids, scores.logprobs, scores.top_ids[:, :top], scores.top_logprobs)
        likely += [None, *rows[1:]]
    if replies:
        tokens += sample.token_ids.tolist()
        own += sample.logprobs.tolist()
        if sample.top_ids is not None and sample.top_logprobs is not None:
            likely += _rows(sample.token_ids, sample.logprobs, sample.top_ids, sample.top_logprobs)
    return {
        "tokens": [NAMED_TOKEN.format(token) for token in tokens],
        "token_logprobs": own,
        "top_logprobs": [row and _named(row) for row in likely] if top else None,
    }


def _named(row: dict[int, float]) -> dict[str, float]:
    return {NAMED_TOKEN.format(token): logprob for token, logprob in row.items()}


def prompt_logprobs(sample: Sample, top: int) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: of each token but the first the log-probs of itself and `top` likely ones.

    The rank of a token is known if it is one of these.
    """
    scores = sample.prompt_scores
    assert scores is not None
    ids = scores.top_ids[:, :top]
    rows = _rows(sample.prompt_token_ids, scores.logprobs, ids, scores.top_logprobs)
    found: list[dict[str, Any] | None] = []
    for row, likely in zip(rows, ids.tolist(), strict=True):
        ranks = {token: rank for rank, token in enumerate(likely, 1)}
        found.append(
            {
                str(token): {"logprob": logprob, "rank": ranks.get(token), "decoded_token": None}
                for token, logprob in row.items()
            }
        )
    return [None, *found[1:]]


def _rows(
    own_ids: NDArray[np.int32],
    own_logprobs: NDArray[np.float32],
    top_ids: NDArray[np.int32],
    top_logprobs: NDArray[np.float32],
) -> list[dict[int, float]]:
    """Return for each token the log-probs by id: its own first, then those of likely tokens."""
    own = zip(own_ids.tolist(), own_logprobs.tolist(), strict=True)
    tops = zip(top_ids.tolist(), top_logprobs.tolist(), strict=True)
    return [
        {token: logprob, **{one: value for one, value in zip(ids, values, strict=False) if one not in (token, -1)}}
        for (token, logprob), (ids, values) in zip(own, tops, strict=True)
    ]
