"""Opens, binds and connects sockets with the service's options, checks endpoints, and sends and receives frames.

- Every socket has LINGER 0, heartbeats (a stopped peer is noticed within 2 s; within 20 s between nodes and rollout
  brokers, where leases decide) and limits on the size of a frame and the number of frames of a message.
- A second bind silently steals a live ipc path from the first process, so `bind` holds a lock next to the path for the
  life of the process. The path's folder is created private (0700) if it is missing, and rejected by both sides if
  another account could put a socket there.
- Plaintext TCP is for loopback only: `bind` rejects other addresses unless `insecure`. Services bind through
  `security.zap_authenticator` and connect through `security.keyring`, which add the keys.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import re
from contextlib import suppress
from pathlib import Path
from socket import AF_INET, AF_UNIX, SOCK_DGRAM, create_connection, gethostbyname, gethostname
from socket import socket as plain_socket
from typing import TYPE_CHECKING, TypeVar

import zmq

from ..errors import EndpointInUse, InvalidEndpoint, MalformedMessage
from ..system.unix_peers import folder_problem, is_shared, listener_problem
from .messages.base import MAX_FRAMES, KeyRole

if TYPE_CHECKING:
    from collections.abc import Sequence

    Frame = bytes | memoryview | zmq.Frame

AnyFrame = TypeVar("AnyFrame", bound="bytes | zmq.Frame")

ELSEWHERE = "192.0.2.1"
"""An address that belongs to no host (RFC 5737)."""
IPC_PATH_LIMIT = 107
"""Longest path of a Unix socket on Linux, in bytes."""
COPY_LIMIT_BYTES = 64 * 1024
"""Frames from this size on are sent without a copy; for smaller ones a copy is faster (measured: 2.4 to 5 times)."""
MAX_FRAME_BYTES = 2**30
"""Largest frame that any socket accepts; a peer that sends a larger one is disconnected."""
CONTROL_FRAME_BYTES = 16 * 2**20
"""Largest frame of sockets that only accept headers: four times a header's limit, so that larger headers get a reply.
"""
JOB_FRAME_BYTES = 256 * 2**20
"""Largest frame of sockets that accept jobs: the largest job limit that a service can set."""
PROMPT_FRAME_BYTES = 64 * 2**20
"""Largest frame of sockets that accept headers and the tokens of one turn: 16 million tokens."""
NOBLOCK = int(zmq.NOBLOCK)
"""A plain int: combining two of pyzmq's flags costs more than packing a header."""
_MORE = int(zmq.SNDMORE)
_PORT = re.compile("[0-9]{1,5}")

PING_S = 0.5
NODE_PING_S = 5.0
"""Between nodes and rollout brokers: at half a second, each of thousands of nodes cost 400 µs/s."""
FRAME_LIMIT = MAX_FRAMES + 4
"""Most frames of a message with its envelope; a longer message is dropped whole."""
HIGH_WATER_MARK = 100_000
"""Messages that a socket queues for a peer: more than any stage process's credit."""


def open_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, limit_bytes: int = MAX_FRAME_BYTES, ping_s: float = PING_S
) -> zmq.Socket[bytes]:
    """Open a socket with the service's options. A peer that sends a frame over the limit is disconnected."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.set_hwm(HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, limit_bytes)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * ping_s))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(3000 * ping_s))
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if kind == zmq.REQ:
        # Relaxed alone lets a late reply answer the next request; the two options belong together.
        socket.setsockopt(zmq.REQ_RELAXED, 1)
        socket.setsockopt(zmq.REQ_CORRELATE, 1)
    return socket


def check_endpoint(endpoint: str) -> str:
    """Return `endpoint` if it is valid, else raise `InvalidEndpoint`."""
    transport, _, address = endpoint.partition("://")
    if transport == "ipc" and address and "\0" not in address:
        length = len(os.fsencode(address))
        if length > IPC_PATH_LIMIT:
            raise InvalidEndpoint(
                f"the ipc path {address} has {length} bytes; the system allows {IPC_PATH_LIMIT}. Use a shorter folder",
                endpoint=endpoint,
            )
        return endpoint
    host, _, port = address.rpartition(":")
    if transport == "tcp" and host and (port == "*" or (_PORT.fullmatch(port) and int(port) < 65536)):
        return endpoint
    raise InvalidEndpoint(f"{endpoint!r} is not ipc://PATH or tcp://HOST:PORT", endpoint=endpoint)


def check_numeric(endpoint: str) -> str:
    """Return a peer's announced endpoint; raise `MalformedMessage` if it has a host name instead of an address."""
    if endpoint.startswith("tcp://"):
        try:
            ipaddress.ip_address(_host(endpoint).strip("[]"))
        except ValueError:
            raise MalformedMessage(f"{endpoint} was announced with a name; an address is needed") from None
    return endpoint


def endpoint_beside(peer: str, ipc_path: str) -> str:
    """Return an endpoint to bind that the host of `peer` can reach: ipc, or TCP on the same address."""
    if check_endpoint(peer).startswith("ipc://"):
        return f"ipc://{ipc_path}"
    host = _host(peer)
    if is_loopback_host(host):
        return "tcp://127.0.0.1:*"
    if is_own_address(host):
        return f"tcp://{host}:*"
    raise InvalidEndpoint(
        f"{peer} is on another machine; say with --bind tcp://HOST:* where it reaches us", endpoint=peer
    )


def bind(socket: zmq.Socket[bytes], endpoint: str, *, insecure: bool = False) -> str:
    """Bind `socket`, and return the resolved endpoint (`tcp://127.0.0.1:*` gets a free port).

    `insecure` allows plaintext TCP beyond loopback.
    """
    check_endpoint(endpoint)
    address = endpoint.partition("://")[2]
    if endpoint.startswith("ipc://"):
        _own_ipc_path(Path(address), endpoint)
    elif not insecure:
        check_private(endpoint)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise EndpointInUse(f"{endpoint} is in use by another process", endpoint=endpoint) from None
        raise InvalidEndpoint(f"{endpoint} cannot be bound: {error.strerror}", endpoint=endpoint) from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def check_private(endpoint: str, role: KeyRole = KeyRole.SERVICE) -> None:
    """Raise `InvalidEndpoint` if a socket without keys would be reachable at `endpoint` from other machines."""
    if endpoint.startswith("tcp://") and not is_loopback(endpoint):
        name = role if role == KeyRole.SERVICE else "NAME"
        raise InvalidEndpoint(
            f"{endpoint} is reachable from other machines and has no keys: make one with `prorl keys new {name} "
            f"--role {role}` and name its folder with --keys; or bind to 127.0.0.1; or, on a trusted network, say "
            "--insecure",
            endpoint=endpoint,
        )


def connect(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Connect, now or when the endpoint is bound.

    Raises:
        InvalidEndpoint: it is malformed, or another account could answer there.
    """
    check_endpoint(endpoint)
    if endpoint.startswith("ipc://"):
        path = Path(endpoint.removeprefix("ipc://"))
        with suppress(OSError):
            if not path.parent.exists() and is_shared(path.parent):
                path.parent.mkdir(parents=True, mode=0o700)  # before another account does
        if path.parent.exists():
            _check_ipc_path(path, endpoint)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise InvalidEndpoint(f"{endpoint} cannot be used: {error.strerror}", endpoint=endpoint) from None


def is_listening(endpoint: str, timeout_s: float = 1.0) -> bool:
    """Return whether a connection to the endpoint succeeds within `timeout_s` seconds.

    Raises:
        InvalidEndpoint: it is malformed, or another account could answer there.
    """
    address = check_endpoint(endpoint).partition("://")[2]
    try:
        if endpoint.startswith("ipc://"):
            path = Path(address)
            if not path.parent.exists():
                return False
            _check_ipc_path(path, endpoint)
            with plain_socket(AF_UNIX) as probe:
                probe.settimeout(timeout_s)
                probe.connect(address)
        else:
            host, _, port = address.rpartition(":")
            create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except (OSError, ValueError):
        return False
    return True


def is_loopback(endpoint: str) -> bool:
    return is_loopback_host(_host(endpoint))


def is_loopback_host(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _host(endpoint: str) -> str:
    return endpoint.partition("://")[2].rpartition(":")[0]


def own_address() -> str:
    """Return this machine's address towards other hosts, or loopback's if there is none.

    Without a route out of the cluster it is the address of the host's name.
    """
    with plain_socket(AF_INET, SOCK_DGRAM) as probe:
        try:
            probe.connect((ELSEWHERE, 9))  # for a datagram socket this only consults the routes
            return str(probe.getsockname()[0])
        except OSError:
            with suppress(OSError):
                return gethostbyname(gethostname())
            return "127.0.0.1"


def is_own_address(host: str) -> bool:
    """Return whether a socket of this machine can be bound to `host`."""
    try:
        with plain_socket(AF_INET, SOCK_DGRAM) as probe:
            probe.bind((str(ipaddress.IPv4Address(host)), 0))
    except (ValueError, OSError):
        return False
    return not ipaddress.IPv4Address(host).is_unspecified


def _check_ipc_path(path: Path, endpoint: str) -> None:
    """Raise `InvalidEndpoint` if another account could bind there, or has."""
    try:
        problem = folder_problem(path.parent) or listener_problem(path)
    except OSError as error:
        raise InvalidEndpoint(f"{endpoint} cannot be used: {error}", endpoint=endpoint) from error
    if problem:
        raise InvalidEndpoint(
            f"{endpoint} is not safe: {problem}. Name a folder of your own, with $PRORL_RUN_DIR or --run-dir",
            endpoint=endpoint,
        )


_locks: dict[str, int] = {}
"""Descriptors of the locks on this process's ipc paths; released when the process exits."""


def _own_ipc_path(path: Path, endpoint: str) -> None:
    lock_path = f"{path}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise InvalidEndpoint(f"{endpoint} cannot be used: {error}", endpoint=endpoint) from error
    _check_ipc_path(path, endpoint)
    try:
        # Release the lock of an earlier bind by this process; another process's lock is an error.
        previous = _locks.pop(lock_path, None)
        if previous is not None:
            os.close(previous)
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidEndpoint(f"{endpoint} cannot be bound: {error}", endpoint=endpoint) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise EndpointInUse(f"{endpoint} is in use by another process", endpoint=endpoint) from None
    _locks[lock_path] = lock


def free_ipc_paths(folder: Path) -> None:
    """Release the ipc paths that this process bound in a folder; their sockets must be closed."""
    for path in tuple(_locks):
        if Path(path).parent == folder:
            os.close(_locks.pop(path))


# Frames --------------------------------------------------------------------------------------------------------------


def send(socket: zmq.Socket[bytes], frames: Sequence[Frame], flags: int = 0) -> None:
    """Send one message. Large frames are not copied: do not change their memory before they are sent."""
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
        socket.send(frame, flags | _MORE if index < last else flags, copy=size < COPY_LIMIT_BYTES)


def receive(socket: zmq.Socket[bytes], copied: int, flags: int = NOBLOCK) -> list[bytes | zmq.Frame]:
    """Receive one message: its first `copied` frames as bytes, the others as views of libzmq's memory.

    Raises `MalformedMessage` if it has too many frames; it is then dropped.
    """
    return receive_rest(socket, socket.recv(flags, copy=False), copied)


def receive_rest(socket: zmq.Socket[bytes], first: zmq.Frame, copied: int) -> list[bytes | zmq.Frame]:
    """Receive the frames after the first one of a message, and return all of them.

    Each frame says whether another one follows; asking the socket takes longer than receiving a frame.
    """
    frames: list[bytes | zmq.Frame] = [first.bytes if copied else first]
    frame = first
    while frame.more:
        if len(frames) == FRAME_LIMIT:
            dropped = _drop_rest(socket)
            raise MalformedMessage(f"a message of {FRAME_LIMIT + dropped} frames is over the limit of {FRAME_LIMIT}")
        frame = socket.recv(NOBLOCK, copy=False)
        frames.append(frame.bytes if len(frames) < copied else frame)
    return frames


def _drop_rest(socket: zmq.Socket[bytes]) -> int:
    dropped = 0
    while socket.getsockopt(zmq.RCVMORE):
        socket.recv(NOBLOCK, copy=False)
        dropped += 1
    return dropped


def split_envelope(frames: list[AnyFrame]) -> tuple[list[AnyFrame], list[AnyFrame]]:
    """Split a ROUTER's message after the first empty frame: the envelope to echo, and the message."""
    for index, frame in enumerate(frames[1:4], start=1):
        if len(frame) == 0:
            if index + 1 == len(frames):
                raise MalformedMessage("a message has no header frame behind its envelope")
            return frames[: index + 1], frames[index + 1 :]
    raise MalformedMessage("a message has no empty frame before its header; a DEALER has to send one, as REQ does")
