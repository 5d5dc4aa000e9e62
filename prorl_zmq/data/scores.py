"""`Scores`: a model's log-probs of a text, and the likeliest tokens at each of its positions.

The job of a text's scores has them in a trajectory's arrays: T rows of 1 + k entries, each the text's own token and the
k likeliest, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..wire.records import NO_TOKEN, TEACHER
from .records import ARRAYS, RecordBuilder, records_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..wire.messages.jobs import RecordForm

SCORES_TOP_LIMIT = 64
"""Most likeliest tokens of a position: engines hold them for all positions of a text at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What a model says of a text of T tokens, at temperature 1 and before any cut of its distribution.

    Nothing comes before the first token of a segment: its log-prob is 0.0, and so are those of its likeliest tokens,
    whose ids are -1.
    """

    logprobs: NDArray[np.float32]
    """float32 [T]: of each token of the text, given those before it."""
    top_ids: NDArray[np.int32]
    """int32 [T, k]: the k likeliest tokens at each position, the likeliest first."""
    top_logprobs: NDArray[np.float32]
    """float32 [T, k]: of `top_ids`."""
    weight_version: int = 0
    """The version of the weights that scored the text."""

    def part(self, start: int, end: int) -> Scores:
        """Return the scores of the tokens from `start` up to `end`, as views."""
        columns = (self.logprobs[start:end], self.top_ids[start:end], self.top_logprobs[start:end])
        return Scores(*columns, self.weight_version)


def first_scores(top: int, weight_version: int = 0) -> Scores:
    """Return the scores of a text's first token."""
    empty = np.full((1, top), NO_TOKEN, np.int32)
    return Scores(np.zeros(1, np.float32), empty, np.zeros((1, top), np.float32), weight_version)


def scores_record(
    ranges: Sequence[tuple[int, int]], scores: Scores
) -> tuple[tuple[RecordForm, ...], NDArray[np.uint8]]:
    """Return the record `teacher` of a trajectory, and its part of the block, uint8.

    Args:
        ranges: the first token of each scored segment, and the token after its last. A first token has no row.
        scores: of these segments, one after the other.
    """
    builder, at = RecordBuilder(), 0
    for start, end in ranges:
        part = scores.part(at + 1, at + end - start)
        columns = (part.logprobs, part.top_ids, part.top_logprobs)
        builder.add(TEACHER, start + 1, dict(zip(ARRAYS[TEACHER], columns, strict=True)))
        at += end - start
    forms = builder.forms()
    block = np.zeros(records_bytes(forms), np.uint8)
    builder.write(block, 0, forms)
    return forms, block


def joined_scores(parts: Sequence[Scores]) -> Scores:
    """Return the scores of texts one after the other, with the oldest of their weight versions."""
    return Scores(
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top_logprobs for part in parts]),
        min(part.weight_version for part in parts),
    )


def scores_in_rows(token_ids: NDArray[np.int32], scores: Scores) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return a text's scores as the arrays of a trajectory: ids and log-probs, each [T * (1 + k)]."""
    ids = np.concatenate([token_ids[:, None], scores.top_ids], axis=1, dtype=np.int32)
    logprobs = np.concatenate([scores.logprobs[:, None], scores.top_logprobs], axis=1, dtype=np.float32)
    return ids.ravel(), logprobs.ravel()


def scores_of_rows(
    ids: NDArray[np.int32], logprobs: NDArray[np.float32], top: int, weight_version: int
) -> tuple[NDArray[np.int32], Scores]:
    """Return what `scores_in_rows` was given.

    Raises:
        ValueError: the arrays do not have whole rows.
    """
    ids, logprobs = ids.reshape(-1, 1 + top), logprobs.reshape(-1, 1 + top)
    own, likeliest = logprobs[:, 0].copy(), logprobs[:, 1:].copy()
    return ids[:, 0], Scores(own, ids[:, 1:].copy(), likeliest, weight_version)
