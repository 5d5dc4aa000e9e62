"""vLLM's log-probs of a prompt as `Scores`.

The first token has no entries. Each other one has its own entry first, then those of the ranks 1 to k, among which it
may be: k + 1 entries, or k where the list is keyed by id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..data.scores import Scores, first_scores, joined_scores
from ..errors import EngineFailed
from ..wire.records import NO_TOKEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def scores_by_rank(
    token_ids: NDArray[np.int32],
    top: int,
    counts: Sequence[int],
    entries: tuple[Sequence[int], Sequence[float], Sequence[int]],
) -> Scores:
    """Return the scores of a text, int32 [T].

    Args:
        token_ids: the text.
        top: k.
        counts: the number of entries of each token but the first.
        entries: ids, log-probs and ranks from 1, one token's after the other's.

    Raises:
        EngineFailed: they are entries of another text, or some are missing.
    """
    ids, logprobs, ranks = (np.array(each, kind) for each, kind in zip(entries, "ifi", strict=True))
    sizes = np.array(counts, np.int64)
    ends = np.cumsum(sizes)
    if len(counts) != len(token_ids) - 1 or 0 in counts or len(ids) != sizes.sum():
        raise EngineFailed(f"the engine scored {len(counts)} tokens of a text of {len(token_ids)}")
    own = ends - sizes
    if np.any(ids[own] != token_ids[1:]):
        raise EngineFailed("the engine scored another text than the one that it was given")
    rows, columns = np.repeat(np.arange(len(counts)), sizes), ranks - 1
    kept = (columns >= 0) & (columns < top)
    likeliest = Scores(
        logprobs[own], np.full((len(counts), top), NO_TOKEN, np.int32), np.zeros((len(counts), top), np.float32)
    )
    # Of two entries of one rank the later one stays: a token's own rank is the last of those that are as likely.
    likeliest.top_ids[rows[kept], columns[kept]] = ids[kept]
    likeliest.top_logprobs[rows[kept], columns[kept]] = logprobs[kept]
    return joined_scores([first_scores(top), likeliest])
