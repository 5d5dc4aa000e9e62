"""The error of a host that cannot write weights to its disk."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from ...errors import EngineFailed

if TYPE_CHECKING:
    from pathlib import Path

LASTING = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""Errors of a folder that a trainer does not wait for."""


def copy_failure(folder: Path, error: OSError) -> EngineFailed:
    """Return the error of a folder with weights; it is `final` if it will last: for instance, the disk is full."""
    message = f"the weights could not be copied to {folder}: {error}; give another `weights_dir`"
    return EngineFailed(message, **({"final": True} if error.errno in LASTING else {}))
