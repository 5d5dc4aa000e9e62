"""pass@k beside what it is by definition, and intervals beside what they promise."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.evaluation.passes import (
    CONFIDENCE,
    Tally,
    _student,
    mean_estimate,
    pass_at_k,
    pass_estimate,
    percentage,
)


def test_pass_at_k_is_the_share_of_draws_with_a_solved_one() -> None:
    for samples in range(1, 8):
        for solved, k in itertools.product(range(samples + 1), range(1, samples + 1)):
            draws = list(itertools.combinations([index < solved for index in range(samples)], k))
            assert pass_at_k(samples, solved, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@given(st.integers(1, 3000), st.data())
def test_pass_at_k_grows_with_k_and_with_what_is_solved(samples: int, data: st.DataObject) -> None:
    solved = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    value = pass_at_k(samples, solved, k)
    assert 0.0 <= value <= 1.0
    assert pass_at_k(samples, solved, 1) == pytest.approx(solved / samples)
    if k < samples:
        assert pass_at_k(samples, solved, k + 1) >= value
    if solved < samples:
        assert pass_at_k(samples, solved + 1, k) >= value


@pytest.mark.parametrize(("samples", "solved", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0), (0, 0, 1)])
def test_what_has_no_pass_at_k(samples: int, solved: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"there is no pass@"):
        pass_at_k(samples, solved, k)


def test_one_sample_each_has_wilsons_interval() -> None:
    from scipy import stats  # it takes a second

    estimate = pass_estimate([Tally(1, int(index < 7)) for index in range(20)], 1)
    assert estimate is not None
    wilson = stats.binomtest(7, 20).proportion_ci(0.95, method="wilson")
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.35, wilson.low, wilson.high))


def test_problems_with_too_few_samples_are_left_out() -> None:
    tallies = [Tally(4, 1), Tally(4, 0), Tally(3, 3)]
    estimate = pass_estimate(tallies, 4)
    assert estimate is not None
    assert (estimate.value, estimate.problems) == (0.5, 2)
    assert pass_estimate(tallies, 5) is None
    assert pass_estimate([], 1) is None


def test_samples_of_one_problem_are_no_independent_evidence() -> None:
    """800 samples of 10 problems, each all-or-nothing, say no more than 10 samples would."""
    clustered = pass_estimate([Tally(80, 80 * (index < 5)) for index in range(10)], 1)
    spread = pass_estimate([Tally(1, index < 400) for index in range(800)], 1)
    assert clustered is not None
    assert spread is not None
    assert clustered.high - clustered.low > 0.45
    assert spread.high - spread.low < 0.08


@pytest.mark.parametrize("solved", [0, 8])
def test_where_all_problems_are_alike_there_is_still_doubt(solved: int) -> None:
    estimate = pass_estimate([Tally(8, solved)] * 30, 4)
    assert estimate is not None
    assert estimate.value == solved / 8
    assert 0.05 < estimate.high - estimate.low < 0.2
    assert 0.0 <= estimate.low <= estimate.value <= estimate.high <= 1.0


def test_one_problem_says_nothing_of_others() -> None:
    estimate = pass_estimate([Tally(8, 4)], 1)
    assert estimate is not None
    assert (estimate.value, estimate.low, estimate.high) == (0.5, 0.0, 1.0)
    reward = mean_estimate([0.5])
    assert reward is not None
    assert math.isinf(reward.low)
    alike = mean_estimate([0.0, 0.0, 0.0])
    assert alike is not None
    assert (alike.value, alike.problems, alike.high) == (0.0, 3, math.inf)
    assert mean_estimate([]) is None


@pytest.mark.parametrize(("problems", "samples", "k"), [(30, 1, 1), (30, 4, 1), (100, 8, 4)])
def test_intervals_hold_the_truth_as_often_as_they_say(problems: int, samples: int, k: int) -> None:
    random = np.random.default_rng(0)
    chances = random.beta(0.5, 0.5, 200_000)
    truth = float(np.mean(1 - (1 - chances) ** k))
    held = 0
    for _ in range(300):
        solved = random.binomial(samples, random.beta(0.5, 0.5, problems))
        estimate = pass_estimate([Tally(samples, int(count)) for count in solved], k)
        assert estimate is not None
        held += estimate.low <= truth <= estimate.high
    assert 0.91 <= held / 300 <= 0.995


def test_the_interval_of_a_mean_reward_is_students() -> None:
    from scipy import stats  # it takes a second

    means = [0.1, 0.4, 0.4, 0.9]
    estimate = mean_estimate(means)
    assert estimate is not None
    low, high = stats.t.interval(0.95, 3, np.mean(means), stats.sem(means))
    assert (estimate.low, estimate.high) == pytest.approx((low, high))


def test_students_interval_reaches_as_far_as_scipys() -> None:
    from scipy import stats  # it takes a second

    for freedom in (*range(1, 40), 99, 100, 1001, 20_000):
        assert _student(freedom) == pytest.approx(stats.t.ppf((1 + CONFIDENCE) / 2, freedom), rel=1e-9)


def test_a_share_is_rounded_as_the_dashboard_rounds_it() -> None:
    """The terminal showed 1.2 % where the page showed 1.3 %."""
    shares = {0.0125: "1.3%", 0.0375: "3.8%", 0.1: "10.0%", 1 / 3: "33.3%", 0.0005: "0.1%", 1.0: "100.0%", 0.0: "0.0%"}
    assert {share: percentage(share) for share in shares} == shares
