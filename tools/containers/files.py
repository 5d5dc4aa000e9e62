"""Single files of a sandbox, read and written by a process that has joined its container.

A relative path is one of the workspace. It is opened component by component, relative to the folder before it, and
symbolic links are refused by the open itself, so a planted link cannot redirect it. An absolute path may lead through
links: it cannot leave the container. Without isolation an absolute path must be below the workspace, and is treated as
if it were relative. Only regular files are opened: a FIFO would block for ever.
"""

from __future__ import annotations

import errno
import fnmatch
import io
import os
import re
import shutil
import stat
import tarfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import SandboxFailed
from . import users

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
        _extract(path, archive, target)


def replace_folders(folders: Mapping[str, bytes], user: str) -> None:
    """Replace folders, named by absolute paths, by the contents of tar archives, which may be empty.

    What leads to a folder becomes a plain folder: nothing that a command left there, link or file, redirects or blocks
    it. What was in a folder is renamed first, since its files may be of users whose files cannot be removed.

    Args:
        folders: archive by path.
        user: who may write to the folders themselves; empty: the sandbox's own user.
    """
    for path, archive in folders.items():
        with _explained(path):
            *parents, name = split_path(path)
            folder = os.open("/", FOLDER_FLAGS)
            try:
                for part in parents:
                    if not _can_enter(part, folder):
                        _put_away(part, folder)
                        os.mkdir(part, 0o755, dir_fd=folder)
                    inner = os.open(part, FOLDER_FLAGS, dir_fd=folder)
                    os.close(folder)
                    folder = inner
                _put_away(name, folder)
                os.mkdir(name, 0o755, dir_fd=folder)
                made = os.open(name, FOLDER_FLAGS, dir_fd=folder)
            finally:
                os.close(folder)
            try:
                _extract(path, archive, made)
                if user and (account := users.find(user)).uid != os.geteuid():
                    try:
                        os.fchown(made, account.uid, account.gid)
                    except PermissionError:  # a root without capabilities may not give files away
                        os.fchmod(made, 0o777)
            finally:
                os.close(made)


def pack(paths: Sequence[str], exclude: Sequence[str], limit_bytes: int) -> bytes:
    """Return a tar archive, relative to `/`, of what is at absolute paths: regular files, folders, links among them.

    A symbolic link is kept if it is relative and its target is below the same path, and if it goes up only at first,
    since what follows may be links: another sandbox must not resolve one to a file of its own. What cannot be read is
    left out.

    Raises:
        SandboxFailed: the files have more than `limit_bytes` (`reason` is `size`).
    """
    content = _Bounded(limit_bytes)
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in paths:
            root = "/" + "/".join(split_path(path))
            for found in _below(root, exclude):
                _add(archive, found, root)
    return content.getvalue()


def split_path(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or "\0" in path:
        message = f"{path!r} is not a path inside the sandbox; give a plain one, without '..'"
        raise SandboxFailed(message, path=path, reason="path")
    return parts


class _Bounded(io.BytesIO):
    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._limit_bytes:
            raise SandboxFailed(f"files of more than {self._limit_bytes} bytes are not copied", reason="size")
        return super().write(data)


def _extract(path: str, archive: bytes, target: str | int) -> None:
    if not archive:
        return
    place = target if isinstance(target, str) else f"/proc/self/fd/{target}"
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as content:
            content.extractall(place, **EXTRACTION)  # noqa: S202 - it leaves the sandbox in no case
    except tarfile.TarError as error:
        raise SandboxFailed(f"the archive for {path} cannot be unpacked: {error}", path=path) from error


def _is_folder(name: str, folder: int) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _can_enter(name: str, folder: int) -> bool:
    """Return whether an entry is a folder of which this process may change the entries, once its mode allows it."""
    if not _is_folder(name, folder):
        return False
    mode = stat.S_IMODE(os.stat(name, dir_fd=folder).st_mode)
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        with suppress(PermissionError):
            os.chmod(name, mode | stat.S_IRWXU, dir_fd=folder)
    return os.access(name, os.R_OK | os.W_OK | os.X_OK, dir_fd=folder)


def _put_away(name: str, folder: int) -> None:
    """Rename an entry and remove what can be removed of it."""
    away = f".replaced-{os.urandom(8).hex()}"
    try:
        os.rename(name, away, src_dir_fd=folder, dst_dir_fd=folder)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.rmtree(name, dir_fd=folder)  # of the image: an overlay does not rename its folders
        return
    if _is_folder(away, folder):
        shutil.rmtree(away, ignore_errors=True, dir_fd=folder)
    else:
        os.unlink(away, dir_fd=folder)


def _below(root: str, exclude: Sequence[str]) -> Iterator[str]:
    """Yield a path and all below it, folders first, without those that a pattern of `tar --exclude` matches."""
    waiting = [root]
    while waiting:
        path = waiting.pop()
        relative = path.removeprefix(root).lstrip("/")
        if relative and any(_matches(relative, pattern) for pattern in exclude):
            continue
        yield path
        with suppress(NotADirectoryError, FileNotFoundError, PermissionError), os.scandir(path) as entries:
            if not os.path.islink(path):  # noqa: PTH114 - no pathlib in a forked child
                waiting += sorted((entry.path for entry in entries), reverse=True)


def _matches(path: str, pattern: str) -> bool:
    parts = path.split("/")
    ends = range(len(parts))
    return any(fnmatch.fnmatchcase("/".join(parts[start:]), pattern.rstrip("/")) for start in ends)


def _add(archive: tarfile.TarFile, path: str, root: str) -> None:
    try:
        status = os.lstat(path)
        member = tarfile.TarInfo(path.lstrip("/"))
        member.mode, member.mtime = stat.S_IMODE(status.st_mode), status.st_mtime
        if stat.S_ISDIR(status.st_mode):
            member.type = tarfile.DIRTYPE
            archive.addfile(member)
        elif stat.S_ISLNK(status.st_mode):
            target = os.readlink(path)  # noqa: PTH115
            pointed = os.path.normpath(f"{os.path.dirname(path)}/{target}")  # noqa: PTH120
            up = re.match(r"(\.\./+)*", target)
            goes_back = ".." in target[up.end() if up else 0 :].split("/")
            if not (target.startswith("/") or goes_back) and pointed.startswith(f"{root}/"):
                member.type, member.linkname = tarfile.SYMTYPE, target
                archive.addfile(member)
        elif stat.S_ISREG(status.st_mode):
            file = os.open(path, os.O_RDONLY | FILE_FLAGS)
            with os.fdopen(file, "rb") as content:
                member.size = os.fstat(file).st_size
                archive.addfile(member, content)
    except (FileNotFoundError, PermissionError):
        return


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
