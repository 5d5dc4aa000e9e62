"""Append-only files for trajectory blocks next to a journal; SQLite would write each block three times.

    rollout.journal.segment-00000001      up to 64 MiB of consecutive blocks, and nothing else

The caller (`Journal`) calls `append`, commits each block's `Place` itself, then calls `commit` here, so no row refers
to unwritten bytes. If its commit fails, the caller calls `rewind`. The store removes a file when no block in it is
wanted; a large one in a thread, since that takes milliseconds. A new process begins a new file, so bytes behind the
last commit stay unused. Length and checksum reveal a truncated or changed block, which raises `BlockLost`.

Large blocks are mapped where the disk is local (see `stored_block`): a segment's committed bytes never change.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta

from ...errors import JournalFailed
from ...system.stored_block import reader

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

SEGMENT_BYTES = 64 * 2**20
"""Size at which a file gets no further blocks."""
SEGMENTS = 64
"""A file gets no further blocks at 1/64 of the journal's limit."""
SLACK_SEGMENTS = 4
"""Unwanted bytes tolerated, in segments, in addition to as many bytes as are wanted."""
SUFFIX = ".segment-"
SUMMED_FROM_BYTES = 2**20
"""From this size on, pages are checked by the sums of their words, which takes a tenth of a CRC's time."""
REMOVED_APART_BYTES = 2**24
"""From this size on, a file is removed in a thread: its pages in memory are freed one by one."""
PAGE_BYTES = 4096
PAGE_WORDS = PAGE_BYTES // 8

Count = Annotated[int, Meta(ge=0, lt=2**62)]


class Place(NamedTuple):
    """The location of a block."""

    segment: Count
    """The file's number, from 1; 0 for a lost block."""
    offset: Count
    size_bytes: Count
    checksum: Count


class BlockLost(ValueError):
    """A block is permanently missing or damaged."""


@dataclass(slots=True)
class _Segment:
    size_bytes: int
    blocks: int = 0
    """Number of wanted blocks."""
    wanted_bytes: int = 0


class SegmentStore:
    """The segments of one journal. With `sync`, `append` returns after the disk has the blocks."""

    def __init__(self, journal: Path, limit_bytes: int, *, sync: bool = False) -> None:
        self.segment_bytes = min(SEGMENT_BYTES, limit_bytes // SEGMENTS)
        self._journal = journal
        self._sync = sync
        self._read = reader(journal)
        self._segments = {number: _Segment(size) for number, size in segment_sizes(journal).items()}
        self._last = self._found = max(self._segments, default=0)
        """`_last` is the highest number, `_found` that of the earlier process."""
        self._file = -1
        """Descriptor of the last segment while it is open for appending."""
        self._touched: dict[int, int] = {}
        """Lengths before the uncommitted appends, by segment."""

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self._segments.values())

    @property
    def wanted_bytes(self) -> int:
        return sum(segment.wanted_bytes for segment in self._segments.values())

    @property
    def is_wasteful(self) -> bool:
        """Whether there are more unwanted bytes than tolerated."""
        unwanted = self.size_bytes - self.wanted_bytes
        return unwanted > self.wanted_bytes + SLACK_SEGMENTS * self.segment_bytes

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def take_up(self, places: Iterable[Place]) -> None:
        """Register the blocks that an earlier process committed; remove files without any."""
        places = list(places)
        self._last = max(self._last, *(place.segment for place in places), 0)  # numbers of removed files are not reused
        self.commit(places, ())

    def append(self, blocks: Sequence[memoryview], *, sync: bool = False) -> list[Place]:
        """Write all blocks, or raise `JournalFailed` and write none; call `commit` or `rewind` afterwards."""
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
        """Remove uncommitted blocks."""
        self.close()
        for number, size in self._touched.items():
            with contextlib.suppress(OSError):
                os.truncate(self._path(number), size)
            self._segments[number].size_bytes = size
        self._touched.clear()
        self._remove_unwanted()

    def commit(self, added: Iterable[Place], removed: Iterable[Place]) -> None:
        """Count added and removed blocks; remove files without wanted blocks."""
        self._touched.clear()
        for places, one in ((added, 1), (removed, -1)):
            for place in places:
                if (segment := self._segments.get(place.segment)) is not None:
                    segment.blocks += one
                    segment.wanted_bytes += one * place.size_bytes
        self._remove_unwanted()

    def read(self, place: Place) -> bytes | memoryview:
        """Return a block; raise `BlockLost` if it is missing or damaged, `JournalFailed` if the disk fails."""
        path = self._path(place.segment)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                block = self._read(file, place.offset, place.size_bytes)
            finally:
                os.close(file)
        except FileNotFoundError:
            raise BlockLost(f"the trajectory's file {path} is gone") from None
        except OSError as error:
            raise JournalFailed(f"{path} cannot be read: {error.strerror}", path=str(path)) from error
        if len(block) != place.size_bytes:
            raise BlockLost(f"the trajectory is cut off: {path} is too short")
        if _checksum(block) != place.checksum:
            raise BlockLost(f"the trajectory in {path} at byte {place.offset} is not what was written")
        return block

    def check(self, place: Place) -> None:
        """Raise `BlockLost` if a block is missing; reads only blocks that a crash may have damaged."""
        segment = self._segments.get(place.segment)
        if segment is None or place.segment == self._found or segment.size_bytes < place.offset + place.size_bytes:
            self.read(place)

    def emptiest(self, wanted_share: float) -> int | None:
        """Return the number of the segment with the smallest wanted share, if below `wanted_share`."""
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
        return Place(self._last, offset, len(block), _checksum(block))

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
            if self._segments.pop(number).size_bytes < REMOVED_APART_BYTES:
                _remove(self._path(number))
            else:
                Thread(target=_remove, args=(self._path(number),), name="remove-segment").start()

    def _path(self, number: int) -> Path:
        return self._journal.with_name(f"{self._journal.name}{SUFFIX}{number:08d}")


class NoSegments(SegmentStore):
    """Segment store of a journal in memory: blocks have places but no files."""

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


def _remove(segment: Path) -> None:
    with contextlib.suppress(OSError):  # the next process removes the file
        segment.unlink()


def _checksum(block: bytes | memoryview) -> int:
    """Return the CRC-32 of a block; of a large one, of the sums of its pages and of the bytes behind the last one."""
    flat = memoryview(block)
    if len(flat) < SUMMED_FROM_BYTES:
        return zlib.crc32(flat)
    import numpy as np  # commands that show a journal rarely need it

    pages = np.frombuffer(flat, np.uint64, len(flat) // PAGE_BYTES * PAGE_WORDS).reshape(-1, PAGE_WORDS)
    return zlib.crc32(flat[pages.nbytes :], zlib.crc32(pages.sum(axis=1)))


def segment_paths(journal: Path) -> list[Path]:
    """Return the paths of a journal's segments."""
    start = journal.name + SUFFIX
    return [path for path in journal.parent.iterdir() if path.name.startswith(start) and path.suffix[9:].isdecimal()]


def segment_sizes(journal: Path) -> dict[int, int]:
    return {int(path.suffix[9:]): path.stat().st_size for path in segment_paths(journal)}


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the folder's entries."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
