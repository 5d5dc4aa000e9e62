"""What passes between a trainer and the process of a tracker, one packet each, packed by msgpack.

The first is `RunSettings`; `Values` and `Samples` follow; the end of the socket ends the run. Back come `Opened`, and
`Trouble`.
"""

from __future__ import annotations

import msgspec

from .conversation import Conversation  # noqa: TC001 - msgspec reads the annotations at run time


class Values(msgspec.Struct, frozen=True, tag=True):
    step: int
    values: dict[str, float]


class Samples(msgspec.Struct, frozen=True, tag=True):
    step: int
    rows: tuple[Conversation, ...]


class Opened(msgspec.Struct, frozen=True, tag=True):
    where: str


class Trouble(msgspec.Struct, frozen=True, tag=True):
    message: str


Entry = Values | Samples
Answer = Opened | Trouble
PACKET_BYTES = 2**18
"""Room for one."""
