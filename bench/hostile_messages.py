"""Messages of a hostile or broken peer: bytes for raw sockets, and frames for ZeroMQ sockets, drawn from one seed."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Any

import msgpack

from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.backends import Assign
from prorl_zmq.wire.messages.base import PROTOCOL_VERSION
from prorl_zmq.wire.messages.engines import Generate
from prorl_zmq.wire.messages.front_door import Collect, Hello, Submit
from prorl_zmq.wire.messages.jobs import Phase, Sampling
from prorl_zmq.wire.messages.stages import PhaseDone, StageReport

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

MIB = 2**20
HTTP = b"POST /v1/completions HTTP/1.1\r\nHost: broker\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
TLS = bytes.fromhex("16030100c5010000c10303") + bytes(range(32)) + bytes.fromhex("20") + bytes(150)
ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
VALID = [
    codec.encode(message)
    for message in (
        Hello("one"),
        Submit("one", "session"),
        Collect("one", "session", "client", ("a", "b")),
        Assign("one", owner="run-1", job_id="job", attempt=1, wait_s=1.0),
        Generate("one", job_id="job", sampling=Sampling()),
        PhaseDone(stage_id="run-1", job_id="job", attempt=1, phase=Phase.RUN, tokens=4),
        StageReport(
            protocol=PROTOCOL_VERSION, stage_id="run-1", role=Phase.RUN, node="x", slots=8, endpoint="nowhere", tasks=()
        ),
    )
]
"""Messages that are cut short and changed: of all sockets, so that each is a stranger to most."""


def ready(socket_type: bytes) -> bytes:
    """Give ZMTP's READY command."""
    body = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", len(socket_type)) + socket_type
    return b"\x04" + bytes([len(body)]) + body


def zmtp_1(draw: random.Random) -> bytes:
    """Give the greeting of ZMTP 1.0, which needs no handshake, and messages behind it."""
    frames = [draw.choice(VALID)[:200], draw.randbytes(draw.randrange(1, 100)), b""]
    return b"\x01\x00" + b"".join(bytes([len(frame) + 1, draw.randrange(2)]) + frame for frame in frames)


def huge_claim(draw: random.Random) -> bytes:
    """Give a proper handshake, and a frame that says that it is very large."""
    size = draw.choice([2**31, 2**40, 2**62, 2**63 - 1])
    kind = draw.choice([b"DEALER", b"PUSH", b"REQ"])
    return ZMTP_GREETING + ready(kind) + b"\x02" + struct.pack(">Q", size) + draw.randbytes(100)


RAW: dict[str, Callable[[random.Random], bytes]] = {
    "random bytes": lambda draw: draw.randbytes(draw.randrange(1, 4096)),
    "HTTP": lambda _: HTTP,
    "TLS": lambda _: TLS,
    "ZMTP 1.0": zmtp_1,
    "greeting, cut short": lambda draw: ZMTP_GREETING[: draw.randrange(1, 64)],
    "no such socket type": lambda draw: ZMTP_GREETING + ready(draw.randbytes(draw.randrange(20))),
    "garbage for a handshake": lambda draw: ZMTP_GREETING + draw.randbytes(200),
    "garbage for frames": lambda draw: ZMTP_GREETING + ready(b"DEALER") + draw.randbytes(200),
    "huge claim": huge_claim,
}
"""Bytes for a raw socket, by kind."""


def changed(draw: random.Random) -> bytes:
    """Give a valid message with some bytes changed."""
    message = bytearray(draw.choice(VALID))
    for _ in range(draw.randrange(1, 8)):
        message[draw.randrange(len(message))] = draw.randrange(256)
    return bytes(message)


def wrong_types(draw: random.Random) -> bytes:
    """Give a message whose fields hold what they should not, or that has others."""
    content: dict[str, Any] = msgpack.unpackb(draw.choice(VALID))
    wrong = [
        None,
        -1,
        2**63,
        1e300,
        float("nan"),
        "",
        "x" * 5000,
        "\0\x1b[2J",
        [],
        {},
        [[]],
        {"type": "hello"},
        b"\xff",
    ]
    content[draw.choice([*content, "extra", "type", "request_id"])] = draw.choice(wrong)
    return msgpack.packb(content)


HEADERS: dict[str, Callable[[random.Random], bytes]] = {
    "random header": lambda draw: draw.randbytes(draw.randrange(1, 2000)),
    "truncated header": lambda draw: (message := draw.choice(VALID))[: draw.randrange(len(message))],
    "changed header": changed,
    "wrong types": wrong_types,
    "deep nesting": lambda draw: draw.choice([b"\x91", b"\x81\xa1a", b"\xdd\0\0\0\1"]) * draw.choice([500, 100_000]),
    "claims to hold much": lambda draw: (
        draw.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6"]) + b"\xff\xff\xff\xf0" + bytes(9)
    ),
    "many small containers": lambda draw: (
        b"\xdd" + struct.pack(">I", 60_000) + draw.choice([b"\x80", b"\x90"]) * 60_000
    ),
    "extension types": lambda draw: b"\xc7\xff" + draw.randbytes(256),
}
"""Headers, behind the empty frame where the socket wants one, by kind."""


def frames_of(kind: str, draw: random.Random, *, envelope: bool) -> list[bytes]:
    """Give the frames of a message for a ZeroMQ socket.

    Args:
        kind: a key of `HEADERS`, or one of `SHAPES`.
        draw: where chance comes from.
        envelope: the socket is a ROUTER, which takes an empty frame before the header.
    """
    front = [b""] if envelope else []
    match kind:
        case "no empty frame":
            return [draw.choice(VALID)]
        case "nothing behind the empty frame":
            return [b""]
        case "many frames":
            return [*front, draw.choice(VALID), *[b"x"] * draw.choice([100, 5000])]
        case "large frame":
            return [*front, draw.choice(VALID), os.urandom(MIB) * 5]
        case "large header":
            return [*front, b"\xc6" + struct.pack(">I", 5 * MIB) + bytes(5 * MIB)]
        case "jobs that are none":
            return [*front, VALID[1], *[changed(draw) for _ in range(draw.randrange(1, 50))]]
    return [*front, HEADERS[kind](draw)]


SHAPES = (
    *("no empty frame", "nothing behind the empty frame", "many frames"),
    *("large frame", "large header", "jobs that are none"),
)
HEAVY = {"large frame", "large header"}
"""Sent a tenth as often as the others."""
