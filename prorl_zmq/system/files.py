"""Opens files that another account may have created."""

from __future__ import annotations

import os
import stat


def open_regular(path: str, flags: int) -> int:
    """Open a regular file without blocking; raise `OSError` for other kinds."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is not a regular file")
    return descriptor
