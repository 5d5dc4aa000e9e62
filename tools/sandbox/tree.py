"""Whole folder trees that a hostile process wrote: copied and removed, whatever it left there.

Both walks go breadth first over descriptors, so that neither a planted link, nor a tree deeper than Python's stack or
the longest path, nor a folder without permissions stops them. Both have a time limit. They block: call them in threads.
"""

from __future__ import annotations

import os
import stat
import time
import uuid
from collections import deque
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import SandboxFailed
from .files import FILE_FLAGS, FOLDER_FLAGS, open_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK_BYTES = 16 * 2**20
BATCH = 1024
"""Entries of a folder that are looked at between two reads of it while it is being emptied."""


def copy_tree(source: Path, target: Path, limit_bytes: int, timeout_s: float) -> None:
    """Copy the content of `source` into the empty folder `target`.

    Symbolic links stay links; modes and times of files are kept, hard links and owners are not. FIFOs, sockets and
    devices are left out: no check can want them, and opening one may block.

    Raises:
        SandboxFailed: it is larger than `limit_bytes` in all, takes longer than `timeout_s`, or the disk refuses it.
    """
    deadline = time.monotonic() + timeout_s
    folders: deque[tuple[str, ...]] = deque([()])
    modes: list[tuple[tuple[str, ...], int]] = []
    left = limit_bytes
    try:
        while folders:
            parts = folders.popleft()
            with open_folder(source, parts) as origin, open_folder(target, parts) as copy, os.scandir(origin) as found:
                for entry in found:
                    _check_time(deadline)
                    with suppress(FileNotFoundError):  # it was removed since it was listed
                        mode = entry.stat(follow_symlinks=False).st_mode
                        if stat.S_ISLNK(mode):
                            os.symlink(os.readlink(entry.name, dir_fd=origin), entry.name, dir_fd=copy)
                        elif stat.S_ISDIR(mode):
                            _grant(entry.name, origin, 0o700)
                            os.mkdir(entry.name, 0o700, dir_fd=copy)
                            folders.append((*parts, entry.name))
                            modes.append(((*parts, entry.name), stat.S_IMODE(mode)))
                        elif stat.S_ISREG(mode):
                            left -= _copy_file(entry.name, origin, copy, left, deadline)
        for (*parents, name), mode in reversed(modes):
            with open_folder(target, parents) as folder:
                os.chmod(name, mode & 0o777, dir_fd=folder)
    except TimeoutError:
        raise SandboxFailed(f"copying {source.parent.name} took longer than {timeout_s:g} s") from None
    except OSError as error:
        raise SandboxFailed(f"{source.parent.name} cannot be copied: {error.strerror}") from error


def remove_tree(path: Path, timeout_s: float) -> None:
    """Remove a folder and all below it. It is gone under its name at once; a call after a failed one goes on.

    Raises:
        SandboxFailed: it takes longer than `timeout_s`, or the disk refuses it; the rest lies in `.NAME.removed`.
    """
    deadline = time.monotonic() + timeout_s
    rest = path.with_name(f".{path.name}.removed")
    try:
        with suppress(FileExistsError):
            rest.mkdir(0o700)
        with suppress(FileNotFoundError):
            path.rename(rest / uuid.uuid4().hex)
        with open_folder(rest, ()) as flat:
            folders = deque(os.listdir(flat))  # noqa: PTH208 - of the descriptor
            while folders:
                name = folders.popleft()
                _grant(name, flat, 0o700)
                with _opened(name, flat) as folder:
                    folders += _empty(folder, flat, deadline)
                os.rmdir(name, dir_fd=flat)
        rest.rmdir()
    except TimeoutError:
        raise SandboxFailed(f"removing {path.name} took longer than {timeout_s:g} s; the rest is in {rest}") from None
    except OSError as error:
        raise SandboxFailed(f"{path.name} cannot be removed: {error}; the rest is in {rest}") from error


def _empty(folder: int, flat: int, deadline: float) -> list[str]:
    """Empty one folder; the folders in it that are not empty move to `flat`, under the names that are given back."""
    moved: list[str] = []
    while True:
        with os.scandir(folder) as found:
            entries = list(islice(found, BATCH))
        if not entries:
            return moved
        for entry in entries:
            _check_time(deadline)
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=folder)
                continue
            try:
                os.rmdir(entry.name, dir_fd=folder)
            except OSError:
                _grant(entry.name, folder, 0o700)  # a folder that one may not write cannot move either
                moved.append(uuid.uuid4().hex)
                os.rename(entry.name, moved[-1], src_dir_fd=folder, dst_dir_fd=flat)


def _copy_file(name: str, origin: int, copy: int, limit_bytes: int, deadline: float) -> int:
    _grant(name, origin, 0o400)
    source = os.open(name, os.O_RDONLY | FILE_FLAGS, dir_fd=origin)
    try:
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode):
            return 0  # it was replaced since it was listed
        target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=copy)
        try:
            size = 0
            while count := os.sendfile(target, source, None, CHUNK_BYTES):
                _check_time(deadline)
                size += count
                if size > limit_bytes:
                    raise SandboxFailed("the sandbox's folder holds more than may be copied", reason="size")
            os.fchmod(target, stat.S_IMODE(status.st_mode) & 0o777)
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
        finally:
            os.close(target)
    finally:
        os.close(source)
    return size


def _grant(name: str, folder: int, needed: int) -> None:
    """Give the owner the permissions `needed` on an entry, if they lack; never through a symbolic link."""
    entry = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        mode = os.fstat(entry).st_mode
        if mode & needed != needed and not stat.S_ISLNK(mode):
            # chmod has no form for O_PATH descriptors; /proc names the very file that is open.
            Path(f"/proc/self/fd/{entry}").chmod(stat.S_IMODE(mode) | needed)
    finally:
        os.close(entry)


@contextmanager
def _opened(name: str, folder: int) -> Iterator[int]:
    descriptor = os.open(name, FOLDER_FLAGS, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _check_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError
