"""Whether a reward rose, by its steps."""

from __future__ import annotations

import math

import pytest

from prorl_zmq.data.reward_curve import conclusion, rise, standard_error


def test_the_standard_error_of_a_mean() -> None:
    assert standard_error([0.0, 1.0, 0.0, 1.0]) == pytest.approx(math.sqrt(1 / 3) / 2)
    assert math.isnan(standard_error([1.0]))
    assert math.isnan(standard_error([]))


@pytest.mark.parametrize(
    ("means", "line"),
    [
        ([0.1, 0.2, 0.4, 0.5, 0.8, 0.9], "reward rose from 0.150 to 0.850 (9.9 standard errors; means of the first"),
        ([0.8, 0.9, 0.4, 0.5, 0.1, 0.2], "reward fell from 0.850 to 0.150 (9.9 standard errors; means of the first"),
        ([0.1, 0.9, 0.4, 0.5, 0.2, 0.9], "reward did not clearly change: from 0.500 to 0.550 (0.1 standard errors"),
        ([0.5] * 9, "reward did not clearly change: from 0.500 to 0.500 (0.0 standard errors"),
        ([0.0] * 3 + [1.0] * 3, "reward rose from 0.000 to 1.000 (inf standard errors"),
        ([0.1] * 5, "reward: 5 steps are too few"),
        ([], "reward: 0 steps are too few"),
    ],
)
def test_the_line_at_the_end(means: list[float], line: str) -> None:
    assert conclusion(means).startswith(line)


def test_thirds_leave_out_the_middle() -> None:
    found = rise([0.0, 0.2, 9.0, 9.0, 9.0, 9.0, 0.8, 1.0])
    assert found is not None
    assert (found.first, found.last) == (pytest.approx(0.1), pytest.approx(0.9))
    assert found.errors == pytest.approx(0.8 / math.hypot(0.1, 0.1))
