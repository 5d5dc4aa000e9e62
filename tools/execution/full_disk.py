"""What happens when the sandboxes' disk is nearly full: the largest sandbox is ended, and its files go at once.

Each server looks at the disk with its watch. When little is left, one of them (that which gets the lock on the folder
of all sandboxes) forks a child that adds up what each sandbox holds, and tells the server of the largest one.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ..sandbox import forking
from . import messages

if TYPE_CHECKING:
    from pathlib import Path

LOOK_S = 1.0
LOW_BYTES = 256 * 2**20
LOW_SHARE = 0.02
"""Of the disk, or of its inodes. A disk has little left when it has less than both."""
LEAST_BYTES = 32 * 2**20
"""Smaller ones are not looked at: there is no room for sandboxes, ended or not."""
OWN_SHARE = 0.05
"""A sandbox that holds more than this of the disk, and more than any other, has filled it itself."""
COUNT_LIMIT_S = 20.0
ANSWER_LIMIT_S = 40.0


class FullDisk:
    """Looks at the disk of one sandbox's folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = 0.0

    def look(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LOOK_S
        with suppress(OSError):
            if is_low(self._path):
                self._end_largest()

    def _end_largest(self) -> None:
        # A child: there may be millions of files.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        root = self._path.parent
        if os.fork() == 0:
            forking.child(lambda: end_largest(root), nowhere, ())
        os.close(nowhere)


def is_low(folder: Path) -> bool:
    disk = os.statvfs(folder)
    if disk.f_blocks * disk.f_frsize < LEAST_BYTES:
        return False
    few = disk.f_files > 0 and disk.f_favail < LOW_SHARE * disk.f_files
    return few or disk.f_bavail * disk.f_frsize < min(LOW_BYTES, LOW_SHARE * disk.f_blocks * disk.f_frsize)


def end_largest(root: Path) -> None:
    """Have the largest sandbox below `root` ended, unless somebody is at it already."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_low(root):
            return
        until = time.monotonic() + COUNT_LIMIT_S
        sizes = {name: _size_bytes(os.path.join(root, name), until) for name in os.listdir(root)}  # noqa: PTH118, PTH208
        disk = os.statvfs(root)
        for name, size_bytes in sorted(sizes.items(), key=lambda item: -item[1]):
            own = size_bytes > OWN_SHARE * disk.f_blocks * disk.f_frsize
            if _tell(root / name, messages.FreeDisk(size_bytes, own=own)):
                return
    finally:
        os.close(folder)


def _size_bytes(path: str, until: float) -> int:
    """Return what a folder holds; an empty file counts too, for its inode."""
    size = 0
    for at, folders, files in os.walk(path, onerror=lambda _: None):
        for name in (*folders, *files):
            with suppress(OSError):
                size += max(512 * os.lstat(os.path.join(at, name)).st_blocks, 512)  # noqa: PTH118 - the quickest way
        if time.monotonic() > until:
            break
    return size


def _tell(path: Path, request: messages.FreeDisk) -> bool:
    """Send a request to a sandbox's server; return whether it was answered."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            connection.settimeout(ANSWER_LIMIT_S)
            connection.connect(f"/proc/self/fd/{folder}/{messages.SOCKET}")
            connection.sendall(messages.frame(0, request))
            return bool(connection.recv(1))
        finally:
            os.close(folder)
    return False
