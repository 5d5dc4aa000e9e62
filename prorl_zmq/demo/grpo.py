"""The learner of `prorl demo`: GRPO (Shao et al., 2024) on groups of rollouts, in numpy.

PPO's clipped ratio is taken against the engine's log-probs, which also corrects for rollouts of older weights. A pull
towards the base policy preserves its syntax and its curiosity.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..inference.policy import Adam, Policy, log_softmax, logprob_slopes, one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ..data.group import Group


@dataclass(frozen=True, slots=True)
class Settings:
    """How the demo trains; the defaults solve its tasks in `steps * groups * group_size` rollouts."""

    steps: int = 22
    groups: int = 5
    """Groups of a step."""
    group_size: int = 8
    """Rollouts per prompt."""
    temperature: float = 1.0
    """Of the rollouts; log-probs are of the distribution at this temperature."""
    learning_rate: float = 1e-3
    decay: float = 0.9
    """Share of the learning rate that is gone at the last step, in a straight line; `reference_pull` falls with its
    square, so that early steps explore and late ones settle."""
    epochs: int = 6
    """How often each rollout is learned from."""
    minibatches: int = 2
    """Steps of the optimiser per epoch."""
    clip: float = 0.5
    """How far a token's probability may move from the engine's, as a ratio, before its gradient ends."""
    reference_pull: float = 0.2
    """Weight of KL(base policy, policy) at each generated token."""
    max_gradient_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class StepStats:
    """What a step of training saw, over the tokens that the policy generated."""

    generated_tokens: int
    informative_groups: int
    """Groups whose rewards differ, and so carry a gradient."""
    entropy: float
    """Of the next token's distribution before the step, in nats."""
    gradient_norm: float
    """Mean over the optimiser's steps, before the limit."""
    clipped: float
    """Share of (token, optimiser step) pairs without gradient, since the policy had moved far enough."""
    staleness_max: int
    """Versions between the weights that drew the oldest token and the trainer's."""
    logprob_gap: float
    """Largest difference between the engine's log-prob of a token and the trainer's own under the same weights: about
    1e-6, float32's rounding."""


class _Tokens(NamedTuple):
    """The generated tokens of many rollouts: arrays of length N; `logprobs` and `versions` are the engine's."""

    contexts: NDArray[np.int32]
    """int32 [N, window]."""
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    advantages: NDArray[np.float32]


class Grpo:
    """Trains a policy in place."""

    def __init__(self, policy: Policy, settings: Settings, seed: int = 0) -> None:
        self.policy = policy
        self.weight_version = 0
        """How many steps the weights have made."""
        self._settings = settings
        self._reference = policy.copy()
        self._adam = Adam(policy, settings.learning_rate, settings.max_gradient_norm)
        self._random = np.random.default_rng(seed)

    def save(self, folder: Path) -> Path:
        """Write the weights to a file of their version; return its path."""
        self.policy.save(path := folder / f"{self.weight_version}.npz")
        return path

    def state(self) -> dict[str, NDArray[Any]]:
        """Return all that `load_state` needs to continue as this learner would."""
        return {
            **{f"policy.{name}": value for name, value in self.policy.parameters.items()},
            **self._adam.state(),
            "weight_version": np.array(self.weight_version),
            "random": np.array(json.dumps(self._random.bit_generator.state)),
        }

    def load_state(self, state: dict[str, NDArray[Any]]) -> None:
        """Continue from what `state` returned; raises `KeyError` or `ValueError` for the state of another learner."""
        for name, value in self.policy.parameters.items():
            value[...] = state[f"policy.{name}"]
        self._adam.load_state(state)
        self.weight_version = int(state["weight_version"])
        self._random.bit_generator.state = json.loads(str(state["random"]))

    def step(self, groups: Sequence[Group]) -> StepStats:
        """Learn from a batch of groups of any weight versions; afterwards `weight_version` is one higher.

        Groups of self-play are split, so that each role's advantages have its own baseline.
        """
        settings = self._settings
        groups = [role for group in groups for role in group.split(group.model)]
        tokens = self._tokens(groups)
        left = 1 - settings.decay * min(self.weight_version / settings.steps, 1.0)
        self._adam.learning_rate = left * settings.learning_rate
        with one_blas_thread():
            scores = log_softmax(self.policy.logits(tokens.contexts), settings.temperature)
            gaps = np.abs(scores[np.arange(len(scores)), tokens.token_ids] - tokens.logprobs)
            norms, clipped = self._learn(tokens, left**2 * settings.reference_pull)
        fresh = gaps[tokens.versions == self.weight_version]
        stats = StepStats(
            generated_tokens=len(tokens.token_ids),
            informative_groups=sum(bool(advantages_of(group).any()) for group in groups),
            entropy=float(-(np.exp(scores) * scores).sum(axis=1).mean()),
            gradient_norm=float(np.mean(norms)) if norms else 0.0,
            clipped=float(np.mean(clipped)) if clipped else 0.0,
            staleness_max=int((self.weight_version - tokens.versions).max()),
            logprob_gap=float(fresh.max(initial=0.0)),
        )
        self.weight_version += 1
        return stats

    def _tokens(self, groups: Sequence[Group]) -> _Tokens:
        parts = []
        # Groups come in any order; sorted, the same groups give the same weights.
        for group in sorted(groups, key=lambda group: (group.prompt_id, group.group_id.partition("/")[2])):
            for rollout, advantage in zip(group.trajectories, advantages_of(group), strict=True):
                ids, advantages = rollout.token_ids, np.full(len(rollout.token_ids), advantage)
                arrays = (self.policy.contexts(ids), ids, rollout.logprobs, rollout.weight_versions, advantages)
                parts.append([array[rollout.loss_mask] for array in arrays])
        return _Tokens(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _learn(self, tokens: _Tokens, reference_pull: float) -> tuple[list[float], list[float]]:
        """Make all the optimiser's steps; return each one's gradient norm and share of clipped tokens."""
        settings, count = self._settings, len(tokens.token_ids)
        norms: list[float] = []
        clipped: list[float] = []
        if not tokens.advantages.any():
            return norms, clipped
        reference = np.exp(log_softmax(self._reference.logits(tokens.contexts), settings.temperature))
        for _ in range(settings.epochs):
            for rows in np.array_split(self._random.permutation(count), min(settings.minibatches, count)):
                taken: list[Any] = [array[rows] for array in tokens]
                batch = _Tokens(*taken)
                forward = self.policy.forward(batch.contexts)
                logprobs = log_softmax(forward.logits, settings.temperature)
                ratio = np.exp(logprobs[np.arange(len(rows)), batch.token_ids] - batch.logprobs)
                # min(ratio * A, clip(ratio) * A) has no slope once the ratio has left the clip range on A's side.
                far = np.where(batch.advantages > 0, ratio > 1 + settings.clip, ratio < 1 - settings.clip)
                weights = np.where(far, np.float32(0), batch.advantages * ratio)
                slopes = logprob_slopes(logprobs, batch.token_ids, weights, settings.temperature)
                slopes += (reference_pull / settings.temperature) * (reference[rows] - np.exp(logprobs))
                norms.append(self._adam.step(self.policy.gradient(forward, slopes / np.float32(len(rows)))))
                clipped.append(float(far.mean()))
        return norms, clipped


def advantages_of(group: Group) -> NDArray[np.float32]:
    """Return each rollout's advantage, float32 [n]; 0 if the rewards are all equal."""
    rewards = group.rewards
    spread = rewards.std() if rewards.min() < rewards.max() else np.inf
    advantages: NDArray[np.float32] = ((rewards - rewards.mean()) / spread).astype(np.float32)
    return advantages
