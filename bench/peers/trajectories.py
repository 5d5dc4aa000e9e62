"""The trajectory that all sides of bench/fetch.py transfer: random ids and log-probs, in turns of 500 tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from prorl_zmq.data.trajectory import Role, TokenArrays, array_views, records_at
from prorl_zmq.data.trajectory_builder import TrajectoryBuilder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from prorl_zmq.wire.messages.jobs import RecordForm

TURN_TOKENS = 500
VOCABULARY = 150_000


class Made(NamedTuple):
    """A trajectory as the stage process sends it."""

    block: NDArray[np.uint8]
    arrays: TokenArrays
    """Views of the block."""
    records: tuple[RecordForm, ...] = ()

    @property
    def at(self) -> int:
        """The byte of the block at which the records begin."""
        return records_at(len(self.arrays.token_ids), len(self.arrays.turns), self.records)


def make_trajectory(seed: int, tokens: int, record: tuple[int, int] | None = None) -> Made:
    """Make a trajectory of `tokens` tokens: policy and tool take turns.

    Args:
        seed: of its numbers.
        tokens: its length.
        record: layers, and experts of a token, of which there is a record; None: there is none.
    """
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
    if record is not None:
        builder.add_records({"experts": draw.integers(0, 128, (builder.tokens - 1, *record), np.uint8)})
    records = builder.records
    block = builder.block(records)
    return Made(block, array_views(block, builder.tokens, builder.turns, records), records)
