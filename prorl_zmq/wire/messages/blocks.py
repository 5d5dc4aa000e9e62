"""Messages between clients and a node's broker: trajectory blocks that the node keeps (`keep = "node"`)."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, ClassVar

from .base import FOR_ALL, JobIdentifier, Reply, Request, Roles

if TYPE_CHECKING:
    from .jobs import BlockHandle


class FetchBlock(Request, frozen=True):
    """Request a block; its id is a capability."""

    roles: ClassVar[Roles] = FOR_ALL
    block_id: JobIdentifier


class BlockGiven(Reply, frozen=True):
    """Answer to `FetchBlock`. Further frame: the block, unless it is missing."""


ROW_WORDS = 1024
"""Words of 8 bytes whose sums are taken at a time."""


def block_checksum(block: Any, records_at: int = 0) -> int:
    """Return the checksum of a block (any buffer), as `BlockHandle.checksum` has it.

    It is the CRC-32 of the trajectory's arrays. From the byte `records_at` on, unless that is 0, the CRC-32 goes on
    over sums in place of the bytes, which takes a sixth of the time: the words of 8 bytes are summed by place within
    rows of 1024, and by row, without carry; the words of the last, incomplete row go in as they are.
    """
    if not records_at:
        return zlib.crc32(block)
    import numpy as np  # commands without results do not need it

    flat = memoryview(block).cast("B")
    words = np.frombuffer(flat[records_at:], np.uint64)
    rows = words[: len(words) // ROW_WORDS * ROW_WORDS].reshape(-1, ROW_WORDS)
    found = zlib.crc32(flat[:records_at])
    parts: tuple[Any, ...] = (rows.sum(axis=0), rows.sum(axis=1), words[rows.size :])
    for part in parts:
        found = zlib.crc32(part, found)
    return found


def is_block(block: Any, handle: BlockHandle) -> bool:
    """Return whether a block (any buffer) is the one that its handle names."""
    try:
        return block_checksum(block, handle.records_at) == handle.checksum
    except ValueError:  # it has no whole words behind `records_at`
        return False
