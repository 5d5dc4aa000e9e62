"""Top-k, top-p and min-p against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.inference.truncation import truncated, truncates
from prorl_zmq.wire.messages.jobs import Sampling

LOGITS = st.lists(st.integers(-80, 80), min_size=2, max_size=30, unique=True).map(lambda x: np.array(x, np.float32) / 8)


def kept(logits: np.ndarray, sampling: Sampling) -> set[int]:
    left = truncated(logits, sampling)
    stays = np.isfinite(left)
    assert (left[stays] == logits[stays]).all()
    return set(np.flatnonzero(stays).tolist())


def probabilities(logits: np.ndarray, temperature: float) -> np.ndarray:
    scaled = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return scaled / scaled.sum()


@pytest.mark.parametrize(
    ("sampling", "narrow"),
    [
        (Sampling(), False),
        (Sampling(top_k=1), True),
        (Sampling(top_p=0.9), True),
        (Sampling(min_p=0.1), True),
        (Sampling(temperature=0, top_k=1), False),
    ],
)
def test_what_truncates(sampling: Sampling, narrow: bool) -> None:
    assert truncates(sampling) == narrow


@given(LOGITS, st.integers(1, 40))
def test_top_k_keeps_the_k_likeliest(logits: np.ndarray, k: int) -> None:
    assert kept(logits, Sampling(top_k=k)) == set(np.argsort(-logits)[:k].tolist())


@given(LOGITS, st.floats(0.01, 0.99), st.floats(0.2, 3))
def test_top_p_keeps_the_smallest_set_with_that_share(logits: np.ndarray, p: float, temperature: float) -> None:
    share = probabilities(logits, temperature)
    stays = kept(logits, Sampling(temperature=temperature, top_p=p))
    order = [int(token) for token in np.argsort(-logits)]
    assert stays == set(order[: len(stays)])
    assert share[list(stays)].sum() >= p - 1e-9
    assert share[order[: len(stays) - 1]].sum() < p + 1e-9


@given(LOGITS, st.floats(0.01, 1.0), st.floats(0.2, 3))
def test_min_p_keeps_what_is_likely_enough(logits: np.ndarray, least: float, temperature: float) -> None:
    share = probabilities(logits, temperature)
    stays = kept(logits, Sampling(temperature=temperature, min_p=least))
    for token, probability in enumerate(share):
        if abs(probability - least * share.max()) > 1e-9:
            assert (token in stays) == (probability > least * share.max())


def test_top_p_is_of_what_the_others_left() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert kept(logits, Sampling(top_k=2, top_p=0.5)) == {0}  # 0.4 of 0.7 is more than half
    assert kept(logits, Sampling(top_p=0.5)) == {0, 1}
