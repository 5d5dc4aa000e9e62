"""The learner: one batch of groups in, a step of training, and what it saw. Knows neither the service nor the clock.

The optimiser makes several steps per batch, each with a share of its rollouts. A step's loss is the sum over the
tokens of all its micro-batches by the number of these tokens, so that each token counts the same, however rows were put
together (DAPO's token-level loss). Groups come from a batch that keeps the informative ones, so each has a gradient.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ...data.collation import collate
from .loss import divergence, group_advantages, importance_weights, token_loss
from .weights import save_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from ...data.group import Group
    from .model import Model

MICRO_BATCH_TOKENS = 4096
"""Most tokens of one forward pass, padding included."""


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """How the learner learns; the defaults solve the example's tasks."""

    learning_rate: float = 1e-3
    epochs: int = 2
    """How often each rollout is learned from. Four need fewer steps, each of which takes longer; two leave the cores to
    the rollouts."""
    minibatches: int = 2
    """Steps of the optimiser per epoch."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    """DAPO's: a token that was unlikely can become likely sooner than one that was likely can vanish."""
    weight_limit: float = 2.0
    """Largest importance weight of a token."""
    warm_pull: float = 0.1
    """Weight of KL(warm start ‖ policy) at each generated token. DAPO has none; without it so small a policy loses its
    syntax, and its curiosity."""
    max_gradient_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class LearnStats:
    tokens: int
    """Tokens of all rows."""
    generated_tokens: int
    loss: float
    """Mean over the optimiser's steps, as `gradient_norm` and what was clipped."""
    gradient_norm: float
    """Before the limit."""
    clipped_low: float
    clipped_high: float
    """Share of tokens without gradient."""
    entropy: float
    """Of the next token's distribution, in nats, before the step."""
    kl_behaviour: float
    """KL(behaviour ‖ policy before the step), k3, nats per token: what staleness costs."""
    kl_warm: float
    """KL(warm start ‖ policy before the step), nats per token: how far it has come."""
    effective_share: float
    """Effective sample size of the importance weights, of 1."""
    staleness_mean: float
    staleness_max: int
    """How many versions older the weights were that drew a token."""
    logprob_gap: float
    """Largest difference between the engine's log-prob and the learner's for the same token and weights: rounding."""


class Interrupted(Exception):
    """The step was given up on the way; the learner is of no more use."""


class _Rows(NamedTuple):
    """A batch: tensors [B, T], padded on the right, on the model's device."""

    token_ids: Tensor
    """int64"""
    mask: Tensor
    """bool: true where the policy spoke."""
    behaviour: Tensor
    """float32: log-probs of what the policy spoke, by the engine that drew it."""
    advantages: Tensor
    """float32 [B, 1]"""
    staleness: Tensor
    """int64: versions; only where the policy spoke."""
    number: Tensor
    """int64: counts the tokens that the policy spoke, by rows and places."""

    @classmethod
    def of(cls, groups: Sequence[Group], weight_version: int, device: torch.device) -> _Rows:
        """Return the rows of groups, the shortest first."""
        arrays = collate(groups)
        order = np.argsort(arrays["lengths"], kind="stable")
        advantages = group_advantages(groups)[arrays["trajectory"]]
        token_ids, mask, logprobs, versions = (
            arrays[name][order] for name in ("token_ids", "loss_mask", "logprobs", "weight_versions")
        )
        number = np.zeros(mask.shape, np.int64)
        number[mask] = np.arange(mask.sum())
        tensors = (
            torch.from_numpy(token_ids.astype(np.int64)),
            torch.from_numpy(mask),
            torch.from_numpy(logprobs),
            torch.from_numpy(advantages[order])[:, None],
            weight_version - torch.from_numpy(versions.astype(np.int64)),
            torch.from_numpy(number),
        )
        return cls(*(tensor.to(device) for tensor in tensors))

    def micro_batches(self, rows: NDArray[np.intp]) -> Iterator[_Rows]:
        """Return these rows, ascending, in parts without more padding than they need."""
        lengths = self.lengths().cpu()[rows]
        start = 0
        for end in range(1, len(rows) + 1):
            if end == len(rows) or (end + 1 - start) * int(lengths[end]) > MICRO_BATCH_TOKENS:
                part = torch.from_numpy(rows[start:end]).to(self.mask.device)
                width = int(lengths[start:end].max())
                yield _Rows(*(tensor[part, :width] for tensor in self))
                start = end

    def lengths(self) -> Tensor:
        """Return where each row's last generated token ends; nothing behind it is needed."""
        places = torch.arange(1, self.mask.shape[1] + 1, device=self.mask.device)
        return (self.mask * places).max(dim=1).values


class _Before(NamedTuple):
    """What was said of the N tokens that the policy spoke, before the step."""

    logprobs: Tensor
    """float32 [N]: by the policy."""
    warm: Tensor
    """float32 [N, vocabulary]: by the warm start, of all tokens."""
    entropy: float
    kl_warm: float


class Learner:
    def __init__(self, model: Model, warm: Model, settings: LearnerSettings, seed: int) -> None:
        self.model = model
        self.settings = settings
        self.weight_version = 0
        """How many batches the weights have learned from."""
        self._warm = copy.deepcopy(warm)
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._random = np.random.default_rng(seed)

    def save(self, folder: Path) -> Path:
        path = folder / f"{self.weight_version}.safetensors"
        save_weights(self.model, path)
        return path

    def state(self) -> dict[str, Any]:
        """Return all that a later learner needs to continue as this one would: tensors and plain data."""
        return {
            "weight_version": self.weight_version,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "random": self._random.bit_generator.state,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned; the learning rate is that of these settings."""
        self.weight_version = state["weight_version"]
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.learning_rate
        self._random.bit_generator.state = state["random"]

    def learn(self, groups: Sequence[Group], check: Callable[[], None] = lambda: None) -> LearnStats:
        """Learn from one batch; afterwards `weight_version` is one higher."""
        rows = _Rows.of(groups, self.weight_version, self.model.device)
        before = self._look(rows, check)
        behaviour, staleness = rows.behaviour[rows.mask], rows.staleness[rows.mask]
        weights = importance_weights(before.logprobs, behaviour, self.settings.weight_limit)
        fresh = (before.logprobs - behaviour)[staleness == 0]
        loss, norm, low, high = np.mean(list(self._optimize(rows, before, check)), axis=0).tolist()
        self.weight_version += 1
        return LearnStats(
            tokens=int(rows.lengths().sum()),
            generated_tokens=len(behaviour),
            loss=loss,
            gradient_norm=norm,
            clipped_low=low,
            clipped_high=high,
            entropy=before.entropy,
            kl_behaviour=divergence(behaviour, before.logprobs),
            kl_warm=before.kl_warm,
            effective_share=float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
            staleness_mean=float(staleness.float().mean()),
            staleness_max=int(staleness.max()),
            logprob_gap=float(fresh.abs().max()) if len(fresh) else 0.0,
        )

    def _look(self, rows: _Rows, check: Callable[[], None]) -> _Before:
        """Compute what the policy and the warm start say of the rows, before anything changes."""
        logprobs, warm, entropies, divergences = [], [], [], []
        with torch.no_grad():
            for part in rows.micro_batches(np.arange(len(rows.token_ids))):
                check()
                scores, theirs = _scores(self.model, part), _scores(self._warm, part)
                logprobs.append(_chosen(scores, part))
                warm.append(theirs)
                entropies.append(-(scores.exp() * scores).sum(-1))
                divergences.append((theirs.exp() * (theirs - scores)).sum(-1))
        return _Before(
            torch.cat(logprobs),
            torch.cat(warm),
            float(torch.cat(entropies).mean()),
            float(torch.cat(divergences).mean()),
        )

    def _optimize(
        self, rows: _Rows, before: _Before, check: Callable[[], None]
    ) -> Iterator[tuple[float, float, float, float]]:
        """Make the optimiser's steps; return each one's loss, gradient norm, and shares clipped low and high."""
        settings, count = self.settings, len(rows.token_ids)
        for _ in range(settings.epochs):
            for share in np.array_split(self._random.permutation(count), min(settings.minibatches, count)):
                chosen = np.sort(share)  # by length, as all rows are
                tokens = int(rows.mask[torch.from_numpy(chosen).to(rows.mask.device)].sum())
                totals = torch.zeros(3, device=rows.mask.device)
                for part in rows.micro_batches(chosen):
                    check()
                    scores, index = _scores(self.model, part), part.number[part.mask]
                    loss = token_loss(
                        _chosen(scores, part),
                        before.logprobs[index],
                        part.behaviour[part.mask],
                        part.advantages.expand_as(part.mask)[part.mask],
                        settings.clip_low,
                        settings.clip_high,
                        settings.weight_limit,
                    )
                    warm = before.warm[index]
                    total = loss.total + settings.warm_pull * (warm.exp() * (warm - scores)).sum()
                    torch.autograd.backward(total / tokens)
                    totals += torch.stack([total.detach(), loss.clipped_low, loss.clipped_high])
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.max_gradient_norm)
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
                total_loss, low, high = (totals / tokens).tolist()
                yield total_loss, float(norm), low, high


def _scores(model: Model, rows: _Rows) -> Tensor:
    """Return the log-probs of all tokens wherever the policy spoke, [N, vocabulary]."""
    hidden = model.hidden(rows.token_ids[:, :-1])
    return torch.log_softmax(model.logits(hidden[rows.mask[:, 1:]]), dim=-1)


def _chosen(scores: Tensor, rows: _Rows) -> Tensor:
    """Return the log-probs of the tokens that the policy spoke, [N], by rows and places."""
    return scores.gather(1, rows.token_ids[:, 1:][rows.mask[:, 1:]][:, None])[:, 0]
