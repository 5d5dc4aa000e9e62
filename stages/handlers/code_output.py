"""Whether a solution's answer is the one that a test expects: plain functions of two texts, linear in their length.

Outputs of programs, by `comparison`:

- `close`: the same words, wherever lines break; or each a number equal to the expected one (`1.0` and `1`), or within
  NumPy's tolerance of it (APPS, TACO) if that is written as a fraction. Two whole numbers have no tolerance.
- `any_case`: the same, but `YES` is `Yes`, and the tolerance is the wider one of CodeContests.
- `exact`: line by line, the same except for surrounding blanks, or numbers of equal value: LiveCodeBench's own rule.

Results of functions: equal JSON, where a tuple is a list, 1 is `true` (as in Python), and fractions have NumPy's
tolerance, unless they must be `exact`. NaN is equal to nothing.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any

from ...tasks.long_integers import long_integers

RELATIVE, ABSOLUTE = 1e-5, 1e-8
"""Tolerances of `numpy.allclose`, which APPS uses."""
WIDER_ABSOLUTE = 1e-5
"""The tolerance of CodeContests, for whole numbers too."""
FLOAT_ERROR = 1e-11
"""Largest distance between `1.9999999999999998` and 2."""
NUMBER = re.compile(r"[+-]?(?:[0-9]+(\.[0-9]*)?|(\.[0-9]+))([eE][+-]?[0-9]{1,6})?")


def same_text(expected: str, got: str, comparison: str = "close") -> bool:
    """Return whether a program's output is the expected one, by a `comparison` of `CodeInstance`."""
    if comparison == "exact":
        wanted, given = (text.strip().split("\n") for text in (expected, got))
        return len(wanted) == len(given) and all(map(_same_line, wanted, given))
    absolute, of_whole = ABSOLUTE, FLOAT_ERROR
    if comparison == "any_case":
        expected, got, absolute, of_whole = expected.casefold(), got.casefold(), WIDER_ABSOLUTE, WIDER_ABSOLUTE
    words, others = expected.split(), got.split()
    return words == others or (
        len(words) == len(others)
        and all(_same_word(word, other, absolute, of_whole) for word, other in zip(words, others, strict=True))
    )


def same_result(expected: str, got: str, wrapped: bool, comparison: str = "close") -> bool:
    exact = comparison == "exact"
    with long_integers():
        wanted = json.loads(expected)
        try:
            given = json.loads(got)
            inner = wrapped and isinstance(wanted, list) and len(wanted) == 1
            return _same(wanted, given, exact) or (inner and _same(wanted[0], given, exact))
        except (ValueError, OverflowError, RecursionError):
            return False


def _same_line(wanted: str, given: str) -> bool:
    first, second = wanted.split(), given.split()
    return wanted.strip() == given.strip() or (
        len(first) == len(second)
        and all(map(NUMBER.fullmatch, (*first, *second)))
        and all(Decimal(one) == Decimal(other) for one, other in zip(first, second, strict=True))
    )


def _same_word(wanted: str, given: str, absolute: float, of_whole: float) -> bool:
    if wanted == given:
        return True
    first, second = NUMBER.fullmatch(wanted), NUMBER.fullmatch(given)
    if first is None or second is None:
        return False
    if Decimal(wanted) == Decimal(given):
        return True
    if any(first.groups()):
        return _close(float(wanted), float(given), absolute)
    # A whole number matches the fraction that floats made of it, however large it is, but no other whole number.
    try:
        return any(second.groups()) and abs(Decimal(wanted) - Decimal(given)) <= of_whole
    except ArithmeticError:  # a number beyond Decimal's range
        return False


def _same(wanted: Any, given: Any, exact: bool) -> bool:
    if isinstance(wanted, list):
        if not isinstance(given, list) or len(wanted) != len(given):
            return False
        return all(_same(one, other, exact) for one, other in zip(wanted, given, strict=True))
    if isinstance(wanted, dict):
        if not isinstance(given, dict) or wanted.keys() != given.keys():
            return False
        return all(_same(value, given[name], exact) for name, value in wanted.items())
    if isinstance(wanted, float) and isinstance(given, int | float) and not exact:
        return wanted == given or _close(wanted, float(given), ABSOLUTE)
    return bool(wanted == given)


def _close(wanted: float, given: float, absolute: float) -> bool:
    return math.isfinite(wanted) and abs(wanted - given) <= absolute + RELATIVE * abs(wanted)
