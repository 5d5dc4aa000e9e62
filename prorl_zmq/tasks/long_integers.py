"""Convert integers of many digits, which Python limits to 4,300 digits because it takes quadratic time."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

DIGITS_LIMIT = 100_000
"""Some tests of published problems have integers of ten thousand digits; this many take a tenth of a second."""


@contextmanager
def long_integers() -> Iterator[None]:
    """Let this process read and write integers of up to `DIGITS_LIMIT` digits while the context does."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(DIGITS_LIMIT)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)
