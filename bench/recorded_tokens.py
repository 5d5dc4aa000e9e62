"""What the task `recorded` of bench/handlers.py writes for a seed, and the clients of bench/record_losses.py expect."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

LAYERS, CHOSEN = 48, 8
"""384 bytes a token: Qwen3-30B-A3B's."""


def context_of(seed: int, tokens: int) -> NDArray[np.int32]:
    """Return int32 [tokens]."""
    return np.random.default_rng([seed, 1]).integers(0, 150_000, tokens, np.int32)


def experts_of(seed: int, rows: int) -> NDArray[np.uint8]:
    """Return uint8 [rows, layers, k]."""
    return np.random.default_rng([seed, 2]).integers(0, 128, (rows, LAYERS, CHOSEN), np.uint8)
