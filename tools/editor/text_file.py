"""An open text file of any size: its encoding, its lines, and where a text is in it.

A small file is read at once and a large one mapped. If another process cuts a mapped file, the kernel kills the reader,
which is a child that has changed nothing yet. The file is searched and edited as bytes; only what is shown is decoded.
"""

from __future__ import annotations

import codecs
import mmap
import os
import stat
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from .outcome import Refused, Stamp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .entry import DirectoryEntry

CHUNK_BYTES = 2**20
"""Files up to this size are read at once; larger ones are counted and checked in pieces of it."""
HEAD_BYTES = 2**16
"""The part of a file that shows how it ends its lines."""
OPEN_FLAGS = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC


class Encoding(NamedTuple):
    name: str
    codec: codecs.CodecInfo
    """Looked up here: the child in the sandbox has no library to load it from."""
    bom: bytes = b""
    unit: int = 1
    """Bytes of one code unit; a match must begin at a multiple of it."""

    def encode(self, text: str) -> bytes:
        try:
            return self.codec.encode(text)[0]
        except UnicodeEncodeError as error:
            missing = text[error.start]
            raise Refused(f"The file is in {self.name}, which has no {missing!r}; use other characters.") from None

    def decode(self, data: bytes) -> str:
        """Return bytes as text, with U+FFFD for what is invalid."""
        return self.codec.decode(data, "replace")[0]


UTF_8 = Encoding("UTF-8", codecs.lookup("utf-8"))
LATIN_1 = Encoding("Latin-1", codecs.lookup("latin-1"))
WITH_BOM = (
    Encoding("UTF-8", codecs.lookup("utf-8"), codecs.BOM_UTF8),
    Encoding("UTF-16", codecs.lookup("utf-16-le"), codecs.BOM_UTF16_LE, 2),
    Encoding("UTF-16", codecs.lookup("utf-16-be"), codecs.BOM_UTF16_BE, 2),
)


def is_latin_1(data: bytes, *, at_end: bool) -> bool:
    """Return whether a piece of a file without BOM is Latin-1 rather than damaged UTF-8.

    It is if more of its bytes beyond ASCII are invalid in UTF-8 than there are valid characters made of them. Unless
    the piece is `at_end` of the file, a character cut at its end counts for neither.
    """
    text = codecs.utf_8_decode(data, "surrogateescape", at_end)[0]
    clean = text.encode("utf-8", "ignore").decode()
    return len(text) - len(clean) > len(clean) - len(clean.encode("ascii", "ignore"))


class Match(NamedTuple):
    offset: int
    line: int
    """Counted from 1."""


@contextmanager
def open_text(entry: DirectoryEntry, *, write: bool = False) -> Iterator[TextFile]:
    """Open the text file at an entry, and close it at the end.

    Raises:
        Refused: it is not a regular file, or not text.
        OSError: it is missing, or may not be opened.
    """
    # Checked first: opening a device can have effects.
    _check_kind(os.stat(entry.name, dir_fd=entry.folder, follow_symlinks=False).st_mode, entry.path)
    descriptor = os.open(entry.name, OPEN_FLAGS | (os.O_RDWR if write else os.O_RDONLY), dir_fd=entry.folder)
    try:
        status = os.fstat(descriptor)
        _check_kind(status.st_mode, entry.path)
        yield TextFile(entry, descriptor, status)
    finally:
        os.close(descriptor)


class TextFile:
    """Offsets are in bytes from the start of the file, its BOM included.

    Raises:
        Refused: it is not text; the methods raise it too, as they read on.
    """

    def __init__(self, entry: DirectoryEntry, descriptor: int, status: os.stat_result) -> None:
        self.entry = entry
        self.descriptor = descriptor
        self.status = status
        self.stamp = stamp_of(status)
        """The file as it was when it was opened."""
        self.data = _content(descriptor)
        head = self.data[:HEAD_BYTES]
        self.encoding = next((encoding for encoding in WITH_BOM if head.startswith(encoding.bom)), UTF_8)
        self.start = len(self.encoding.bom)
        """Where the text begins."""
        if "\0" in self.encoding.decode(head) or len(self.data) % self.encoding.unit:
            raise self._binary()
        self.newline = self.encoding.encode("\n")
        first = self.index(self.newline, 0, HEAD_BYTES)
        self._crlf = first >= 0 and head[:first].endswith(self.encoding.encode("\r"))

    def translated(self, text: str) -> str:
        """Return text with the line ends of the file, as its first line has them."""
        return text.replace("\r\n", "\n").replace("\n", "\r\n") if self._crlf else text

    def settle_encoding(self) -> None:
        """Distinguish Latin-1 from UTF-8, where no BOM does, by the first piece that is not plain ASCII."""
        for _, chunk in self._chunks(0) if self.encoding is UTF_8 else ():
            if not chunk.isascii():
                self.encoding = LATIN_1 if is_latin_1(chunk, at_end=len(chunk) < CHUNK_BYTES) else UTF_8
                return

    def index(self, pattern: bytes, start: int, end: int = sys.maxsize) -> int:
        """Return the offset of the next match that begins at a whole code unit; -1 if there is none."""
        at = self.data.find(pattern, start, end)
        while at % self.encoding.unit and at >= 0:
            at = self.data.find(pattern, at + 1, end)
        return at

    def find(self, pattern: bytes, limit: int) -> list[Match]:
        """Return up to `limit` matches that do not overlap, as `bytes.count` counts them."""
        if self.encoding.unit == 1 and self.data.find(b"\0") >= 0:
            raise self._binary()
        matches: list[Match] = []
        line, counted, after = 1, self.start, self.start
        while len(matches) < limit and (at := self.index(pattern, after)) >= 0:
            line, counted = line + self.newlines(counted, at), at
            matches.append(Match(at, line))
            after = at + len(pattern)
        return matches

    def newlines(self, start: int, end: int) -> int:
        """Count the line feeds between two offsets."""
        return sum(self._count(chunk) for _, chunk in self._chunks(start, end))

    def line_start(self, line: int) -> int:
        """Return where a line begins, counted from 1; the line after the last begins at the end of the file.

        Raises:
            Refused: the file has fewer lines.
        """
        missing = line - 1
        for offset, chunk in self._chunks(self.start) if missing else ():
            if (found := self._count(chunk)) >= missing:
                at = offset
                for _ in range(missing):
                    at = self.index(self.newline, at) + self.encoding.unit
                return at
            missing -= found
        if missing > self._has_partial_line:
            raise self.no_line_after(line - 1 - missing + self._has_partial_line)
        return len(self.data) if missing else self.start

    def line_count(self) -> int:
        return self.newlines(self.start, len(self.data)) + self._has_partial_line

    def no_line_after(self, last: int) -> Refused:
        return Refused(f"{self.entry.path} has no line after line {last}.")

    @property
    def _has_partial_line(self) -> bool:
        """Whether the last line has no line end."""
        return len(self.data) > self.start and self.data[-self.encoding.unit :] != self.newline

    def _count(self, chunk: bytes) -> int:
        return chunk.count(b"\n") if self.encoding.unit == 1 else self.encoding.decode(chunk).count("\n")

    def _chunks(self, start: int, end: int | None = None) -> Iterator[tuple[int, bytes]]:
        end = len(self.data) if end is None else end
        for offset in range(start, end, CHUNK_BYTES):
            chunk = self.data[offset : min(offset + CHUNK_BYTES, end)]
            if self.encoding.unit == 1 and b"\0" in chunk:
                raise self._binary()
            yield offset, chunk

    def _binary(self) -> Refused:
        return Refused(
            f"{self.entry.path} is not a text file: it has NUL bytes or half characters in it. Look at it with bash."
        )


def stamp_of(status: os.stat_result) -> Stamp:
    return Stamp(status.st_size, status.st_mtime_ns)


def _content(descriptor: int) -> bytes | mmap.mmap:
    data = b""
    while more := os.pread(descriptor, CHUNK_BYTES, len(data)):
        data += more
        if len(data) > CHUNK_BYTES:
            try:
                return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError):  # a file system that maps no files, or a file of /proc
                continue
    return data


def _check_kind(mode: int, path: str) -> None:
    if stat.S_ISDIR(mode):
        raise Refused(f"{path} is a directory; only view works on directories.")
    if not stat.S_ISREG(mode):
        raise Refused(f"{path} is not a regular file but a device, FIFO or socket; only regular files can be edited.")
