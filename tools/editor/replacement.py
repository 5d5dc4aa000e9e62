"""Replaces a part of a file of any size by a new file in the same folder, which is renamed over the old one.

A full disk or a kill leaves the old file unchanged, and no reader sees half an edit. Where the file system permits it,
the new file has no name until it is complete, so a kill leaves nothing behind. The mode and, where permitted, the owner
are kept; hard links break, and extended attributes are lost.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from .outcome import Refused, Stamp, Undo
from .text_file import stamp_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .entry import DirectoryEntry
    from .text_file import TextFile

COPY_BYTES = 2**26


def replace(file: TextFile, offset: int, old: bytes, new: bytes) -> Undo:
    """Put `new` in the place of `old`, which is at `offset`; return how to undo that.

    Raises:
        Refused: another process changed the file meanwhile.
        OSError: the disk refuses it. The file is unchanged in both cases.
    """
    entry, source = file.entry, file.descriptor
    with _sibling(entry.folder) as (target, name):
        _copy(source, target, 0, offset)
        _write(target, new)
        _copy(source, target, offset + len(old), file.stamp.size)
        if (file.status.st_uid, file.status.st_gid) != (os.geteuid(), os.getegid()):
            with suppress(PermissionError):
                os.fchown(target, file.status.st_uid, file.status.st_gid)
        os.fchmod(target, stat.S_IMODE(file.status.st_mode))
        named = os.stat(entry.name, dir_fd=entry.folder, follow_symlinks=False)
        if stamp_of(named) != file.stamp or not os.path.samestat(named, file.status):
            raise Refused(f"{entry.path} was changed by another process during the edit; view it and try again.")
        if os.fstat(target).st_nlink == 0:
            os.link(f"/proc/self/fd/{target}", name, dst_dir_fd=entry.folder)
        os.rename(name, entry.name, src_dir_fd=entry.folder, dst_dir_fd=entry.folder)
        return Undo(offset, old, len(new), file.stamp, stamp_of(os.fstat(target)))


def create(entry: DirectoryEntry, content: bytes) -> Undo:
    """Make a new file; on an `OSError`, such as a full disk, there is none."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    target = os.open(entry.name, flags, 0o666, dir_fd=entry.folder)
    try:
        _write(target, content)
        return Undo(0, b"", len(content), None, stamp_of(os.fstat(target)))
    except OSError:
        os.unlink(entry.name, dir_fd=entry.folder)
        raise
    finally:
        os.close(target)


def take_back(file: TextFile, undo: Undo) -> Stamp | None:
    """Undo an edit; return the file after that, None if it is removed.

    Raises:
        Refused: the file has changed since the edit.
        OSError: the disk refuses it. The file is unchanged in both cases.
    """
    if file.stamp != undo.after:
        raise Refused(
            f"{file.entry.path} was changed after its last edit with this tool, so that cannot be undone; "
            "view the file and edit it."
        )
    if undo.before is None:
        os.unlink(file.entry.name, dir_fd=file.entry.folder)
        return None
    return replace(file, undo.offset, file.data[undo.offset : undo.offset + undo.new_bytes], undo.old).after


@contextmanager
def _sibling(folder: int) -> Iterator[tuple[int, str]]:
    """Yield a new empty file, and the name that it has or can get; nothing of that name remains."""
    name = f".edit-{secrets.token_hex(8)}"
    try:
        if not os.access("/proc/self/fd", os.X_OK):
            raise OSError
        target = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError:
        target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        yield target, name
    finally:
        os.close(target)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


def _copy(source: int, target: int, start: int, end: int) -> None:
    while start < end and (count := os.sendfile(target, source, start, min(COPY_BYTES, end - start))):
        start += count


def _write(target: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]
