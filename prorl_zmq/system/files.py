"""Opens files that another account may have created, and moves the files of an earlier run aside."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def open_regular(path: str, flags: int) -> int:
    """Open a regular file without blocking; raise `OSError` for other kinds."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is not a regular file")
    return descriptor


def put_aside(folder: Path, names: Iterable[str]) -> Path:
    """Move an earlier run's files in their order into a new folder `folder`/earlier/N, and return that."""
    earlier = next(each for n in count(1) if not (each := folder / "earlier" / str(n)).exists())
    earlier.mkdir(parents=True)
    for name in names:
        with suppress(FileNotFoundError):
            (folder / name).rename(earlier / name)
    return earlier
