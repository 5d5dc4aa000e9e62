"""A teacher of the embedded engine, and the log-probs of a policy in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from prorl_zmq.inference.embedded.base_policy import base_policy
from prorl_zmq.inference.policy import Policy

if TYPE_CHECKING:
    from numpy.typing import NDArray


def teacher_policy() -> Policy:
    """A frozen teacher: the base policy with other output weights."""
    policy, random = base_policy().copy(), np.random.default_rng(11)
    policy.parameters["output_weight"] += random.normal(0, 0.05, policy.parameters["output_weight"].shape).astype("f4")
    return policy


def exact_logprobs(policy: Policy, token_ids: NDArray[np.int32]) -> NDArray[np.float64]:
    """Give the distribution at each token of a text but the first, float64 [T - 1, V]."""
    widened: dict[str, Any] = {name: value.astype(np.float64) for name, value in policy.parameters.items()}
    wide = Policy(widened)
    logits: NDArray[np.float64] = wide.logits(wide.contexts(token_ids))[1:].astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    exact: NDArray[np.float64] = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return exact
