"""What happened to a job, as its history keeps it: MessagePack items, one behind another, and how they are read.

The journal keeps them unchanged, so a tag and what its fields mean stay for ever. What cannot be read, of a damaged
journal, is left out.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgpack
import msgspec

from ...wire.messages.base import Attempt  # noqa: TC001 - msgspec reads the annotations at run time
from ...wire.messages.jobs import Outcome, Phase  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Iterator

READ_BYTES = 1024
"""First buffer of an unpacker; `msgpack` would take a new megabyte for each history."""


class Item(msgspec.Struct, frozen=True, array_like=True):
    at: float


class QueuedItem(Item, frozen=True, tag=0):
    attempt: Attempt
    phase: Phase
    code: str = ""
    """Of the error that ended the attempt before."""
    message: str = ""


class HeldItem(Item, frozen=True, tag=1):
    attempt: Attempt
    phase: Phase
    stage_id: str
    node: str


class AssignedItem(Item, frozen=True, tag=2):
    attempt: Attempt
    backend: str


class EndedItem(Item, frozen=True, tag=3):
    task: str
    group_id: str
    outcome: Outcome
    reward: float | None
    stop_reason: str
    tokens: int
    turns: int
    backend: str
    code: str = ""
    message: str = ""


class CollectedItem(Item, frozen=True, tag=4):
    pass


class TakenUpItem(Item, frozen=True, tag=5):
    """The broker was restarted."""


class LeftOutItem(Item, frozen=True, tag=6):
    items: int


class TracedItem(Item, frozen=True, tag=7):
    """First of a job's items, if spans are made of it."""

    traceparent: str
    """Of the job's span."""
    parent_span: str


HistoryItem = QueuedItem | HeldItem | AssignedItem | EndedItem | CollectedItem | TakenUpItem | LeftOutItem | TracedItem


def read_items(packed: bytes) -> Iterator[HistoryItem]:
    """Yield a history's items, the oldest first."""
    for content in unpacked(packed):
        with suppress(msgspec.ValidationError):
            yield msgspec.convert(content, HistoryItem)


def unpacked(packed: bytes) -> list[Any]:
    """Return the content of a history's items, the oldest first: lists that begin with a tag, if it is undamaged."""
    unpacker = msgpack.Unpacker(read_size=READ_BYTES, max_buffer_size=0, unicode_errors="replace")
    unpacker.feed(packed)
    found: list[Any] = []
    with suppress(ValueError, TypeError, msgpack.UnpackException):
        found.extend(unpacker)
    return found
