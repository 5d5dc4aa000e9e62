"""A folder of weights whose chunks a process serves: whole, or as far as it has received it."""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from ...errors import InvalidWeights
from ...system.files import open_regular
from ...wire.messages.relay import INDEX_FILE
from ..checkpoint import DELTA, INDEX, read_index
from ..weights.tensor_delta import checksum
from ..weights.version_folder import CHUNK_BYTES, read_version

if TYPE_CHECKING:
    from pathlib import Path

    from ..weights.local_copy import LocalCopy
    from ..weights.version_chain import Content
from ..weights.version_folder import Sums

FILES_LIMIT = 100_000
NAME_LIMIT_BYTES = 255
TOTAL_LIMIT_BYTES = 2**44


class OfferedFolder:
    """One folder, for the threads of one process.

    Args:
        path: of the folder.
        index: the bytes of its index.
        whole: all its chunks are there.
        copy: the folder is this copy, which changes with time: chunks are read only while it has `content`.
        content: see `copy`.

    Raises:
        InvalidWeights: the index is not one of which chunks can be served.
    """

    def __init__(
        self,
        path: Path,
        index: bytes,
        *,
        whole: bool,
        copy: LocalCopy | None = None,
        content: Content | None = None,
    ) -> None:
        self.path = path
        self.index = index
        self.digest = hashlib.sha256(index).hexdigest()
        self.version = read_version(path, index)
        self.files = self._files()
        """The names and checksums of its files, by their numbers."""
        self.is_open = not whole
        """Chunks that are lacking may come."""
        self._have: set[tuple[int, int]] | None = None if whole else set()
        self._seen: tuple[int, ...] = ()
        """The index's file when it was compared last."""
        self._copy = copy
        self._content = content

    def _files(self) -> list[tuple[str, Sums]]:
        files, version = self.version.files, self.version
        if files.keys() != {*version.weight_map.values()} or len(files) > FILES_LIMIT:
            raise version.invalid("has an index that lacks the checksums of its files")
        for name, sums in files.items():
            if name in (INDEX, DELTA) or name.startswith(".") or "\\" in name or not _can_be_written(name):
                raise version.invalid(f"has an index that names a file {name}")
            if sums.size_bytes < 0 or len(sums.chunks) != -(-sums.size_bytes // CHUNK_BYTES):
                raise version.invalid(f"has {len(sums.chunks)} checksums of {name}, a file of {sums.size_bytes} bytes")
        if sum(sums.size_bytes for sums in files.values()) > TOTAL_LIMIT_BYTES:
            raise version.invalid("is larger than any model")
        return sorted(files.items())

    def has_chunk(self, file: int, chunk: int) -> bool:
        """Return whether the index has a chunk of these numbers, which are not negative."""
        return file < len(self.files) and chunk < len(self.files[file][1].chunks)

    def length(self, file: int, chunk: int) -> int:
        """Return the length of a chunk."""
        return min(CHUNK_BYTES, self.files[file][1].size_bytes - chunk * CHUNK_BYTES)

    def is_right(self, file: int, chunk: int, data: bytes) -> bool:
        """Return whether bytes are those of a chunk."""
        wanted = self.files[file][1].chunks[chunk]
        return len(data) == self.length(file, chunk) and checksum(np.frombuffer(data, np.uint8)) == wanted

    def read_from(self, opened: int, file: int, chunk: int) -> bytes:
        """Return a chunk from the opened file."""
        return os.pread(opened, self.length(file, chunk), chunk * CHUNK_BYTES)

    def add(self, file: int, chunk: int) -> None:
        """Take a chunk as received."""
        if self._have is not None:
            self._have.add((file, chunk))

    def _check_index(self) -> None:
        """Raise if the index on disk is another one; it is read only if its file has changed."""
        stat = (self.path / INDEX).stat()
        seen = (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if seen != self._seen:
            if read_index(self.path) != self.index:
                raise self.version.invalid("was written again")
            self._seen = seen

    def read(self, file: int, chunk: int) -> bytes | None:
        """Return a chunk that the index has, or the index; None: it is not there.

        Raises:
            OSError, InvalidWeights: the folder is not as it was.
            RequestTimeout: another process has locked the copy.
        """
        if file == INDEX_FILE:
            return self.index
        if self._have is not None and (file, chunk) not in self._have:
            return None
        with ExitStack() as stack:
            if self._copy is not None and self._content is not None:
                stack.enter_context(self._copy.reading(self._content, 0.0))
            elif self._have is None:
                self._check_index()
            opened = stack.enter_context(open(self.path / self.files[file][0], "rb", buffering=0, opener=open_regular))
            data = self.read_from(opened.fileno(), file, chunk)
        if len(data) != self.length(file, chunk):
            raise self.version.invalid(f"has {self.files[file][0]} without its end")
        return data


def _can_be_written(name: str) -> bool:
    try:
        return len(os.fsencode(name)) <= NAME_LIMIT_BYTES
    except UnicodeEncodeError:
        return False


def offered_version(path: Path) -> OfferedFolder:
    """Return a version that is whole, as its writer left it.

    Raises:
        InvalidWeights: there is none that can be served.
    """
    try:
        return OfferedFolder(path, read_index(path), whole=True)
    except (OSError, ValueError) as error:
        raise InvalidWeights(f"{path.name} has no index that can be read: {error}", path=str(path)) from error
