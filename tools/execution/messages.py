"""The protocol between a sandbox's client and its execution server: frames, and the requests about the whole sandbox.

A frame is 4 bytes of length, 8 of a number that the client counts up, and a content: of a request one MessagePack map
(`calls` has the other requests), of its one reply, which has the same number, `V` and the result, or `E` and an
`ErrorInfo`. `Cancel` has no reply: the request of its number ends at once, and that one's reply says so.

Both sides are of one user and one release, and the socket lies in the sandbox's own folder, which is 0700.
"""

from __future__ import annotations

import asyncio
import os
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, cast

import msgspec
from msgspec import Meta

from ...wire.messages.jobs import SandboxKind
from ..containers.specification import SandboxSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOCKET = "server.sock"
"""In the sandbox's folder."""
FRAME = struct.Struct("<IQ")
UPLOAD_LIMIT_BYTES = 256 * 2**20
ORDER_LIMIT_BYTES = 128 * 1024
"""What a datagram between two processes may hold, with room to spare."""
FRAME_LIMIT_BYTES = UPLOAD_LIMIT_BYTES + 2**20
"""Largest request, and largest reply."""
RESULT, ERROR = b"V", b"E"

encode = msgspec.msgpack.Encoder().encode


class ServerOrder(msgspec.Struct, frozen=True):
    path: str
    kind: SandboxKind
    spec: SandboxSpec


class ExecResult(msgspec.Struct, frozen=True):
    exit_code: int
    """0 to 255; 128 + the signal's number if one ended it; 127 if there is no such program, 126 if it cannot run."""
    stdout: bytes
    """Its head and tail, with a note between them if it was longer than the limit."""
    stderr: bytes
    timed_out: bool
    """It was killed at the time limit."""
    dropped_bytes: int = 0
    """Bytes of both outputs that were left out."""


class Take(msgspec.Struct, frozen=True, tag=True):
    """Hold the sandbox from now on; the previous holder is disconnected."""

    lease_s: Annotated[float, Meta(gt=0)]
    """The server ends the sandbox after so long without a renewal."""


class Renew(msgspec.Struct, frozen=True, tag=True):
    """Renew the lease; the reply is an error if the container was ended for good, but the lease is renewed."""


class FreeDisk(msgspec.Struct, frozen=True, tag=True):
    """End what runs for good, and remove all files: the disk is full, and this sandbox holds most of it."""

    size_bytes: int
    entries: int
    own: bool
    """It has filled the disk itself."""


class Close(msgspec.Struct, frozen=True, tag=True):
    """End the sandbox; the reply comes when all of it is gone."""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End the request of the same number."""


def frame(number: int, content: bytes) -> bytes:
    return FRAME.pack(len(content), number) + content


class Line(asyncio.Protocol):
    """One end of a connection: calls `received` with each frame. Asyncio calls `connection_lost` at its end.

    It drops the connection to a process that sends a frame of more than `FRAME_LIMIT_BYTES`.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def received(self, number: int, content: bytes) -> None:
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def send(self, number: int, content: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(number, content))

    def drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= FRAME.size:
            length, number = FRAME.unpack_from(self._buffer, start)
            if length > FRAME_LIMIT_BYTES:
                self.drop()
                break
            end = start + FRAME.size + length
            if len(self._buffer) < end:
                break
            self.received(number, bytes(self._buffer[start + FRAME.size : end]))
            start = end
        del self._buffer[:start]


@contextmanager
def short_path(folder: Path, name: str = SOCKET) -> Iterator[str]:
    """Yield a path to a name in a folder whose own path may be longer than a Unix socket allows."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
