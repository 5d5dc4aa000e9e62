"""Clients and a node's broker: the blocks of trajectories that stay on the node (`keep = "node"`)."""

from __future__ import annotations

import zlib
from typing import Any, ClassVar

from .base import FOR_ALL, JobIdentifier, Reply, Request, Roles


class FetchBlock(Request, frozen=True):
    """Give a block; its id is the right to it."""

    roles: ClassVar[Roles] = FOR_ALL
    block_id: JobIdentifier


class BlockGiven(Reply, frozen=True):
    """Answer to `FetchBlock`. Further frame: the block; none if it is not there."""


def block_checksum(block: Any) -> int:
    """Return the CRC-32 of a block (any buffer), as `BlockHandle.checksum` has it."""
    return zlib.crc32(block)
