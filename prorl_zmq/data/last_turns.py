"""The last turns of a running rollout, for people to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..wire.messages.watching import TOKENS_LIMIT, TURNS_LIMIT, TurnsSoFar
from .trajectory import Role, TokenArrays, pack_block

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..wire.messages.jobs import Steps
    from .trajectory import Trajectory


def turns_from(arrays: TokenArrays | Trajectory, start: int) -> TokenArrays:
    """Return the turns that have tokens from a place on; the first of them begins there."""
    turns = arrays.turns[arrays.turns[:, 1] > start]
    shown = np.maximum(turns - np.array([start, start, 0], np.int32), 0)
    return TokenArrays(
        arrays.token_ids[start:],
        arrays.loss_mask[start:],
        arrays.logprobs[start:],
        arrays.weight_versions[start:],
        shown,
    )


def turns_so_far(
    arrays: TokenArrays, backend: str, steps: Steps, known_tokens: int
) -> tuple[TurnsSoFar, NDArray[np.uint8] | None]:
    """Return how far a rollout has come, and its last turns in one block; None: there are no more than the known ones.

    Of many turns the last are in the block. The first of those loses its beginning if that does not fit.
    """
    turns, tokens = arrays.turns, len(arrays.token_ids)
    if tokens in (0, known_tokens):
        return TurnsSoFar(backend=backend, turns=len(turns), tokens=tokens), None
    start = max(0, tokens - TOKENS_LIMIT)
    first = max(int(np.searchsorted(turns[:, 1], start, side="right")), len(turns) - TURNS_LIMIT)
    cut = max(0, start - int(turns[first, 0]))
    start = min(int(turns[first, 0]) + cut, tokens - 1)  # behind empty turns too, one token is shown
    shown = turns_from(arrays, start)
    so_far = TurnsSoFar(
        backend=backend,
        turns=len(turns),
        tokens=tokens,
        shown_turns=len(shown.turns),
        shown_tokens=tokens - start,
        policy_turns_before=int(np.count_nonzero(turns[: len(turns) - len(shown.turns), 2] == Role.ASSISTANT)),
        cut_tokens=cut,
        steps=steps,
    )
    return so_far, pack_block(shown)
