"""Returns freed memory to the system, by glibc allocator settings for long-lived processes.

By default glibc raises its mmap threshold up to 32 MiB, and small live blocks then keep large free ones resident: ten
thousand hostile messages cost a broker 95 to 150 MiB, and 15 MiB with a fixed threshold (bench/hostile.py).
"""

from __future__ import annotations

import ctypes

MAPPED_FROM_BYTES = 2**20
"""Larger than the trajectory of 40,000 tokens, which is faster from a heap."""
KEPT_BYTES = 2**20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def give_memory_back() -> None:
    """Have this process return freed memory; does nothing where the C library has no `mallopt` (musl)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
