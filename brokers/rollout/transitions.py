"""The transitions of a job, packed as its history: consecutive MessagePack arrays, each with a tag and a time.

The journal stores histories unchanged, so the tags and the meaning of fields never change. Readers skip unreadable
parts.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack
import msgspec

from ...wire.messages.base import Attempt  # noqa: TC001 - msgspec reads the annotations at run time
from ...wire.messages.jobs import Outcome, Phase  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LIMIT_BYTES = 8192
"""Length from which a history is shortened before the next transition."""
READ_BYTES = 1024
"""First buffer of an unpacker; `msgpack` would allocate 1 MiB per history."""


class Transition(msgspec.Struct, frozen=True, array_like=True):
    at: float
    """Seconds since 1970, of the broker's wall clock."""


T = TypeVar("T", bound=Transition)
U = TypeVar("U", bound=Transition)


class ToQueue(Transition, frozen=True, tag=0):
    """The job waits for a phase."""

    attempt: Attempt
    phase: Phase
    code: str = ""
    """Code of the error that ended the attempt before."""
    message: str = ""


class ToStage(Transition, frozen=True, tag=1):
    """A stage process holds the phase."""

    attempt: Attempt
    phase: Phase
    stage_id: str
    node: str


class ToBackend(Transition, frozen=True, tag=2):
    """RUN has a backend."""

    attempt: Attempt
    backend: str


class ToEnd(Transition, frozen=True, tag=3):
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


class ToClient(Transition, frozen=True, tag=4):
    """A client acknowledged the result."""


class Recovered(Transition, frozen=True, tag=5):
    """The broker was restarted."""


class LeftOut(Transition, frozen=True, tag=6):
    """Transitions are missing here."""

    items: int


class Traced(Transition, frozen=True, tag=7):
    """First transition of a job with spans."""

    traceparent: str
    """Trace context of the job's span."""
    parent_span: str


class OfModel(Transition, frozen=True, tag=8):
    """A new job of another model than the policy."""

    model: str


AnyTransition = ToQueue | ToStage | ToBackend | ToEnd | ToClient | Recovered | LeftOut | Traced | OfModel
pack = msgspec.msgpack.Encoder().encode


def read(packed: bytes) -> Iterator[AnyTransition]:
    """Yield the transitions of a history, oldest first."""
    for content in contents(packed):
        with suppress(msgspec.ValidationError):
            yield msgspec.convert(content, AnyTransition)


def contents(packed: bytes) -> list[Any]:
    """Return a history's items unchecked: lists that begin with a tag, if it is undamaged."""
    unpacker = msgpack.Unpacker(read_size=READ_BYTES, max_buffer_size=0, unicode_errors="replace")
    unpacker.feed(packed)
    found: list[Any] = []
    with suppress(ValueError, TypeError, msgpack.UnpackException):
        found.extend(unpacker)
    return found


def first(items: Iterable[Any], kind: type[T], other: type[U] | None = None) -> T | U | None:
    """Return the first of unchecked items that is of a kind, or of two; the others are not decoded."""
    kind_of: dict[Any, type[T | U]] = {one.__struct_config__.tag: one for one in (kind, other) if one is not None}
    for item in items:
        found = kind_of.get(item[0]) if isinstance(item, list) and item and isinstance(item[0], int) else None
        if found is not None:
            with suppress(msgspec.ValidationError):
                return msgspec.convert(item, found)
    return None


def undamaged(packed: bytes, at: float | None) -> bytes:
    """Return the readable beginning of a history, with a `LeftOut` behind it if `at` is given and the rest was cut."""
    unpacker = msgpack.Unpacker(read_size=READ_BYTES, max_buffer_size=0)
    unpacker.feed(packed)
    whole = 0
    try:
        while whole < len(packed):
            unpacker.skip()
            whole = unpacker.tell()
    except (ValueError, msgpack.UnpackException):
        return packed[:whole] + (pack(LeftOut(at, 1)) if at is not None else b"")
    return packed


def without_middle(packed: bytes) -> bytes:
    """Return the first and last transitions of a history, a quarter of `LIMIT_BYTES` each, around a `LeftOut`."""
    items = list(read(packed))
    sizes = [len(pack(one)) for one in items]
    head, tail = 0, len(items)
    while head < tail and not isinstance(items[head], LeftOut) and sum(sizes[: head + 1]) <= LIMIT_BYTES // 4:
        head += 1
    while head < tail and sum(sizes[tail - 1 :]) <= LIMIT_BYTES // 4:
        tail -= 1
    if gone := items[head:tail]:  # empty if most items were unreadable
        number = sum(one.items if isinstance(one, LeftOut) else 1 for one in gone)
        items[head:tail] = [LeftOut(gone[-1].at, number)]
    return b"".join(map(pack, items))
