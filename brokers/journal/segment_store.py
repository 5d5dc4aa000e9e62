"""Trajectories' blocks in append-only files beside a journal; SQLite, which would write them three times, keeps rows.

    rollout.journal.segment-00000001      up to 64 MiB of blocks, one behind the other, and nothing else

Whoever keeps blocks here (`Journal`) writes down each one's `Place`: first `append`, then its own commit, then
`commit` here; so no row names bytes that are not written. If its commit fails, `rewind` takes the bytes back. A file is
removed once no block in it is wanted, and a new process begins a new one, so what a crash left behind the last commit
is in nobody's way. A block that was cut off or changed is told by its length and checksum: `BlockLost`, for it alone.

Blocks are read with `pread`: a file that is truncated under an `mmap` would end the process.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta

from ...errors import JournalFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

SEGMENT_BYTES = 64 * 2**20
"""A file that is as long as this gets no further blocks."""
SEGMENTS = 64
"""No file is longer than this part of the journal's limit, but for its last block."""
SLACK_SEGMENTS = 4
"""What may lie about unwanted, besides as much as is wanted, before anything is copied."""
SUFFIX = ".segment-"

Count = Annotated[int, Meta(ge=0, lt=2**62)]


class Place(NamedTuple):
    """Where a block is."""

    segment: Count
    """The file's number, from 1; 0: the block is lost."""
    offset: Count
    size_bytes: Count
    checksum: Count


class BlockLost(ValueError):
    """A block is not where it was written, and will not be."""


@dataclass(slots=True)
class _Segment:
    size_bytes: int
    blocks: int = 0
    """Those that are wanted."""
    wanted_bytes: int = 0


class SegmentStore:
    """The segments of one journal. With `sync`, `append` returns when the disk has the blocks."""

    def __init__(self, journal: Path, limit_bytes: int, *, sync: bool = False) -> None:
        self.segment_bytes = min(SEGMENT_BYTES, limit_bytes // SEGMENTS)
        self._journal = journal
        self._sync = sync
        self._segments = {number: _Segment(size) for number, size in segment_sizes(journal).items()}
        self._last = self._found = max(self._segments, default=0)
        """The highest number; and that of the process before."""
        self._file = -1
        """The last segment, while blocks are appended to it."""
        self._touched: dict[int, int] = {}
        """The segments with blocks that were not committed, and how long they were before."""

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self._segments.values())

    @property
    def wanted_bytes(self) -> int:
        return sum(segment.wanted_bytes for segment in self._segments.values())

    @property
    def is_wasteful(self) -> bool:
        """More is not wanted than may lie about."""
        unwanted = self.size_bytes - self.wanted_bytes
        return unwanted > self.wanted_bytes + SLACK_SEGMENTS * self.segment_bytes

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def take_up(self, places: Iterable[Place]) -> None:
        """Begin with the blocks that an earlier process has committed; remove the files in which there is none."""
        places = list(places)
        self._last = max(self._last, *(place.segment for place in places), 0)  # a file that was removed is never back
        self.commit(places, ())

    def append(self, blocks: Sequence[memoryview], *, sync: bool = False) -> list[Place]:
        """Write all, or nothing and raise `JournalFailed`; to be followed by `commit` or `rewind`."""
        try:
            places = [self._append(block) for block in blocks]
            if places and (self._sync or sync):
                os.fdatasync(self._file)
        except OSError as error:
            self.rewind()
            raise JournalFailed(
                f"the trajectories of the journal {self._journal} cannot be written: {error.strerror}; see that its "
                "disk has room and can be written to",
                path=str(self._journal),
            ) from error
        return places

    def rewind(self) -> None:
        """Take back what was not committed."""
        self.close()
        for number, size in self._touched.items():
            with contextlib.suppress(OSError):
                os.truncate(self._path(number), size)
            self._segments[number].size_bytes = size
        self._touched.clear()
        self._remove_unwanted()

    def commit(self, added: Iterable[Place], removed: Iterable[Place]) -> None:
        """Count what was written down of blocks; remove the files in which none is wanted any more."""
        self._touched.clear()
        for places, one in ((added, 1), (removed, -1)):
            for place in places:
                if (segment := self._segments.get(place.segment)) is not None:
                    segment.blocks += one
                    segment.wanted_bytes += one * place.size_bytes
        self._remove_unwanted()

    def read(self, place: Place) -> bytes:
        """Return a block; raise `BlockLost` if it is not what was written, `JournalFailed` if the disk fails."""
        path = self._path(place.segment)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                block = os.pread(file, place.size_bytes, place.offset)
            finally:
                os.close(file)
        except FileNotFoundError:
            raise BlockLost(f"the trajectory's file {path} is gone") from None
        except OSError as error:
            raise JournalFailed(f"{path} cannot be read: {error.strerror}", path=str(path)) from error
        if len(block) != place.size_bytes:
            raise BlockLost(f"the trajectory is cut off: {path} is too short")
        if zlib.crc32(block) != place.checksum:
            raise BlockLost(f"the trajectory in {path} at byte {place.offset} is not what was written")
        return block

    def check(self, place: Place) -> None:
        """Raise `BlockLost` if a block is not there. Only those are read that a crash may have reached: the last."""
        segment = self._segments.get(place.segment)
        if segment is None or place.segment == self._found or segment.size_bytes < place.offset + place.size_bytes:
            self.read(place)

    def emptiest(self, wanted_share: float) -> int | None:
        """Return the segment of which the least is wanted, if that is under this share of it."""
        shares = [
            (one.wanted_bytes / one.size_bytes, number)
            for number, one in self._segments.items()
            if one.wanted_bytes < wanted_share * one.size_bytes and not (self._file >= 0 and number == self._last)
        ]
        return min(shares)[1] if shares else None

    def _append(self, block: memoryview) -> Place:
        if self._file < 0 or self._segments[self._last].size_bytes >= self.segment_bytes:
            self._begin()
        segment = self._segments[self._last]
        offset = segment.size_bytes
        self._touched.setdefault(self._last, offset)
        written = 0
        while written < len(block):
            written += os.pwrite(self._file, block[written:], offset + written)
        segment.size_bytes += len(block)
        return Place(self._last, offset, len(block), zlib.crc32(block))

    def _begin(self) -> None:
        if self._file >= 0:
            os.fdatasync(self._file)
        self.close()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.open(self._path(self._last + 1), flags, 0o600)
        self._last += 1
        self._segments[self._last] = _Segment(0)
        if self._sync:
            sync_folder(self._journal.parent)

    def _remove_unwanted(self) -> None:
        for number in [number for number, one in self._segments.items() if one.blocks == 0]:
            if self._file >= 0 and number == self._last:
                if self._segments[number].size_bytes < self.segment_bytes:
                    continue
                self.close()
            with contextlib.suppress(OSError):  # then the next process removes it
                self._path(number).unlink()
            del self._segments[number]

    def _path(self, number: int) -> Path:
        return self._journal.with_name(f"{self._journal.name}{SUFFIX}{number:08d}")


class NoSegments(SegmentStore):
    """For a journal in memory, which refers to the blocks themselves: each has a place, and no file."""

    def __init__(self) -> None:
        self.segment_bytes = 0
        self._segments = {}

    def take_up(self, places: Iterable[Place]) -> None: ...

    def append(self, blocks: Sequence[memoryview], *, sync: bool = False) -> list[Place]:  # noqa: ARG002
        return [Place(0, 0, len(block), 0) for block in blocks]

    def commit(self, added: Iterable[Place], removed: Iterable[Place]) -> None: ...

    def rewind(self) -> None: ...

    def close(self) -> None: ...

    def check(self, place: Place) -> None: ...


def segment_paths(journal: Path) -> list[Path]:
    """Return the files in which blocks of a journal are."""
    start = journal.name + SUFFIX
    return [path for path in journal.parent.iterdir() if path.name.startswith(start) and path.suffix[9:].isdecimal()]


def segment_sizes(journal: Path) -> dict[int, int]:
    return {int(path.suffix[9:]): path.stat().st_size for path in segment_paths(journal)}


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
