"""`long_integers`: allows integers of more than 4,300 digits, whose conversion takes quadratic time."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

DIGITS_LIMIT = 100_000
"""Tests of published problems have up to ten thousand digits; a conversion of this many takes 0.1 s."""


@contextmanager
def long_integers() -> Iterator[None]:
    """Allow integers of up to `DIGITS_LIMIT` digits within the context."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(DIGITS_LIMIT)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)
