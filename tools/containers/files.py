"""Single files of a sandbox, read and written by a process that has joined its container.

A relative path is one of the workspace. It is opened component by component, relative to the folder before it, and
symbolic links are refused by the open itself, so a planted link cannot redirect it. An absolute path may lead through
links: it cannot leave the container. Without isolation an absolute path must be below the workspace, and is treated as
if it were relative. Only regular files are opened: a FIFO would block for ever.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import tarfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import SandboxFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
EXTRACTION: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Python before 3.11.4 has no filter; the process that unpacks has only a command's rights in any case."""
READ_BYTES = 2**20
FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read(root: str, home: str, path: str, limit_bytes: int) -> bytes:
    """Read a regular file.

    Raises:
        SandboxFailed: the path has `..`, leaves the workspace, leads through a symbolic link (`reason` is `link`), is
            no regular file, is missing (`reason` is `missing`), or is larger than `limit_bytes` (`reason` is `size`).
    """
    with _explained(path), _parent(root, home, path) as (folder, name, follow):
        file = os.open(name, os.O_RDONLY | (FILE_FLAGS & ~os.O_NOFOLLOW if follow else FILE_FLAGS), dir_fd=folder)
        with os.fdopen(file, "rb", buffering=0) as content:
            _check_regular(file, path)
            data = bytearray()
            while len(data) <= limit_bytes and (more := content.read(min(READ_BYTES, limit_bytes + 1 - len(data)))):
                data += more
    if len(data) > limit_bytes:
        raise SandboxFailed(f"{path} is larger than the {limit_bytes} bytes that are read", path=path, reason="size")
    return bytes(data)


def write(root: str, home: str, contents: Mapping[str, bytes], mode: int) -> None:
    """Write regular files, with the folders that lead to them (see `read`)."""
    for path, data in contents.items():
        with _explained(path), _parent(root, home, path, create=True) as (folder, name, follow):
            flags = os.O_WRONLY | os.O_CREAT | (FILE_FLAGS & ~os.O_NOFOLLOW if follow else FILE_FLAGS)
            file = os.open(name, flags, 0o600, dir_fd=folder)
            with os.fdopen(file, "wb") as content:
                _check_regular(file, path)
                content.truncate(0)
                content.write(data)
                os.fchmod(file, mode)


def unpack(root: str, home: str, path: str, archive: bytes) -> None:
    """Unpack a tar archive below the folder `path`, made if it is missing; `.` is the workspace (see `read`)."""
    target = path if path != "." else home
    if path != ".":
        with _explained(path), _parent(root, home, f"{path}/.unpack", create=True) as (folder, _, _):
            target = f"/proc/self/fd/{os.dup(folder)}"
    with _explained(path):
        try:
            with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as content:
                content.extractall(target, **EXTRACTION)  # noqa: S202 - it leaves the sandbox in no case
        except tarfile.TarError as error:
            raise SandboxFailed(f"the archive for {path} cannot be unpacked: {error}", path=path) from error


def split_path(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or "\0" in path:
        message = f"{path!r} is not a path inside the sandbox; give a plain one, without '..'"
        raise SandboxFailed(message, path=path, reason="path")
    return parts


@contextmanager
def _parent(root: str, home: str, path: str, *, create: bool = False) -> Iterator[tuple[int, str, bool]]:
    """Open the folder of a path's last component; yield it, that name, and whether links are followed."""
    absolute = path.startswith("/")
    if absolute and root != "/" and not path.startswith(f"{root}/"):
        message = f"{path!r} is not a path inside the sandbox; give one relative to the workspace, or below {root}"
        raise SandboxFailed(message, path=path, reason="path")
    follow = absolute and root == "/"
    *parts, name = split_path(path.removeprefix(root).lstrip("/") if absolute else path)
    if follow:
        folder = "/" + "/".join(parts)
        if create:
            Path(folder).mkdir(0o755, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield descriptor, name, True
        finally:
            os.close(descriptor)
    else:
        with open_folder(Path(root if absolute else home), parts, create=create) as descriptor:
            yield descriptor, name, False


@contextmanager
def open_folder(root: Path, parts: Sequence[str], *, create: bool = False) -> Iterator[int]:
    """Open the folder `parts` below `root`, following no symbolic link; close it at the end."""
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
            message = f"{path} is or leads through a symbolic link or a file; only plain folders are followed"
            raise SandboxFailed(message, path=path, reason="link") from error
        reason = "missing" if error.errno == errno.ENOENT else "system"
        raise SandboxFailed(f"{path} in the sandbox: {error.strerror}", path=path, reason=reason) from error
