"""A lock file that one process at a time holds, and that names its holder: `process 7 on login1`.

The lock is a `flock`, which the kernel releases when the process dies, on shared file systems for other hosts too. A
process that takes over removes the file, which the former holder detects; lock libraries offer neither.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from typing import TYPE_CHECKING

from ..errors import ConfigError, EndpointInUse
from .unix_peers import folder_problem

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class HeldFile:
    """A file locked by this process."""

    def __init__(self, path: Path, ours: os.stat_result) -> None:
        self._path = path
        self._ours = ours

    def is_lost(self) -> bool:
        """Return whether another process has taken over."""
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return True
        except OSError:  # the file system is unavailable, for others too
            return False
        return not os.path.samestat(there, self._ours)


@contextlib.contextmanager
def held(path: Path, *, take_over: bool = False) -> Iterator[HeldFile]:
    """Lock a file, which is created if it is missing.

    Args:
        path: of the file.
        take_over: do so although another process holds it.

    Raises:
        EndpointInUse: another process holds it; the message names the process.
        ConfigError: the file system has no locks.
    """
    if take_over:
        path.unlink(missing_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EndpointInUse(_said(path), endpoint=str(path)) from None
        except OSError as error:
            message = f"{path} cannot be locked ({error.strerror}): use a file system that has locks"
            raise ConfigError(message, key="service") from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield HeldFile(path, os.fstat(file.fileno()))


def holder(path: Path) -> str:
    """Return the process that holds a file; empty: none, or the file cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _said(path)
    return ""


def claim_folder(folder: Path, lock: str) -> int:
    """Make a folder that one process at a time uses; return the open descriptor of its lock, a file in it.

    Nothing is written before the folder is known to be this account's alone. The lock's content is unchanged.

    Raises:
        ConfigError: a file is in its place, others may write to the folder, it or a link in its path is another
            account's, or the lock a link.
        BlockingIOError: another process uses it.
        OSError: it cannot be made.
    """
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"{folder} is not a folder: it, or one above it, is a file", key="folder") from None
    if problem := folder_problem(folder):
        raise ConfigError(f"{folder} cannot be used: {problem}; name a folder of your own", key="folder")
    try:
        descriptor = os.open(folder / lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{folder / lock} is a link; remove it", key="folder") from None
        raise
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _said(path: Path) -> str:
    return path.read_text("utf-8", "replace")[:200].strip() or "a process that does not say where it is"
