"""Reads trajectory blocks from files: small ones are copied, larger ones mapped and so sent from the page cache.

A mapping is populated before it is returned, which fails where the disk does; then the block is copied, and the copy
reports the error. A file must stay as it is while a block of it is mapped, except for bytes behind the block.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

MAPPED_FROM_BYTES = 2**20
"""A copy of a smaller block takes less time than its mapping's page table and descriptor are worth."""
_POPULATE_READ = 22
"""`MADV_POPULATE_READ` of Linux 5.14, which Python has no name for. Unlike `MAP_POPULATE`, it reports errors."""


def read_block(file: int, offset: int, size_bytes: int) -> bytes | memoryview:
    """Return a part of a file; shorter if the file is.

    Raises:
        OSError: the disk failed.
    """
    if size_bytes >= MAPPED_FROM_BYTES:
        with suppress(OSError, ValueError):  # an older kernel, no descriptor left, or the file is shorter
            return _mapped(file, offset, size_bytes)
    return os.pread(file, size_bytes, offset)


def _mapped(file: int, offset: int, size_bytes: int) -> memoryview:
    before = offset % mmap.ALLOCATIONGRANULARITY
    mapped = mmap.mmap(file, before + size_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset - before)
    mapped.madvise(_POPULATE_READ)
    return memoryview(mapped)[before:]
