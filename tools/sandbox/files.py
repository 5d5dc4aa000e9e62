"""Single files of a folder whose content a hostile process wrote, read and written without leaving the folder.

A path is opened component by component, relative to the folder before it, and symbolic links are refused. So a link
planted between a check and its use changes nothing: there is no check, only the open. Only regular files are opened: a
FIFO would block the service.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ...errors import SandboxFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_file(root: Path, path: str, limit_bytes: int) -> bytes:
    """Read a regular file below `root`.

    Raises:
        SandboxFailed: the path leaves the folder, leads through a symbolic link, is no regular file, is missing
            (`reason` is `missing`), or is larger than `limit_bytes`.
    """
    parts = split_path(path)
    with _explained(path), open_folder(root, parts[:-1]) as folder:
        file = os.open(parts[-1], os.O_RDONLY | FILE_FLAGS, dir_fd=folder)
        with os.fdopen(file, "rb", buffering=0) as content:
            _check_regular(file, path)
            data = bytearray()
            while len(data) <= limit_bytes and (more := content.read(limit_bytes + 1 - len(data))):
                data += more
    if len(data) > limit_bytes:
        raise SandboxFailed(f"{path} is larger than the {limit_bytes} bytes that are read", path=path, reason="size")
    return bytes(data)


def write_file(root: Path, path: str, data: bytes, mode: int) -> None:
    """Write a regular file below `root`, with the folders that lead to it.

    Raises:
        SandboxFailed: the path leaves the folder, leads through a symbolic link or is no regular file, or the disk
            refuses it.
    """
    parts = split_path(path)
    with _explained(path), open_folder(root, parts[:-1], create=True) as folder:
        file = os.open(parts[-1], os.O_WRONLY | os.O_CREAT | FILE_FLAGS, 0o600, dir_fd=folder)
        with os.fdopen(file, "wb") as content:
            _check_regular(file, path)
            content.truncate(0)
            content.write(data)
            os.fchmod(file, mode)


def split_path(path: str) -> list[str]:
    """Give the components of a relative path.

    Raises:
        SandboxFailed: it is absolute, empty, or has a `..` or a NUL.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or not parts or ".." in parts or "\0" in path:
        raise SandboxFailed(
            f"{path!r} is not a path inside the sandbox; give one relative to the working directory, without '..'",
            path=path,
            reason="path",
        )
    return parts


@contextmanager
def open_folder(root: Path, parts: Sequence[str], *, create: bool = False) -> Iterator[int]:
    """Open the folder `parts` below `root`, following no symbolic link; close it at the end.

    Raises:
        OSError: there is none, or a component is a symbolic link (ENOTDIR).
    """
    folder = os.open(root, FOLDER_FLAGS)
    try:
        for part in parts:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=folder)
            inner = os.open(part, FOLDER_FLAGS, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def _check_regular(file: int, path: str) -> None:
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise SandboxFailed(f"{path} is not a regular file", path=path, reason="kind")


@contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise SandboxFailed(
                f"{path} is or leads through a symbolic link or a file; only plain folders are followed",
                path=path,
                reason="link",
            ) from error
        reason = "missing" if error.errno == errno.ENOENT else "system"
        raise SandboxFailed(f"{path} in the sandbox: {error.strerror}", path=path, reason=reason) from error
