"""The loss against values computed by hand: d loss / d logprob is -weight * ratio * advantage, or 0 where it is cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
from finished_groups import chat, group

torch = pytest.importorskip("torch", reason="the example needs torch: install the extra `train`")

from prorl_zmq.examples.train_torch.loss import divergence, group_advantages, importance_weights, token_loss

LOW, HIGH, LIMIT = 0.2, 0.28, 2.0


def gradient(ratio: float, advantage: float, weight: float = 1.0) -> tuple[float, float, tuple[int, int]]:
    """Give loss, its slope in the log-prob, and what was counted as clipped, for one token."""
    old = torch.tensor([-1.0])
    logprobs = (old + math.log(ratio)).requires_grad_()
    loss = token_loss(logprobs, old, old - math.log(weight), torch.tensor([advantage]), LOW, HIGH, LIMIT)
    loss.total.backward()
    assert logprobs.grad is not None
    return float(loss.total.detach()), float(logprobs.grad), (int(loss.clipped_low), int(loss.clipped_high))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, (0, 0)),
        (1.0, -2.0, 2.0, 2.0, (0, 0)),
        (1.25, 2.0, -2.5, -2.5, (0, 0)),  # above 1 + 0.2, which DAPO allows
        (1.3, 2.0, -1.28 * 2, 0.0, (0, 1)),
        (1.3, -2.0, 2.6, 2.6, (0, 0)),  # a bad token that became likelier: full slope
        (0.75, -2.0, 0.8 * 2, 0.0, (1, 0)),
        (0.75, 2.0, -1.5, -1.5, (0, 0)),
        (0.85, -2.0, 1.7, 1.7, (0, 0)),
    ],
)
def test_clip_higher(ratio: float, advantage: float, loss: float, slope: float, clipped: tuple[int, int]) -> None:
    assert gradient(ratio, advantage) == (pytest.approx(loss), pytest.approx(slope), clipped)


@pytest.mark.parametrize(("weight", "used"), [(0.5, 0.5), (1.5, 1.5), (2.0, 2.0), (7.0, 2.0)])
def test_importance_weights_are_truncated_above_and_scale_loss_and_slope(weight: float, used: float) -> None:
    loss, slope, _ = gradient(1.1, 3.0, weight)
    assert loss == pytest.approx(-used * 1.1 * 3, rel=1e-5)
    assert slope == pytest.approx(-used * 1.1 * 3, rel=1e-5)


def test_importance_weights_carry_no_gradient() -> None:
    old = torch.tensor([-1.0], requires_grad=True)
    assert not importance_weights(old, torch.tensor([-1.5]), LIMIT).requires_grad


def test_extreme_ratios_stay_finite() -> None:
    logprobs = torch.tensor([-1000.0, -0.1], requires_grad=True)
    old, advantages = torch.tensor([-0.1, -1000.0]), torch.tensor([1.0, 1.0])
    token_loss(logprobs, old, torch.tensor([-1000.0, -1.0]), advantages, LOW, HIGH, LIMIT).total.backward()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_advantages_are_of_the_group() -> None:
    groups = [
        group("a", *(chat([1], [2], reward) for reward in (1.0, 0.0, 0.0, 0.0))),
        group("b", *(chat([1], [2], reward) for reward in (0.5, 0.5))),
        group("c", chat([1], [2], 1.0)),
    ]
    advantages = group_advantages(groups)
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages[:4], (np.array([1, 0, 0, 0]) - 0.25) / 0.5, rtol=1e-4)
    assert not advantages[4:].any()


def test_divergence_is_k3() -> None:
    sampled, other = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    expected = ((math.exp(-0.5) - 1 + 0.5) + (math.exp(1.0) - 1 - 1.0)) / 2
    assert divergence(sampled, other) == pytest.approx(expected)
    assert divergence(sampled, sampled) == 0.0
    assert divergence(sampled[:0], other[:0]) == 0.0
