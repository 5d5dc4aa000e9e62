"""Frees a nearly full disk of sandboxes: the largest sandbox is ended and its files are removed.

Each server looks at the disk with its watch. When little is left, the one that gets the lock on the folder of all
sandboxes forks a child, which adds up what each sandbox holds and sends `FreeDisk` to the server of the largest.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ..containers import forking
from . import messages

if TYPE_CHECKING:
    from pathlib import Path

LOOK_S = 1.0
LOW_BYTES = 256 * 2**20
LOW_SHARE = 0.02
"""Of the disk, or of its inodes. A disk is low when it has less than both."""
LEAST_BYTES = 32 * 2**20
"""Smaller disks are not checked."""
OWN_SHARE = 0.05
"""The largest sandbox has filled the disk itself if it holds more than this share."""
WORTH_SHARE = 0.01
"""A sandbox that holds less is not ended."""
COUNT_LIMIT_S = 20.0
ANSWER_LIMIT_S = 40.0
MUCH = 2**62
"""Stands for a folder that cannot be added up in time."""


class FullDisk:
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


class Held(NamedTuple):
    """What a folder takes of its disk."""

    size_bytes: int
    entries: int

    def is_over(self, share: float, disk: os.statvfs_result) -> bool:
        return self.size_bytes > share * disk.f_blocks * disk.f_frsize or 0 < disk.f_files * share < self.entries


def is_low(folder: Path) -> bool:
    disk = os.statvfs(folder)
    total = disk.f_blocks * disk.f_frsize
    if total < LEAST_BYTES:
        return False
    return _has_few_inodes(disk) or disk.f_bavail * disk.f_frsize < min(LOW_BYTES, LOW_SHARE * total)


def fills_disk(folder: Path) -> bool:
    """Return whether a folder holds more than `OWN_SHARE` of its disk."""
    with suppress(OSError):
        return _held(str(folder), time.monotonic() + COUNT_LIMIT_S).is_over(OWN_SHARE, os.statvfs(folder))
    return False


def end_largest(root: Path) -> None:
    """End the largest sandbox below `root`, unless another process is doing so."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_low(root):
            return
        disk, until = os.statvfs(root), time.monotonic() + COUNT_LIMIT_S
        what = 1 if _has_few_inodes(disk) else 0
        all_held = {name: _held(os.path.join(root, name), until) for name in os.listdir(root)}  # noqa: PTH118, PTH208
        for name, held in sorted(all_held.items(), key=lambda item: -item[1][what]):
            if not held.is_over(WORTH_SHARE, disk):
                return  # it is full of other things
            own = held.is_over(OWN_SHARE, disk)
            if _tell(root / name, messages.FreeDisk(held.size_bytes, held.entries, own=own)):
                return
    finally:
        os.close(folder)


def _has_few_inodes(disk: os.statvfs_result) -> bool:
    return disk.f_files > 0 and disk.f_favail < LOW_SHARE * disk.f_files


def _held(path: str, until: float) -> Held:
    # By `du`, which goes through trees of any depth.
    return Held(_added_up(path, "--block-size=1", until), _added_up(path, "--inodes", until))


def _added_up(path: str, unit: str, until: float) -> int:
    try:
        done = subprocess.run(
            ["du", "--summarize", unit, "--", path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=max(1.0, until - time.monotonic()),
            check=False,
        )
        return int(done.stdout.split()[0])
    except subprocess.TimeoutExpired:
        return MUCH
    except (OSError, ValueError, IndexError):
        return 0


def _tell(path: Path, request: messages.FreeDisk) -> bool:
    """Send a request to a sandbox's server; return whether it was answered."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection, messages.short_path(path) as address:
        connection.settimeout(ANSWER_LIMIT_S)
        connection.connect(address)
        connection.sendall(messages.frame(0, messages.encode(request)))
        return bool(connection.recv(1))
    return False
