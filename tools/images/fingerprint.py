"""Identities of files and folders: two with the same identity have the same content.

A file's is the digest of its bytes. A folder's is the digest of its entries' metadata (path, mode, owner, inode, size,
time of change), since reading the bytes would take seconds; a copy of a folder elsewhere has another identity.
"""

from __future__ import annotations

import hashlib
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

NOT_PART = frozenset({"dev", "proc", "sys"})
"""Folders at the top of a root filesystem that every container brings itself; images omit their content."""


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree_digest(root: Path) -> str:
    sha = hashlib.sha256(os.fsencode(root.resolve()))
    folders = [(root, "")]
    while folders:
        folder, where = folders.pop()
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            if not where and entry.name in NOT_PART:
                continue
            path = f"{where}/{entry.name}"
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                folders.append((folder / entry.name, path))
            facts = (status.st_mode, status.st_uid, status.st_gid, status.st_ino, status.st_size, status.st_mtime_ns)
            sha.update(os.fsencode(path) + b"\0" + repr(facts).encode())
    return sha.hexdigest()


def size_bytes(path: Path) -> int:
    """Return how many bytes a file, or all files in a folder, hold; unreadable folders are omitted."""
    if not path.is_dir():
        return path.stat().st_size
    return sum(
        os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 - a Path for each of 10,000 files costs more
        for folder, _, names in os.walk(path)
        for name in names
    )
