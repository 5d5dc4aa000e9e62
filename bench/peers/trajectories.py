"""The trajectory that all sides of bench/fetch.py transfer: random ids and log-probs, in turns of 500 tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from prorl_zmq.data.trajectory import Role, TokenArrays, TrajectoryBuilder, array_views

if TYPE_CHECKING:
    from numpy.typing import NDArray

TURN_TOKENS = 500
VOCABULARY = 150_000


class Made(NamedTuple):
    """A trajectory as the stage process sends it."""

    block: NDArray[np.uint8]
    arrays: TokenArrays
    """Views of the block."""


def make_trajectory(seed: int, tokens: int) -> Made:
    """Make a trajectory of `tokens` tokens: policy and tool take turns."""
    draw = np.random.default_rng(seed)
    builder = TrajectoryBuilder()
    for turn in range(tokens // TURN_TOKENS):
        ids = draw.integers(0, VOCABULARY, TURN_TOKENS, dtype=np.int32)
        builder.begin_turn(Role.TOOL if turn % 2 else Role.ASSISTANT)
        if turn % 2:
            builder.add_context(ids)
        else:
            logprobs = -draw.exponential(1.0, TURN_TOKENS).astype(np.float32)
            builder.add_generated(ids, logprobs, np.full(TURN_TOKENS, 7, np.int32))
    block = builder.block()
    return Made(block, array_views(block, builder.tokens, builder.turns))
