"""A trajectory's block that is mapped from the disk of a node on this machine."""

from __future__ import annotations

from typing import NamedTuple


class MappedBlock(NamedTuple):
    """A block in the page cache, as a frame looks."""

    buffer: memoryview

    @property
    def bytes(self) -> bytes:
        return bytes(self.buffer)

    def __len__(self) -> int:
        return len(self.buffer)
