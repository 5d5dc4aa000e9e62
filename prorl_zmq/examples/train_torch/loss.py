"""DAPO's loss over tokens, corrected for weights that were older when a token was drawn. Pure functions of tensors.

Three policies take part: `behaviour` drew the token, in the engine, one or more versions ago; `old` is the trainer's
when it began with the batch; the current one is being changed. The clipped objective (PPO) holds the current one near
`old`, with more room upwards than downwards (DAPO, Yu et al. 2025, "clip-higher"). What `old` and `behaviour` differ by
is corrected by a weight outside of it, exp(old - behaviour), cut off above (truncated importance sampling), as verl,
slime and NeMo RL have it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from ...data.group import Group

LOG_RATIO_LIMIT = 20.0
"""Beyond it a ratio's logarithm is cut off: its exponential would overflow."""
DEVIATION_FLOOR = 1e-6
"""Added to a group's standard deviation, as verl does."""


class TokenLoss(NamedTuple):
    total: Tensor
    """Sum over the tokens; divide it by the number of tokens in the whole optimiser's batch."""
    clipped_low: Tensor
    """How many tokens have no gradient, since a bad one is unlikely enough already."""
    clipped_high: Tensor
    """… since a good one is likely enough already."""


def token_loss(
    logprobs: Tensor,
    old: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    weight_limit: float,
) -> TokenLoss:
    """Return the loss of tokens that the policy generated; all tensors are float32 [N]."""
    ratio = torch.exp((logprobs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    return TokenLoss(
        -(importance_weights(old, behaviour, weight_limit) * objective).sum(),
        ((ratio < 1 - clip_low) & (advantages < 0)).sum(),
        ((ratio > 1 + clip_high) & (advantages > 0)).sum(),
    )


def importance_weights(old: Tensor, behaviour: Tensor, limit: float) -> Tensor:
    """Return exp(old - behaviour), at most `limit`, without a gradient."""
    return torch.exp((old - behaviour).detach().clamp(max=LOG_RATIO_LIMIT)).clamp(max=limit)


def group_advantages(groups: Sequence[Group]) -> NDArray[np.float32]:
    """Return each rollout's advantage, float32, in the order of the groups: (reward - mean) / standard deviation.

    Mean and (unbiased) deviation are the group's (GRPO, Shao et al. 2024), so no value model is needed. A rollout alone
    has none: 0.
    """
    parts = [np.zeros(0)]
    for group in groups:
        rewards = group.rewards
        deviation = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
        parts.append((rewards - rewards.mean()) / (deviation + DEVIATION_FLOOR))
    return np.concatenate(parts).astype(np.float32)


def divergence(sampled: Tensor, other: Tensor) -> float:
    """Estimate KL(sampled ‖ other) in nats per token from tokens that the first policy drew (Schulman's k3)."""
    difference = (other - sampled).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return float((difference.exp() - 1 - difference).mean()) if len(difference) else 0.0
