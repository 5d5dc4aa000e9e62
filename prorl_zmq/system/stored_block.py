"""Reads trajectory blocks from files: small ones are copied, larger ones mapped and so sent from the page cache.

A mapping is populated before it is returned; if the disk fails then, the block is copied, and the copy reports the
error. The kernel may evict populated pages, and a disk that fails at the next touch ends the process, as does a file
that has become shorter. So only files of local file systems are mapped, which must stay as they are while a block of
them is mapped, except for bytes behind the block.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakSet

from .file_system import LOCAL, file_system_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAPPED_FROM_BYTES = 2**20
"""A copy of a smaller block takes less time than its mapping's page table and descriptor are worth."""
MAPPED_LIMIT = 256
"""Most blocks that a process has mapped at a time, since each mapping has a descriptor; others are copied."""
_POPULATE_READ = 22
"""`MADV_POPULATE_READ` of Linux 5.14, which Python has no name for. Unlike `MAP_POPULATE`, it reports errors."""


_MAPPINGS: WeakSet[mmap.mmap] = WeakSet()


def reader(path: Path) -> Callable[[int, int, int], bytes | memoryview]:
    """Return the function, `read_block` or one that only copies, for files in the folder of `path`."""
    return read_block if file_system_of(path) in LOCAL else _copied


def read_block(file: int, offset: int, size_bytes: int) -> bytes | memoryview:
    """Return a part of a file; shorter if the file is.

    Raises:
        OSError: the disk failed.
    """
    if size_bytes >= MAPPED_FROM_BYTES and len(_MAPPINGS) < MAPPED_LIMIT:
        with suppress(OSError, ValueError):  # an older kernel, no descriptor left, or the file is shorter
            return _mapped(file, offset, size_bytes)
    return _copied(file, offset, size_bytes)


def _copied(file: int, offset: int, size_bytes: int) -> bytes:
    return os.pread(file, size_bytes, offset)


def _mapped(file: int, offset: int, size_bytes: int) -> memoryview:
    before = offset % mmap.ALLOCATIONGRANULARITY
    mapped = mmap.mmap(file, before + size_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset - before)
    mapped.madvise(_POPULATE_READ)
    _MAPPINGS.add(mapped)
    return memoryview(mapped)[before:]
