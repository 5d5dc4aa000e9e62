"""Find where a stop text (`Sampling.stop`) ends a turn, in token space, the same for every engine.

An engine may notice the text itself, late or never. The turn is cut after the token that completes the text. The kept
ids and log-probs are the engine's own, since the beginning of a sample does not depend on its end.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import msgspec

from ..inference.engine import Generation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray


def cut_at(generation: Generation, texts: Sequence[str], decode: Callable[[NDArray[np.int32]], str]) -> Generation:
    """Return the generation up to the token that completes the first of the texts; itself if it has none of them."""

    def ended(count: int) -> bool:
        said = decode(generation.token_ids[:count])
        return any(text in said for text in texts)

    if not texts or not ended(len(generation.token_ids)):
        return generation
    enough = bisect_left(range(len(generation.token_ids)), True, lo=1, key=ended)
    return Generation(
        generation.token_ids[:enough],
        generation.logprobs[:enough],
        tuple(
            msgspec.structs.replace(span, end=min(span.end, enough)) for span in generation.spans if span.start < enough
        ),
        "stop",
        generation.cached_tokens,
    )
