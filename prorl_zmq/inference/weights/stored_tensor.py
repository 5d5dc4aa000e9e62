"""`StoredTensor`: the bytes of one tensor in a file, which are changed in place, piece by piece.

By reads and writes of an open file: a full disk or a broken one raises `OSError`, where a mapping would end the process
with SIGBUS, and on a disk's file system a page fault for each 4 KiB of a mapping costs more than the copies.
"""

from __future__ import annotations

import os
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from . import tensor_delta
from .tensor_delta import CHECKSUM, HASHERS, differences, overwritten, pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .tensor_delta import Bytes


class StoredTensor:
    """A tensor's place in an open file.

    Methods that change it return the checksum of the new bytes.

    Args:
        file: the descriptor, open for what is called.
        at: the offset of the first byte.
        length: of the tensor.
    """

    __slots__ = ("_at", "_file", "length")

    def __init__(self, file: int, at: int, length: int) -> None:
        self._file = file
        self._at = at
        self.length = length

    def checksum(self, algorithm: str = CHECKSUM) -> str:
        """Return the checksum of the bytes.

        Raises:
            ValueError: the file ends before the tensor does; so in the methods below.
        """
        hasher = HASHERS[algorithm]()
        for _, piece in self._pieces():
            hasher.update(piece.data)
        return hasher.hexdigest()

    def apply_xor(self, frame: memoryview, algorithm: str = CHECKSUM) -> str:
        """Apply a difference; applying it a second time undoes it.

        Raises:
            ValueError: the frame is damaged, or of another length; the tensor is then of neither version.
        """
        hasher = HASHERS[algorithm]()
        for (start, piece), difference in zip(self._pieces(), differences(frame, self.length), strict=True):
            np.bitwise_xor(piece, difference, out=piece)
            hasher.update(piece.data)
            self.write(start, piece)
        return hasher.hexdigest()

    def apply_overwrite(self, frame: memoryview, algorithm: str = CHECKSUM) -> str:
        """Write the bytes of an `overwrite` frame at their positions; may be repeated.

        Raises:
            ValueError: as `overwritten`; the tensor is unchanged.
        """
        positions, content = overwritten(frame, self.length)
        whole = np.empty(self.length, np.uint8)
        for start, piece in self._pieces():
            whole[start : start + len(piece)] = piece
        whole[positions] = content
        return self._replace(zip(count(0, tensor_delta.PIECE_BYTES), pieces(whole), strict=False), algorithm)

    def copy_from(self, other: StoredTensor, algorithm: str = CHECKSUM) -> str:
        """Take the bytes of a tensor of this length."""
        return self._replace(other._pieces(), algorithm)

    def write(self, start: int, piece: Bytes) -> None:
        """Write a piece: the only way in which a tensor is changed."""
        written = 0
        while written < len(piece):
            written += os.pwrite(self._file, piece[written:].data, self._at + start + written)

    def _replace(self, content: Iterable[tuple[int, Bytes]], algorithm: str) -> str:
        hasher = HASHERS[algorithm]()
        for start, piece in content:
            hasher.update(piece.data)
            self.write(start, piece)
        return hasher.hexdigest()

    def _pieces(self) -> Iterator[tuple[int, Bytes]]:
        """Read the tensor piece by piece; each is valid until the next one."""
        size = tensor_delta.PIECE_BYTES
        scratch = np.empty(min(size, self.length), np.uint8)
        for start in range(0, self.length, size):
            piece = scratch[: self.length - start]
            filled = 0
            while filled < len(piece):
                read = os.preadv(self._file, [piece[filled:].data], self._at + start + filled)
                if not read:
                    raise ValueError("its file ends before it does")
                filled += read
            yield start, piece
