from __future__ import annotations

import warnings
from typing import Any

import finished_groups as made
import numpy as np
import pytest

from prorl_zmq import Sampling, collate
from prorl_zmq.data.correction import LogprobsWarning, check_logprobs

GROUPS = [made.group("a", made.with_tool(), made.rewritten(0.0)), made.group("b", made.chat([1, 2], [5, 6, 7]))]


def computed(shift: float = 0.0) -> Any:
    """The log-probs of a trainer that gives each token `shift` more than the engine; elsewhere it has no idea."""
    arrays = collate(GROUPS)
    return np.where(arrays["loss_mask"], arrays["logprobs"] + shift, np.nan)


def test_equal_log_probs_have_ratio_1_and_no_problem() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = check_logprobs(GROUPS, computed(), sampling=Sampling())
    assert (found.tokens, found.largest_gap, found.mean_ratio, found.clipped_share) == (9, 0.0, 1.0, 0.0)
    assert found.effective_share == pytest.approx(1.0)
    assert found.problems == ()


def test_the_figures_are_those_of_their_definitions() -> None:
    theirs = computed()
    row, column = np.argwhere(collate(GROUPS)["loss_mask"])[0]
    theirs[row, column] += np.log(4.0)
    found = check_logprobs(GROUPS, theirs, clip=3.0)
    assert found.largest_gap == pytest.approx(np.log(4.0), rel=1e-6)
    assert found.mean_gap == pytest.approx(np.log(4.0) / 9, rel=1e-6)
    assert found.mean_ratio == pytest.approx(12 / 9, rel=1e-6)
    assert found.effective_share == pytest.approx(12**2 / (9 * 24), rel=1e-6)
    assert found.clipped_share == pytest.approx(1 / 9)
    assert check_logprobs(GROUPS, theirs, clip=5.0).clipped_share == 0.0


@pytest.mark.parametrize(
    ("sampling", "temperature", "words"),
    [
        (Sampling(temperature=0.7), 1.0, "drawn at temperature 0.7, and the trainer's log-probs are of 1"),
        (Sampling(), 0.6, "drawn at temperature 1, and the trainer's log-probs are of 0.6"),
        (Sampling(temperature=0.0), 1.0, "temperature 0: the likeliest one"),
        (Sampling(top_p=0.9, min_p=0.1), 1.0, r"a part of the distribution \(top_p, min_p\)"),
        (Sampling(top_k=20), 1.0, r"\(top_k\)"),
    ],
)
def test_sampling_that_no_ratio_corrects_is_warned_of(sampling: Sampling, temperature: float, words: str) -> None:
    with pytest.warns(LogprobsWarning, match=words):
        found = check_logprobs(GROUPS, computed(), sampling=sampling, temperature=temperature)
    assert len(found.problems) == 1


def test_raw_log_probs_are_warned_of_unless_nothing_was_done_to_them() -> None:
    groups = [made.group("a", made.chat([1, 2], [5, 6, 7], logprobs_mode="raw_logprobs"))]
    theirs = collate(groups)["logprobs"]
    assert check_logprobs(groups, theirs, sampling=Sampling()).problems == ()
    with pytest.warns(LogprobsWarning, match="raw log-probs"):
        check_logprobs(groups, theirs, sampling=Sampling(temperature=0.7))
    with pytest.warns(LogprobsWarning, match="raw log-probs"):
        check_logprobs(groups, theirs)


def test_log_probs_of_something_else_are_told() -> None:
    with pytest.warns(LogprobsWarning, match="mean gap is 1 nats"):
        check_logprobs(GROUPS, computed(1.0))
    with pytest.raises(ValueError, match=r"have the shape \(3, 2\), those of the batch"):
        check_logprobs(GROUPS, np.zeros((3, 2)))
    theirs = computed()
    theirs[collate(GROUPS)["loss_mask"]] = np.nan
    with pytest.raises(ValueError, match="row 0 hold values that are not finite numbers"):
        check_logprobs(GROUPS, theirs)
