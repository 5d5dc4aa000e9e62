"""`BlockFetcher`: fetches trajectory blocks from the nodes that keep them (`keep = "node"`); blocks the calling thread.

A block of a node on this machine is mapped from its file; others come over TCP. Blocks that cannot be fetched, or whose
checksum differs from the handle's, are omitted, and the client requests them from the broker (`RelayBlocks`). So
nothing is resent, and no `Requester` is needed. All nodes share one time limit, which each arriving block extends.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import zmq

from ..errors import MalformedMessage, ProrlError
from ..security.keyring import connect_to_peer
from ..system.unix_peers import peer_problem
from ..wire import codec
from ..wire.messages.base import Refused, new_id
from ..wire.messages.blocks import BlockGiven, FetchBlock, is_block
from ..wire.sockets import open_socket, receive
from .requests import MappedBlock

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..security.keyring import Keyring
    from ..wire.messages.jobs import BlockHandle
    from .requests import Received

STALL_S = 5.0
"""How long nodes may send nothing before they count as unreachable."""
LOOK_MS = 100
LOCAL_S = 1.0
AT_ONCE = 8
"""Most requests in flight to one node."""
CONNECTIONS = 256
"""Most nodes that stay connected; the least recently used connection is closed first."""
FOUND = b"+"

log = logging.getLogger("prorl.client")


class BlockFetcher:
    """Fetches blocks for one client; concurrent calls take turns."""

    def __init__(self, keyring: Keyring | None) -> None:
        self._keyring = keyring
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._remote: dict[str, zmq.Socket[bytes]] = {}
        """By endpoint, the least recently used first."""
        self._local: dict[str, socket.socket] = {}
        self._turn = threading.Lock()
        self._closed = False

    def fetch(self, handles: Mapping[str, BlockHandle]) -> dict[str, Received]:
        """Return the blocks that could be fetched, by the keys of their handles."""
        with self._turn:
            found: dict[str, Received] = {}
            left: dict[str, dict[str, BlockHandle]] = {}
            for key, handle in handles.items():
                block = self._mapped(handle)
                if block is not None:
                    found[key] = block
                else:
                    left.setdefault(handle.endpoint, {})[key] = handle
            if left:
                found.update(self._fetched(left))
            return found

    def close(self) -> None:
        self._closed = True
        with self._turn:
            for one in self._local.values():
                one.close()
            self._context.destroy(linger=0)

    # On this machine --------------------------------------------------------------------------------------------------

    def _mapped(self, handle: BlockHandle) -> MappedBlock | None:
        """Return a block of a node on this machine; None if the node is elsewhere or no longer has it."""
        if not handle.socket or (handle.socket not in self._local and not os.path.exists(handle.socket)):  # noqa: PTH110 - on the way of each block
            return None
        try:
            client = self._local.get(handle.socket) or self._connected(handle.socket)
            client.send(handle.block_id.encode())
            answer, files, _, _ = socket.recv_fds(client, 1, 1)
        except OSError:
            if (broken := self._local.pop(handle.socket, None)) is not None:
                broken.close()
            return None
        if answer != FOUND or not files:
            return None
        try:
            block = MappedBlock(memoryview(mmap.mmap(files[0], 0, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)))
        except (OSError, ValueError):  # it is empty, or no file
            return None
        finally:
            os.close(files[0])
        return block if is_block(block.buffer, handle) else None

    def _connected(self, path: str) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.settimeout(LOCAL_S)
        try:
            client.connect(path)
            if problem := peer_problem(client):
                log.warning("blocks are not taken from %s: %s", path, problem)
                raise PermissionError(problem)
        except OSError:
            client.close()
            raise
        self._local[path] = client
        return client

    # Elsewhere --------------------------------------------------------------------------------------------------------

    def _fetched(self, left: dict[str, dict[str, BlockHandle]]) -> dict[str, Received]:
        poller = zmq.Poller()
        nodes: dict[zmq.Socket[bytes], _Node] = {}
        for endpoint, handles in left.items():
            try:
                sock = self._socket(endpoint, next(iter(handles.values())).curve_key)
            except ProrlError as error:
                log.warning("blocks cannot be fetched from %s: %s", endpoint, error.message)
                continue
            nodes[sock] = _Node(endpoint, sock, handles)
            poller.register(sock, zmq.POLLIN)
        until = time.monotonic() + STALL_S
        while any(node.waits for node in nodes.values()) and not self._closed and time.monotonic() < until:
            for sock, _ in poller.poll(LOOK_MS):
                if nodes[sock].receive():
                    until = time.monotonic() + STALL_S
        for node in nodes.values():
            if node.waits:
                self._remote.pop(node.endpoint).close()
        return {key: block for node in nodes.values() for key, block in node.found.items()}

    def _socket(self, endpoint: str, curve_key: str) -> zmq.Socket[bytes]:
        known = self._remote.pop(endpoint, None)
        if known is None:
            known = open_socket(self._context, zmq.DEALER)
            try:
                connect_to_peer(known, endpoint, curve_key, self._keyring)
            except BaseException:
                known.close()
                raise
        self._remote[endpoint] = known
        while len(self._remote) > CONNECTIONS:
            self._remote.pop(next(iter(self._remote))).close()
        return known


class _Node:
    """Requests to one node."""

    def __init__(self, endpoint: str, sock: zmq.Socket[bytes], handles: Mapping[str, BlockHandle]) -> None:
        self.endpoint = endpoint
        self.found: dict[str, Received] = {}
        self._socket = sock
        self._handles = list(handles.items())
        self._asked_for = handles
        self._asked: dict[str, str] = {}
        """The key of each request, by request id."""
        self._ask()

    @property
    def waits(self) -> bool:
        return bool(self._asked)

    def receive(self) -> bool:
        """Receive one message; return whether it answers one of these requests."""
        with suppress(zmq.Again, MalformedMessage):
            frames = receive(self._socket, copied=2)
            reply: BlockGiven | Refused = codec.decode(frames[1], BlockGiven | Refused)  # type: ignore[arg-type]
            if isinstance(reply, Refused):
                log.warning("a block cannot be fetched from %s: %s", self.endpoint, reply.error.message)
            key = self._asked.pop(reply.request_id, None)
            if key is not None:
                if len(frames) > 2 and is_block(frames[2], self._asked_for[key]):
                    self.found[key] = frames[2]
                self._ask()
                return True
        return False

    def _ask(self) -> None:
        while self._handles and len(self._asked) < AT_ONCE:
            key, handle = self._handles.pop()
            request = FetchBlock(new_id(), handle.block_id)
            self._asked[request.request_id] = key
            self._socket.send_multipart([b"", codec.encode(request)])
