"""`TextFile`: an open regular file of any size, read in pieces: its lines, its encoding, and where a text is in it.

It is read with `pread` and not mapped: another process may cut the file at any time, and a mapped page that is gone
kills its reader. It is searched and changed as bytes; only what is shown is decoded.
"""

from __future__ import annotations

import codecs
import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

from .outcome import Refused, Stamp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .entry import DirectoryEntry

CHUNK_BYTES = 2**20
HEAD_BYTES = 2**16
"""The part of a file that tells how it ends its lines."""
OPEN_FLAGS = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Encoding:
    name: str
    codec: codecs.CodecInfo
    """Looked up here: in the sandbox's child there is no library to load it from."""
    bom: bytes = b""
    unit: int = 1
    """Bytes of one code unit: a match at another offset is none."""

    @property
    def newline(self) -> bytes:
        return self.encode("\n")

    def encode(self, text: str) -> bytes:
        """Return text as the file has it.

        Raises:
            Refused: the encoding has no such character.
        """
        try:
            return self.codec.encode(text)[0]
        except UnicodeEncodeError as error:
            missing = text[error.start]
            raise Refused(f"The file is in {self.name}, which has no {missing!r}; use other characters.") from None

    def decode(self, data: bytes) -> str:
        """Return bytes as text, with U+FFFD for what is none."""
        return self.codec.decode(data, "replace")[0]

    def find(self, data: bytes, pattern: bytes, start: int) -> int:
        """Return where `pattern` is in `data`, which begins with a whole code unit; -1 if it is not there."""
        at = data.find(pattern, start)
        while at % self.unit and at >= 0:
            at = data.find(pattern, at + 1)
        return at

    def newlines(self, data: bytes, start: int, end: int) -> int:
        """Count the line feeds from `start` to `end`, both between two code units."""
        if self.unit == 1:
            return data.count(b"\n", start, end)
        return self.decode(data[start:end]).count("\n")

    def line_starts(self, data: bytes) -> Iterator[int]:
        """Return where lines begin in `data`, besides its start."""
        newline, after = self.newline, 0
        while (at := self.find(data, newline, after)) >= 0:
            after = at + self.unit
            yield after


UTF_8 = Encoding("UTF-8", codecs.lookup("utf-8"))
LATIN_1 = Encoding("Latin-1", codecs.lookup("latin-1"))
WITH_BOM = (
    Encoding("UTF-8", codecs.lookup("utf-8"), codecs.BOM_UTF8),
    Encoding("UTF-16", codecs.lookup("utf-16-le"), codecs.BOM_UTF16_LE, 2),
    Encoding("UTF-16", codecs.lookup("utf-16-be"), codecs.BOM_UTF16_BE, 2),
)


def encoding_of_bom(head: bytes) -> Encoding:
    """Return the encoding that the first bytes of a file name; UTF-8 if they name none."""
    return next((encoding for encoding in WITH_BOM if head.startswith(encoding.bom)), UTF_8)


def is_latin_1(data: bytes, *, at_end: bool) -> bool:
    """Say if a piece of a file without BOM is rather Latin-1 than UTF-8 with some damage.

    It is if more of its bytes that are not ASCII are out of place in UTF-8 than there are characters made of them.
    Unless the piece is `at_end` of the file, the character that it ends with may be cut, which tells nothing.
    """
    if data.isascii():
        return False
    text = codecs.utf_8_decode(data, "surrogateescape", at_end)[0]
    clean = text.encode("utf-8", "ignore").decode()
    characters = len(clean) - len(clean.encode("ascii", "ignore"))
    return len(text) - len(clean) > characters


@dataclass(frozen=True, slots=True)
class Match:
    offset: int
    line: int
    """Counted from 1."""


@contextmanager
def open_text(entry: DirectoryEntry, *, write: bool = False) -> Iterator[TextFile]:
    """Open the text file that an entry is, and close it at the end.

    Raises:
        Refused: it is no regular file, or no text.
        OSError: it is not there, or may not be opened.
    """
    # Looked at first: to open a device can do things.
    _check_kind(os.stat(entry.name, dir_fd=entry.folder, follow_symlinks=False).st_mode, entry.path)
    descriptor = os.open(entry.name, OPEN_FLAGS | (os.O_RDWR if write else os.O_RDONLY), dir_fd=entry.folder)
    try:
        status = os.fstat(descriptor)
        _check_kind(status.st_mode, entry.path)
        yield TextFile(entry, descriptor, status)
    finally:
        os.close(descriptor)


class TextFile:
    """An open text file. Offsets are in bytes from the start of the file, and so count its BOM."""

    def __init__(self, entry: DirectoryEntry, descriptor: int, status: os.stat_result) -> None:
        self.entry = entry
        self.descriptor = descriptor
        self.status = status
        self._head = os.pread(descriptor, HEAD_BYTES, 0)
        self.encoding = encoding_of_bom(self._head)
        self._check_text(self._head if self.encoding.unit == 1 else b"")
        if self.encoding.unit > 1 and (status.st_size % 2 or "\0" in self.encoding.decode(self._head)):
            raise self._binary()

    @property
    def stamp(self) -> Stamp:
        """What the file was when it was opened."""
        return stamp_of(self.status)

    @property
    def start(self) -> int:
        """Where the text begins: after the BOM."""
        return len(self.encoding.bom)

    @cached_property
    def crlf(self) -> bool:
        """Whether the file ends its lines with CR and LF; its first line decides."""
        first = self.encoding.find(self._head, self.encoding.newline, 0)
        return first >= 0 and self._head[:first].endswith(self.encoding.encode("\r"))

    def translated(self, text: str) -> str:
        return text.replace("\r\n", "\n").replace("\n", "\r\n") if self.crlf else text

    def settle_encoding(self) -> None:
        """Tell Latin-1 from UTF-8 by the first piece that is not plain ASCII; a BOM says it anyway."""
        if self.encoding is UTF_8:
            for _, chunk in self.chunks():
                if not chunk.isascii():
                    self.encoding = LATIN_1 if is_latin_1(chunk, at_end=len(chunk) < CHUNK_BYTES) else UTF_8
                    return

    def read(self, offset: int, count: int) -> bytes:
        """Read up to `count` bytes; fewer only at the end of the file."""
        data = os.pread(self.descriptor, count, offset)
        while data and len(data) < count and (more := os.pread(self.descriptor, count - len(data), offset + len(data))):
            data += more
        return data

    def chunks(self, offset: int = 0) -> Iterator[tuple[int, bytes]]:
        """Read the file from `offset` on, in pieces with where they are.

        Raises:
            Refused: a piece is no text.
        """
        while chunk := self.read(offset, CHUNK_BYTES):
            self._check_text(chunk)
            yield offset, chunk
            offset += len(chunk)

    def find(self, pattern: bytes, limit: int) -> list[Match]:
        """Find a text, as `bytes.count` counts it: the next match begins after the one before."""
        matches: list[Match] = []
        window, base, line = b"", self.start, 1
        for _, chunk in self.chunks(self.start):
            window += chunk
            after = counted = 0
            while (at := self.encoding.find(window, pattern, after)) >= 0:
                line += self.encoding.newlines(window, counted, at)
                counted = at
                matches.append(Match(base + at, line))
                if len(matches) == limit:
                    return matches
                after = at + len(pattern)
            # A match may begin in what stays; a code unit stays whole.
            kept = max(after, len(window) - len(pattern) + 1, 0)
            kept -= kept % self.encoding.unit
            line += self.encoding.newlines(window, counted, kept)
            window, base = window[kept:], base + kept
        return matches

    def line_start(self, line: int) -> int:
        """Return where a line begins, counted from 1; the line after the last begins at the end of the file.

        Raises:
            Refused: the file has fewer lines.
        """
        missing, offset, ended = line - 1, self.start, True
        if not missing:
            return offset
        for begin, chunk in self.chunks(offset):
            found = self.encoding.newlines(chunk, 0, len(chunk))
            if found >= missing:
                return begin + next(islice(self.encoding.line_starts(chunk), missing - 1, None))
            missing -= found
            offset, ended = begin + len(chunk), chunk.endswith(self.encoding.newline)
        if missing == 1 and not ended:
            return offset
        raise self.no_line_after(line - 1 - missing + (not ended))

    def line_of(self, offset: int) -> int:
        """Return the line, counted from 1, that an offset is in."""
        line = 1
        for begin, chunk in self.chunks(self.start):
            line += self.encoding.newlines(chunk, 0, max(min(len(chunk), offset - begin), 0))
            if begin + len(chunk) >= offset:
                break
        return line

    def lines_from(self, offset: int) -> int:
        """Count the lines from `offset`, the start of one, to the end of the file."""
        count, ended = 0, True
        for _, chunk in self.chunks(offset):
            count += self.encoding.newlines(chunk, 0, len(chunk))
            ended = chunk.endswith(self.encoding.newline)
        return count + (not ended)

    def no_line_after(self, last: int) -> Refused:
        return Refused(f"{self.entry.path} has no line after line {last}.")

    def _check_text(self, chunk: bytes) -> None:
        if self.encoding.unit == 1 and b"\0" in chunk:
            raise self._binary()

    def _binary(self) -> Refused:
        return Refused(
            f"{self.entry.path} is not a text file: it has NUL bytes or half characters in it. Look at it with bash."
        )


def stamp_of(status: os.stat_result) -> Stamp:
    return Stamp(status.st_size, status.st_mtime_ns)


def _check_kind(mode: int, path: str) -> None:
    if stat.S_ISDIR(mode):
        raise Refused(f"{path} is a directory; only view works on directories.")
    if not stat.S_ISREG(mode):
        raise Refused(f"{path} is not a regular file but a device, FIFO or socket; only regular files can be edited.")
