"""How much of a context a `PrefixIndex` has. vLLM's Python imports this too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from prorl_zmq.inference.hosting.prefix_index import PrefixIndex


def resident_tokens(index: PrefixIndex, token_ids: NDArray[np.int32]) -> int:
    """Count the tokens of a context that are in the cache, in full blocks from the first on."""
    keys = list(index._keys(token_ids, b""))
    lacking = next((at for at, key in enumerate(keys) if key not in index._resident), len(keys))
    return lacking * index._block_tokens
