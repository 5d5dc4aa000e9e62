"""The difference between two versions of one tensor: encoded by a trainer, decoded by an engine host.

A difference is one zstd frame (level 1) of `new ^ old`, or (`overwrite`, which is only read) of a count, that many byte
positions and the bytes for them, all positions and the count as little-endian u4. These are slime's encodings. Work is
done in pieces that stay in the processor's cache; the libraries release the interpreter's lock meanwhile, so threads
over tensors use all cores. What a frame decompresses to is bounded by the tensor's length.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from ...system.installation import how_to_install

try:
    import xxhash
    import zstandard
except ImportError as error:
    message = f"weight deltas need zstandard and xxhash: {how_to_install('server')}"
    raise ImportError(message) from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

PIECE_BYTES = 2**20
LEVEL = 1
CHECKSUM: Final = "xxh3-128"
"""The checksum that is written."""
OVERWRITE_LIMIT_BYTES = 2**32
"""Positions of `overwrite` have 32 bits."""
WINDOW_LIMIT_BYTES = 2**27
"""Most memory that a frame's header may ask of the decompressor."""


def frame_limit(length: int) -> int:
    """Return more bytes than any difference of a tensor of this length needs, in either encoding."""
    return 6 * length + PIECE_BYTES


class Hasher(Protocol):
    def update(self, data: memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: memoryview, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


HASHERS: dict[str, Callable[[], Hasher]] = {CHECKSUM: xxhash.xxh3_128, "adler32": _Adler32}
"""Checksums that are read, by their names in an index."""


def pieces(data: Bytes) -> Iterable[Bytes]:
    """Return views of the data, piece by piece."""
    return (data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))


def checksum(data: Bytes, algorithm: str = CHECKSUM) -> str:
    """Return the checksum of a tensor's bytes, in hexadecimal digits."""
    hasher = HASHERS[algorithm]()
    for piece in pieces(data):
        hasher.update(piece.data)
    return hasher.hexdigest()


def encode(new: Bytes, kept: Bytes) -> tuple[bytes, str]:
    """Return the xor of two versions of a tensor as a frame, empty if they are equal, and the new version's checksum.

    Args:
        new: the new version, uint8 [N].
        kept: the old one, uint8 [N], which becomes the new one.
    """
    hasher, compressor = xxhash.xxh3_128(), zstandard.ZstdCompressor(level=LEVEL).compressobj(size=len(new))
    scratch = np.empty(min(PIECE_BYTES, len(new)), np.uint8)
    frame: list[bytes] = []
    changed = False
    for now, before in zip(pieces(new), pieces(kept), strict=True):
        difference = np.bitwise_xor(now, before, out=scratch[: len(now)])
        hasher.update(now.data)
        frame.append(compressor.compress(difference.data))
        changed = changed or bool(difference.any())
        before[:] = now
    frame.append(compressor.flush())
    return b"".join(frame) if changed else b"", hasher.hexdigest()


def differences(frame: memoryview, length: int) -> Iterator[Bytes]:
    """Decompress a difference piece by piece; each is valid until the next one.

    Args:
        frame: of `xor`.
        length: of the tensor.

    Raises:
        ValueError: the frame is damaged, or not of this length.
    """
    scratch = np.empty(min(PIECE_BYTES, length) + 1, np.uint8)
    try:
        with zstandard.ZstdDecompressor(max_window_size=WINDOW_LIMIT_BYTES).stream_reader(frame) as reader:
            for start in range(0, length, PIECE_BYTES):
                size, filled = min(PIECE_BYTES, length - start), 0
                while filled < size:
                    read = reader.readinto(scratch.data[filled:size])
                    if not read:
                        raise ValueError("its difference is shorter than the tensor")
                    filled += read
                yield scratch[:size]
            if reader.readinto(scratch.data[:1]):
                raise ValueError("its difference is longer than the tensor")
    except zstandard.ZstdError as error:
        raise ValueError(f"its difference cannot be decompressed: {error}") from error


def overwritten(frame: memoryview, length: int) -> tuple[NDArray[np.uint32], Bytes]:
    """Return the positions that an `overwrite` frame names, and the bytes for them.

    Args:
        frame: of `overwrite`.
        length: of the tensor.

    Raises:
        ValueError: the frame is damaged, a position is outside of the tensor, or the tensor has 4 GiB or more, so that
            positions may have overflowed.
    """
    if length >= OVERWRITE_LIMIT_BYTES:
        raise ValueError(f"it has {length} bytes, and the positions of `overwrite` end at {OVERWRITE_LIMIT_BYTES}")
    content = np.frombuffer(_decompressed(frame, 4 + 5 * length), np.uint8)
    count = int.from_bytes(content[:4].tobytes(), "little")
    if len(content) != 4 + 5 * count:
        raise ValueError(f"its difference has {len(content)} bytes, which is wrong for {count} positions")
    positions = content[4 : 4 + 4 * count].view("<u4")
    if count and int(positions.max()) >= length:
        raise ValueError(f"its difference has the position {positions.max()}, and the tensor {length} bytes")
    return positions, content[4 + 4 * count :]


def _decompressed(frame: memoryview, limit_bytes: int) -> bytes:
    content: list[bytes] = []
    left = limit_bytes + 1
    try:
        with zstandard.ZstdDecompressor(max_window_size=WINDOW_LIMIT_BYTES).stream_reader(frame) as reader:
            while left and (piece := reader.read(min(left, PIECE_BYTES))):
                content.append(piece)
                left -= len(piece)
    except zstandard.ZstdError as error:
        raise ValueError(f"its difference cannot be decompressed: {error}") from error
    if not left:
        raise ValueError(f"its difference has more than {limit_bytes} bytes")
    return b"".join(content)
