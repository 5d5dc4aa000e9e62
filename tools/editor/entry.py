"""`find_entry`: the directory entry that a path leads to, found without leaving a root directory.

The path is walked component by component, each opened relative to the one before without following links; a symbolic
link is read, and the walk restarts from the root with its target. So a link planted during the walk leads nowhere else.
Links that stay below the root are followed, absolute ones too, which `openat2` cannot do. Where the root is `/`, in a
container, links may point anywhere in it.
"""

from __future__ import annotations

import errno
import os
import posixpath
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .outcome import Refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RESTART_LIMIT = 100
"""Most symbolic links on a path and `..` in their targets, together; Linux allows 40 links."""
FOLDER_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """An entry of a directory, which may be missing and is not a symbolic link."""

    path: str
    """As the model gave it."""
    folder: int
    """Descriptor of the directory."""
    name: bytes
    """In it; `.` for the root itself."""


@contextmanager
def find_entry(path: str, root: str, directory: str, *, create: bool = False) -> Iterator[DirectoryEntry]:
    """Find where a path leads; the folder is closed at the end. `create` makes missing folders on the way.

    Raises:
        Refused: the path leads out of the root.
        OSError: it leads nowhere.
    """
    walk = _Walk(path, root, create=create)
    parts = walk.below_root(posixpath.join(directory, path).encode())
    for _ in range(RESTART_LIMIT):
        folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            instead = walk.step_down(folder, parts)
            if instead is None:
                yield DirectoryEntry(path, folder, parts[-1] if parts else b".")
                return
            parts = instead
        finally:
            os.close(folder)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


class _Walk:
    def __init__(self, path: str, root: str, *, create: bool) -> None:
        self._path = path
        self._create = create
        # Programs use either name of the root.
        self._roots = {_split(root.encode()), _split(os.path.realpath(root).encode())} if root != "/" else {()}

    def below_root(self, path: bytes) -> list[bytes]:
        """Return the components of an absolute path below the root."""
        parts = _split(path)
        for root in self._roots:
            if parts[: len(root)] == root:
                return list(parts[len(root) :])
        raise self._outside()

    def step_down(self, folder: int, parts: Sequence[bytes]) -> list[bytes] | None:
        """Move `folder`, which is the root, to the directory that holds the last component.

        At a link, or a `..`, which only a link can bring, return the components to walk instead.
        """
        for index, part in enumerate(parts):
            rest = parts[index + 1 :]
            if part == b"..":
                if not index and () not in self._roots:
                    raise self._outside()
                return [*parts[: max(index - 1, 0)], *rest]
            if (target := _link_target(folder, part)) is not None:
                before = self.below_root(target) if target.startswith(b"/") else [*parts[:index], *_split(target)]
                return [*before, *rest]
            if rest:
                self._enter(folder, part)
        return None

    def _enter(self, folder: int, part: bytes) -> None:
        try:
            inner = os.open(part, FOLDER_FLAGS, dir_fd=folder)
        except FileNotFoundError:
            if not self._create:
                raise
            with suppress(FileExistsError):
                os.mkdir(part, dir_fd=folder)
            inner = os.open(part, FOLDER_FLAGS, dir_fd=folder)
        try:
            os.dup2(inner, folder, inheritable=False)
        finally:
            os.close(inner)

    def _outside(self) -> Refused:
        return Refused(f"{self._path} leads out of the workspace; only files inside it can be viewed or edited.")


def _split(path: bytes) -> tuple[bytes, ...]:
    return tuple(part for part in path.split(b"/") if part not in (b"", b"."))


def _link_target(folder: int, name: bytes) -> bytes | None:
    """Return the target of a symbolic link; None for another entry, or none."""
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise
