"""Drops the records of a trajectory for which there is no room."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import zmq
from msgspec.structs import replace

from ..data.trajectory import block_bytes

if TYPE_CHECKING:
    from ..wire.messages.stages import PhaseEnd
    from ..wire.sockets import Frame

    End = TypeVar("End", bound=PhaseEnd)


def without_records(end: End, block: Frame, why: str) -> tuple[End, memoryview]:
    """Return the end of a phase and its block, without copying it, with all records dropped for this reason."""
    dropped = {**end.records_dropped, **{one.name: why for one in end.records}}
    buffer = memoryview(block.buffer if isinstance(block, zmq.Frame) else block)
    return replace(end, records=(), records_dropped=dropped), buffer[: block_bytes(end.tokens, end.turns)]
