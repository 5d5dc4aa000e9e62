"""The protocol between a sandbox's client and its execution server: one class per request.

A frame is 4 bytes of length, 8 of a number that the client counts up, and one MessagePack map. Every request has one
reply of the same number: the answer that its class names, or `Failed`. `Cancel` is none: the request of its number ends
at once, and that one's reply says so.

Both sides are of one user and one release, and the socket lies in the sandbox's own folder, which is 0700.
"""

from __future__ import annotations

import struct
from typing import Any, ClassVar

import msgspec

from ...errors import ErrorInfo
from ...wire.messages.jobs import SandboxKind
from ..containers.specification import SandboxSpec
from ..editor.arguments import EditorArguments
from ..editor.outcome import EditOutcome
from ..sessions.bash_session import BashResult
from ..sessions.cell_session import CellResult
from ..sessions.ipython_session import IPythonChoice

SOCKET = "server.sock"
"""In the sandbox's folder."""
FRAME = struct.Struct("<IQ")
UPLOAD_LIMIT_BYTES = 256 * 2**20
ORDER_LIMIT_BYTES = 128 * 1024
"""What a datagram between two processes may hold, with room to spare."""
FRAME_LIMIT_BYTES = UPLOAD_LIMIT_BYTES + 2**20


class ServerOrder(msgspec.Struct, frozen=True):
    path: str
    kind: SandboxKind
    spec: SandboxSpec


class Failed(msgspec.Struct, frozen=True):
    """The request was not done, or not to its end."""

    error: ErrorInfo


class Done(msgspec.Struct, frozen=True):
    """The request was done."""


class Content(msgspec.Struct, frozen=True):
    data: bytes


class Opened(msgspec.Struct, frozen=True):
    session: int


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


class Request(msgspec.Struct, frozen=True, tag=True):
    answer: ClassVar[type[Any]] = Done


class Take(Request, frozen=True):
    """Hold the sandbox from now on; the previous holder is disconnected."""

    lease_s: float
    """The server ends the sandbox after so long without a renewal."""


class Renew(Request, frozen=True):
    """Renew the lease; the reply is an error if the container was ended for good, but the lease is renewed."""


class Exec(Request, frozen=True):
    """Run one command to its end (see `Sandbox.exec`)."""

    answer = ExecResult
    command: tuple[str, ...]
    timeout_s: float
    stdin: bytes
    output_limit_bytes: int
    environment: dict[str, str]
    directory: str


class ReadFile(Request, frozen=True):
    answer = Content
    path: str
    limit_bytes: int


class WriteFiles(Request, frozen=True):
    files: dict[str, bytes]
    mode: int


class Upload(Request, frozen=True):
    """Unpack a tar archive below a folder."""

    path: str
    archive: bytes


class StartBash(Request, frozen=True):
    answer = Opened


class RunBash(Request, frozen=True):
    answer = BashResult
    session: int
    command: str
    timeout_s: float
    wait_s: float | None


class SendBash(Request, frozen=True):
    """Type on the terminal of a bash whose command is running."""

    answer = BashResult
    session: int
    data: bytes
    timeout_s: float
    wait_s: float | None


class StartIPython(Request, frozen=True):
    answer = Opened
    python: str
    ipython: IPythonChoice


class StartKernel(Request, frozen=True):
    answer = Opened
    argv: tuple[str, ...]
    """Its command line; empty: ipykernel's."""


class RunCell(Request, frozen=True):
    answer = CellResult
    session: int
    code: str
    timeout_s: float


class Edit(Request, frozen=True):
    answer = EditOutcome
    arguments: EditorArguments
    timeout_s: float


class Listen(Request, frozen=True):
    """Pass a socket that listens on the 127.0.0.1 that commands see (see `Sandbox.listen`)."""

    port: int
    receiver: str
    """Who gets it (see `passed_socket`)."""


class CloseSession(Request, frozen=True):
    session: int


class EndProcesses(Request, frozen=True):
    """Kill all that runs inside (see `Sandbox.end_processes`)."""


class FreeDisk(Request, frozen=True):
    """End what runs for good, and remove all files: the disk is full, and this sandbox holds most of it."""

    size_bytes: int
    entries: int
    own: bool
    """It has filled the disk itself."""


class Close(Request, frozen=True):
    """End the sandbox; the reply comes when all of it is gone."""


class Cancel(Request, frozen=True):
    """End the request of the same number."""


AnyRequest = (
    Take
    | Renew
    | Exec
    | ReadFile
    | WriteFiles
    | Upload
    | StartBash
    | RunBash
    | SendBash
    | StartIPython
    | StartKernel
    | RunCell
    | Edit
    | Listen
    | CloseSession
    | EndProcesses
    | FreeDisk
    | Close
    | Cancel
)

_encoder = msgspec.msgpack.Encoder()
requests: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)


def frame(number: int, content: msgspec.Struct) -> bytes:
    packed = _encoder.encode(content)
    return FRAME.pack(len(packed), number) + packed


def reply_frame(number: int, reply: msgspec.Struct) -> bytes:
    """Pack a reply into a frame; its first byte tells `Failed` from an answer."""
    packed = (b"E" if isinstance(reply, Failed) else b"V") + _encoder.encode(reply)
    return FRAME.pack(len(packed), number) + packed


def reply_of(packed: bytes, answer: type[Any]) -> Any:
    """Unpack the reply to a request with that `answer`; a `Failed` where it was not done.

    Raises:
        msgspec.MsgspecError: it is neither.
    """
    return msgspec.msgpack.decode(memoryview(packed)[1:], type=Failed if packed[:1] == b"E" else answer)


def take_frames(received: bytearray) -> list[tuple[int, bytes]]:
    frames = []
    start = 0
    while len(received) - start >= FRAME.size:
        length, number = FRAME.unpack_from(received, start)
        end = start + FRAME.size + length
        if len(received) < end:
            break
        frames.append((number, bytes(received[start + FRAME.size : end])))
        start = end
    del received[:start]
    return frames


def too_large(received: bytearray) -> bool:
    return len(received) >= FRAME.size and FRAME.unpack_from(received)[0] > FRAME_LIMIT_BYTES
