"""What became of one cell: plain data, the same for Python and for the languages of other kernels."""

from __future__ import annotations

import struct

import msgspec

CODE_LIMIT_BYTES = 4 * 2**20
"""Longest cell."""
IMAGES = 16
"""Most images of one cell that are kept."""
IMAGES_LIMIT_BYTES = 32 * 2**20
"""Most bytes of one cell's images together that are kept."""
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class CellResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    """What it wrote and what its last expression gave, in the order they came; tracebacks are in it. The head and tail
    of it if it was longer than the limit, with a note between them; bytes that are not UTF-8 are replaced."""
    images: tuple[bytes, ...] = ()
    """PNG files, in their order."""
    error: str = ""
    """The name of the exception that ended the cell; empty if none did."""
    timed_out: bool = False
    """It was interrupted, or its interpreter killed, at the time limit."""
    restarted: bool = False
    """The interpreter ended, with this cell or while the one before was cancelled: only files were kept."""
    ended: str = ""
    """How the interpreter ended in this cell, such as "it was killed by signal 11 (SIGSEGV)"."""
    dropped_bytes: int = 0
    """Bytes of text that were left out."""
    dropped_images: int = 0
    """Images that were left out: too many, too large, or not PNG."""

    @property
    def ok(self) -> bool:
        """Whether the cell came to its end by itself, without an exception."""
        return not (self.error or self.ended or self.timed_out)


class Images:
    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._size = 0
        self.dropped = 0
        """How many were left out."""

    def append(self, image: bytes) -> None:
        """Take another one; what is no PNG file, or too much, is left out."""
        fits = len(self._kept) < IMAGES and self._size + len(image) <= IMAGES_LIMIT_BYTES
        if fits and png_dimensions(image):
            self._kept.append(image)
            self._size += len(image)
        else:
            self.dropped += 1

    def content(self) -> tuple[bytes, ...]:
        return tuple(self._kept)

    def clear(self) -> None:
        self._kept.clear()
        self._size = self.dropped = 0


def png_dimensions(image: bytes) -> tuple[int, int] | None:
    """Return a PNG file's width and height in pixels; None if it is none."""
    if len(image) < 24 or not image.startswith(PNG_SIGNATURE):
        return None
    width, height = struct.unpack_from("!II", image, 16)
    return width, height
