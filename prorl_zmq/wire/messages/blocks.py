"""Messages between clients and a node's broker: trajectory blocks that the node keeps (`keep = "node"`)."""

from __future__ import annotations

import zlib
from typing import Any, ClassVar

from .base import FOR_ALL, JobIdentifier, Reply, Request, Roles


class FetchBlock(Request, frozen=True):
    """Request a block; its id is a capability."""

    roles: ClassVar[Roles] = FOR_ALL
    block_id: JobIdentifier


class BlockGiven(Reply, frozen=True):
    """Answer to `FetchBlock`. Further frame: the block, unless it is missing."""


def block_checksum(block: Any) -> int:
    """Return the CRC-32 of a block (any buffer), as `BlockHandle.checksum` has it."""
    return zlib.crc32(block)
