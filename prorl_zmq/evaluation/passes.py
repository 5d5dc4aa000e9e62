"""pass@k and mean rewards with 95 % confidence intervals.

All intervals take the problem as the unit, since the samples of one problem are not independent.

- pass@1 with one sample of each problem is a share of independent results: Wilson's interval.
- Other pass@k are a mean of one estimate per problem: Wilson's interval with the effective sample size that the
  variance between problems leaves (Korn and Graubard 1998). It stays within 0 and 1, approaches the normal interval
  with many problems, and does not shrink to zero where all problems came out alike.
- A mean reward has no bounds: Student's t over the problems' means.

With one problem the interval is 0 to 1, or the whole line. It is the whole line too if all mean rewards are equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
"""Standard errors that a normal interval reaches."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems, with its 95 % confidence interval."""

    value: float
    low: float
    high: float
    problems: int


def percentage(share: float) -> str:
    """Write a share with one decimal place, halves away from zero: as the dashboard's `toFixed` does."""
    return f"{Decimal(100 * share).quantize(Decimal('0.1'), ROUND_HALF_UP)}%"


@dataclass(frozen=True, slots=True)
class Tally:
    """The samples of one problem."""

    samples: int
    solved: int


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Return the chance that at least one of k samples, drawn without replacement, is solved: 1 - C(n-c, k) / C(n, k).

    This is the unbiased estimator of Chen et al. 2021, in exact integers.
    """
    if not 0 <= solved <= samples or not 1 <= k <= samples:
        raise ValueError(f"there is no pass@{k} of {solved} solved among {samples} samples")
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def pass_estimate(tallies: Sequence[Tally], k: int) -> Estimate | None:
    """Return pass@k over the problems with at least k samples; None if there are none."""
    used = [tally for tally in tallies if tally.samples >= k]
    if not used:
        return None
    values = [pass_at_k(tally.samples, tally.solved, k) for tally in used]
    if k == 1 and len(used) > 1 and all(tally.samples == 1 for tally in used):
        return _interval(sum(tally.solved for tally in used) / len(used), len(used), len(used))
    return _clustered_share(values, sum(tally.samples for tally in used))


def mean_estimate(means: Sequence[float]) -> Estimate | None:
    """Return the mean of the problems' means, with Student's t interval; None: there are none."""
    if not means:
        return None
    value = float(np.mean(means))
    if len(set(means)) == 1:
        return Estimate(value, -math.inf, math.inf, len(means))
    error = float(np.std(means, ddof=1)) / math.sqrt(len(means))
    reach = _student(len(means) - 1) * error
    return Estimate(value, value - reach, value + reach, len(means))


def _clustered_share(values: Sequence[float], samples: int) -> Estimate:
    """Return a mean of shares, one per problem, with Wilson's interval at the effective number of samples."""
    problems = len(values)
    value = float(np.mean(values))
    if problems == 1:
        return Estimate(value, 0.0, 1.0, 1)
    variance = float(np.var(values, ddof=1)) / problems
    binomial = value * (1 - value)
    if binomial <= 0 or variance <= 0:
        # All problems alike: each is one observation if they are all-or-nothing, and never more than its samples.
        effective = float(problems if binomial <= 0 else samples)
    else:
        effective = min(binomial / variance, float(samples))
        # The variance is itself an estimate, of few problems a poor one.
        effective *= (Z / _student(problems - 1)) ** 2
    return _interval(value, effective, problems)


def _interval(value: float, samples: float, problems: int) -> Estimate:
    """Return Wilson's interval of a share of `samples` independent samples, which may be fractional."""
    shrunk = 1 + Z * Z / samples
    centre = (value + Z * Z / (2 * samples)) / shrunk
    reach = Z / shrunk * math.sqrt(value * (1 - value) / samples + Z * Z / (4 * samples**2))
    # Rounding must not put the value outside.
    return Estimate(value, min(value, max(0.0, centre - reach)), max(value, min(1.0, centre + reach)), problems)


def _student(freedom: int) -> float:
    """Return how many standard errors Student's t interval reaches, to nine digits.

    Newton's method from below, where it cannot overshoot, since the share is concave. SciPy has this too, in 140 MB.
    """
    reach = Z
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    for _ in range(100):
        density = scale * (1 + reach * reach / freedom) ** (-(freedom + 1) / 2)
        step = (CONFIDENCE - _student_share(reach, freedom)) / (2 * density)
        reach += step
        if step <= 1e-12 * reach:
            break
    return reach


def _student_share(reach: float, freedom: int) -> float:
    """Return how much of Student's t lies within ± `reach` (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(reach / math.sqrt(freedom))
    odd = freedom % 2
    term, terms = math.cos(angle) if odd else 1.0, []
    for index in range(odd, freedom - 1, 2):
        terms.append(term)
        term *= math.cos(angle) ** 2 * (index + 1) / (index + 2)
    total = math.sin(angle) * math.fsum(terms)
    return 2 / math.pi * (angle + total) if odd else total
