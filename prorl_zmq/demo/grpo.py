"""GRPO: what the demo's trainer learns with, from trajectories only.

A rollout's advantage is how much better its reward is than its group's mean, in the group's standard deviations (Shao
et al., 2024), so no value model is needed. The objective is PPO's clipped one (Schulman et al., 2017) over the tokens
that the policy generated, against the log-probs that the engine reported when it drew them: nothing is tokenised again,
and nothing is re-scored. A group whose rewards are all equal says nothing and carries no gradient. Rollouts that did
not complete have no reward, and count neither as failures nor in their group's mean. As in GRPO, a term holds the
policy near the one that training began with: it keeps the syntax that the base policy knows, and some curiosity.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..inference.policy import Adam, log_softmax, logprob_slopes, one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ..data.trajectory import Trajectory
    from ..inference.policy import Policy


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    """How the demo trains; the defaults solve its tasks in `steps * groups * group_size` rollouts."""

    steps: int = 22
    groups: int = 5
    """Prompts per step."""
    group_size: int = 8
    """Rollouts per prompt."""
    temperature: float = 1.0
    """That of the rollouts; log-probs are of the distribution at this temperature."""
    learning_rate: float = 1e-3
    decay: float = 0.9
    """Share of the learning rate that is gone at the last step, in a straight line; `reference_pull` falls with its
    square, so that the early steps keep trying commands and the last ones settle."""
    epochs: int = 6
    """How often each rollout is learned from."""
    minibatches: int = 2
    """Steps of the optimiser per epoch."""
    clip: float = 0.5
    """How far a token's probability may move from the engine's, as a ratio, before its gradient ends."""
    reference_pull: float = 0.2
    """Weight of the divergence KL(reference, policy) at each generated token's place."""
    max_gradient_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class StepStats:
    rollouts: int
    """All trajectories given."""
    completed: int
    """Those with a reward."""
    reward: float
    """Mean over the completed; NaN if there are none."""
    groups: int
    informative_groups: int
    """Groups whose rewards differ, and so carry a gradient."""
    generated_tokens: int
    """Of the completed."""
    gradient_norm: float
    """Mean over the optimiser's steps, before the limit."""
    clipped: float
    """Share of (token, optimiser step) pairs without gradient, since the policy had moved far enough already."""
    logprob_gap: float
    """Largest difference between the engine's log-prob of a token and the trainer's own under the same weights.
    About 1e-6, float32's rounding: what the trainer learns from is exactly what the engine did."""


class _Tokens(NamedTuple):
    """Generated tokens of many rollouts, side by side: arrays of length N."""

    contexts: NDArray[np.int32]
    """int32 [N, window]."""
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """The engine's."""
    versions: NDArray[np.int32]
    advantages: NDArray[np.float32]

    def take(self, rows: NDArray[np.intp]) -> _Tokens:
        return _Tokens(
            self.contexts[rows], self.token_ids[rows], self.logprobs[rows], self.versions[rows], self.advantages[rows]
        )


class Grpo:
    def __init__(self, policy: Policy, settings: GrpoSettings, seed: int = 0) -> None:
        self.policy = policy
        self.settings = settings
        self.weight_version = 0
        """The version of the policy's weights now: how many steps were made."""
        self._reference = policy.copy()
        self._adam = Adam(policy, settings.learning_rate, settings.max_gradient_norm)
        self._random = np.random.default_rng(seed)

    def save(self, folder: Path) -> Path:
        path = folder / f"{self.weight_version}.npz"
        self.policy.save(path)
        return path

    def step(self, trajectories: Sequence[Trajectory]) -> StepStats:
        """Learn from one batch of rollouts, of any weight versions and in any order."""
        # Rollouts finish in any order; sorted, the same rollouts give the same weights.
        completed = sorted((t for t in trajectories if t.reward is not None), key=lambda t: t.job_id)
        advantages = group_advantages(completed)
        tokens = self._tokens(completed, advantages)
        left = 1 - self.settings.decay * min(self.weight_version / self.settings.steps, 1.0)
        self._adam.learning_rate = left * self.settings.learning_rate
        with one_blas_thread():
            gap = self._logprob_gap(tokens)
            norms, clipped = self._learn(tokens, left**2 * self.settings.reference_pull)
        self.weight_version += 1
        informative = {t.group_id for t, advantage in zip(completed, advantages, strict=True) if advantage}
        return StepStats(
            rollouts=len(trajectories),
            completed=len(completed),
            reward=float(np.mean([t.reward for t in completed])) if completed else float("nan"),
            groups=len({t.group_id for t in trajectories}),
            informative_groups=len(informative),
            generated_tokens=len(tokens.token_ids),
            gradient_norm=float(np.mean(norms)) if norms else 0.0,
            clipped=float(np.mean(clipped)) if clipped else 0.0,
            logprob_gap=gap,
        )

    def _tokens(self, completed: Sequence[Trajectory], advantages: NDArray[np.float32]) -> _Tokens:
        window = self.policy.shape.window
        parts = [_Tokens(np.zeros((0, window), np.int32), *(np.zeros(0, t) for t in ("i4", "f4", "i4", "f4")))]
        for trajectory, advantage in zip(completed, advantages, strict=True):
            mask = trajectory.loss_mask
            parts.append(
                _Tokens(
                    self.policy.contexts(trajectory.token_ids)[mask],
                    trajectory.token_ids[mask],
                    trajectory.logprobs[mask],
                    trajectory.weight_versions[mask],
                    np.full(int(mask.sum()), advantage, np.float32),
                )
            )
        return _Tokens(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _logprob_gap(self, tokens: _Tokens) -> float:
        same = tokens.versions == self.weight_version
        if not same.any():
            return 0.0
        ours = _chosen(self.policy.logits(tokens.contexts[same]), tokens.token_ids[same], self.settings.temperature)
        return float(np.abs(ours - tokens.logprobs[same]).max())

    def _learn(self, tokens: _Tokens, reference_pull: float) -> tuple[list[float], list[float]]:
        """Make all the optimiser's steps; return each one's gradient norm and share of clipped tokens."""
        settings = self.settings
        count = len(tokens.token_ids)
        if not tokens.advantages.any():
            return [], []
        reference = np.exp(log_softmax(self._reference.logits(tokens.contexts), settings.temperature))
        norms: list[float] = []
        clipped: list[float] = []
        for _ in range(settings.epochs):
            for rows in np.array_split(self._random.permutation(count), min(settings.minibatches, count)):
                batch = tokens.take(rows)
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


def group_advantages(completed: Sequence[Trajectory]) -> NDArray[np.float32]:
    """Return each rollout's advantage, float32 [len(completed)]; 0 throughout a group whose rewards are all equal."""
    members: defaultdict[str, list[int]] = defaultdict(list)
    for index, trajectory in enumerate(completed):
        members[trajectory.group_id].append(index)
    rewards = np.array([trajectory.reward for trajectory in completed], np.float32)
    advantages = np.zeros(len(completed), np.float32)
    for indices in members.values():
        group = rewards[indices]
        if group.min() < group.max():
            advantages[indices] = (group - group.mean()) / group.std()
    return advantages


def _chosen(logits: NDArray[np.float32], token_ids: NDArray[np.int32], temperature: float) -> NDArray[np.float32]:
    return log_softmax(logits, temperature)[np.arange(len(token_ids)), token_ids]
