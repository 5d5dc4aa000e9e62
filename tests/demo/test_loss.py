"""The loss in PyTorch of docs/training.md."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from documents import blocks
from support.later import Later

if TYPE_CHECKING:
    import torch
else:
    torch = Later("torch")

pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="it is of the extra [train]"),
    pytest.mark.xdist_group("transformers"),
]


@pytest.fixture(scope="module")
def token_loss() -> Any:
    (text,) = [block for block in blocks("python") if "def token_loss" in block]
    defined: dict[str, Any] = {}
    exec(text, defined)
    return defined["token_loss"]


def gradient(token_loss: Any, ratio: float, advantage: float, weight: float = 1.0) -> tuple[float, float]:
    """Give loss, and its slope in the log-prob, for one token."""
    old = torch.tensor([-1.0])
    logprobs = (old + math.log(ratio)).requires_grad_()
    loss = token_loss(logprobs, old, old - math.log(weight), torch.tensor([advantage]))
    loss.backward()
    return float(loss.detach()), float(logprobs.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.25, 2.0, -2.5, -2.5),  # above 1 + 0.2, which DAPO allows
        (1.3, 2.0, -1.28 * 2, 0.0),
        (1.3, -2.0, 2.6, 2.6),  # a bad token that became likelier: full slope
        (0.75, -2.0, 0.8 * 2, 0.0),
        (0.75, 2.0, -1.5, -1.5),
        (0.85, -2.0, 1.7, 1.7),
    ],
)
def test_clip_higher(token_loss: Any, ratio: float, advantage: float, loss: float, slope: float) -> None:
    assert gradient(token_loss, ratio, advantage) == (pytest.approx(loss), pytest.approx(slope))


@pytest.mark.parametrize(("weight", "used"), [(0.5, 0.5), (1.5, 1.5), (2.0, 2.0), (7.0, 2.0)])
def test_importance_weights_are_truncated_above_and_scale_loss_and_slope(
    token_loss: Any, weight: float, used: float
) -> None:
    loss, slope = gradient(token_loss, 1.1, 3.0, weight)
    assert loss == pytest.approx(-used * 1.1 * 3, rel=1e-5)
    assert slope == pytest.approx(-used * 1.1 * 3, rel=1e-5)
