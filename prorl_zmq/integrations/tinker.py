"""Tinker: groups as `Datum`s for the losses `importance_sampling`, `ppo` and `cispo` (after its docs, Loss Functions).

    future = await training_client.forward_backward_async(datums(groups), loss_fn="importance_sampling")

Checked with the types of `tinker` 0.38; no training was run, since that needs its service. Tinker's weights stay there:
take the rollouts from engines that serve the same weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.rows import rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..data.group import Group


def datums(groups: Sequence[Group]) -> list[Any]:
    """Return a `Datum` per segment, of its T tokens without the last; needs `tinker`.

    Its loss inputs are shifted by one: `target_tokens` int64 [T-1], `logprobs` and `advantages` float32 [T-1]. An
    advantage is the rollout's reward less its group's mean, on the policy's tokens; elsewhere it is 0, so that these
    need no mask. Groups whose rewards are all equal teach nothing: leave them out with `keep="informative"`.

    Raises:
        NotTrainable: there are no groups, or one cannot be trained on.
    """
    from tinker import types

    found = []
    for row in rows_of(groups):
        advantage = row.reward - float(groups[row.group].rewards.mean())
        arrays = row.arrays
        inputs: dict[str, NDArray[Any]] = {
            "target_tokens": arrays.token_ids[1:].astype(np.int64),
            "logprobs": np.array(arrays.logprobs[1:]),
            "advantages": arrays.loss_mask[1:].astype(np.float32) * np.float32(advantage),
        }
        found.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(arrays.token_ids[:-1].tolist()),
                loss_fn_inputs={name: types.TensorData.from_numpy(values) for name, values in inputs.items()},
            )
        )
    return found
