"""A file of a run folder, read whole. Such a folder may come from anywhere, with devices, pipes and endless files."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

FILE_BYTES = 2**28


def read_file(file: Path, limit_bytes: int = FILE_BYTES) -> bytes:
    """Read a regular file, without waiting for it.

    Raises:
        OSError: it is none, or larger than the limit.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # else opening a pipe waits
    with os.fdopen(descriptor, "rb") as opened:
        state = os.fstat(opened.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        if state.st_size > limit_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {limit_bytes / 2**20:g} MiB")
        return opened.read(state.st_size)
