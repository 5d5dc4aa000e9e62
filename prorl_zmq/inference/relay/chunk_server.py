"""`ChunkServer`: serves chunks of weights to engine hosts, from a thread of its own.

    hosts' DEALERs ⇄ ROUTER, bound here      `ChunkAsk`, and the answers of `wire.messages.relay`

An ask for a chunk that has not come yet, or for a folder that is not known yet, stays open. The memory is bounded: at
most `OUT_LIMIT` chunks are on their way to all hosts together and `CREDIT` to each; further asks wait on disk. A host
that reads nothing is disconnected by ZeroMQ's heartbeats, which frees its chunks.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from contextlib import suppress
from threading import Lock, Thread
from typing import TYPE_CHECKING

import zmq

from ...errors import MalformedMessage, ProrlError, RequestTimeout
from ...security.rights import Listener
from ...security.zap_authenticator import ZapAuthenticator
from ...wire import codec
from ...wire.messages.base import MAX_FRAMES
from ...wire.messages.relay import COPY_FILE, DATA, GONE, INDEX_FILE, WAIT, WAIT_S, ChunkAsk
from ...wire.sockets import COPY_LIMIT_BYTES, NOBLOCK, open_socket
from .chunk_plan import CREDIT

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...security.allow_list import AllowList
    from ...security.keyring import Keyring
    from .offered_folder import OfferedFolder

OUT_LIMIT = 32
"""Most chunks on their way: 128 MiB."""
PEERS_LIMIT = 1024
"""Most connections with open asks; asks of others are dropped."""
COPIES_LIMIT = 64
"""Most contents of which it is remembered whether the copy has them."""
ASK_LIMIT_BYTES = 4096
UNKNOWN_S = 3.0
"""How long an ask for an unknown folder stays open: a host may hear of a version a little before its parent."""
CLOSE_S = 5.0
BUSY_MS = 5
"""Milliseconds between two looks at whether chunks have left."""
IO_THREADS = 2

log = logging.getLogger("prorl.relay")


class ChunkServer:
    """Serves the folders that are offered, until it is closed.

    Args:
        endpoint: where to bind.
        keyring: the keys of this process; None: it has none.
        insecure: plaintext TCP beyond loopback is allowed.
        allow_list: the keys that may connect; None: a list of its own.
        find_copy: returns the process's own copy of a content as a folder to offer; it may take long. None: there is no
            copy.

    Raises:
        InvalidEndpoint, EndpointInUse: the endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        keyring: Keyring | None,
        *,
        insecure: bool = False,
        allow_list: AllowList | None = None,
        find_copy: Callable[[str], OfferedFolder | None] | None = None,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(IO_THREADS)
        self._authenticator = ZapAuthenticator(self._context, keyring, insecure=insecure, allow_list=allow_list)
        self._router = open_socket(self._context, zmq.ROUTER, ASK_LIMIT_BYTES)
        self._router.sndhwm = 4 * CREDIT
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self.endpoint = self._authenticator.bind(self._router, endpoint, Listener.WEIGHTS)
        except ProrlError:
            self._authenticator.close()
            self._context.destroy(linger=0)
            raise
        self.curve_key = self._authenticator.curve_key(self.endpoint)
        self.allow_list = self._authenticator.allow_list
        self.sent_bytes = 0
        """Of chunks, since it was made."""
        self.is_patient = True
        """Whether folders that are not known may come. Else asks for them are answered at once; then call `notify`."""
        self._find_copy = find_copy
        self._lock = Lock()
        """Of the three that follow, and of `_wake`."""
        self._offered: dict[str, OfferedFolder] = {}
        self._is_finding = False
        """A thread looks at the copy."""
        self._copies: dict[str, OfferedFolder | None] = {}
        """The copy, by the contents that were asked for; None: it has another. A new table for each change of it."""
        self._pending: dict[bytes, dict[bytes, tuple[ChunkAsk, float]]] = {}
        """The open asks of each connection, with the times at which they came."""
        self._out: deque[tuple[bytes, zmq.MessageTracker]] = deque()
        self._out_of: Counter[bytes] = Counter()
        self._warned = ""
        """The last warning, which is not repeated."""
        self._waited_at = 0.0
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """-1: it is closed, and its number may be another file's."""
        self._thread = Thread(target=self._run, name="weights relay", daemon=True)
        self._thread.start()

    def offer(self, *folders: OfferedFolder) -> None:
        """Serve these folders too."""
        with self._lock:
            self._offered |= {folder.digest: folder for folder in folders}
        self.notify()

    def withdraw(self, keep: set[str]) -> None:
        """Serve no folders but these."""
        with self._lock:
            self._offered = {digest: folder for digest, folder in self._offered.items() if digest in keep}
            self._copies = {}
        self.notify()

    def forget_copies(self) -> None:
        """Look at the copy again when it is asked for: it has changed."""
        with self._lock:
            self._copies = {}

    def notify(self) -> None:
        """Look again at open asks: chunks have come, or a folder was closed."""
        with self._lock, suppress(OSError):
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Stop serving; a disk that does not answer is waited for no longer than `CLOSE_S`. May be called again."""
        if not self._closing:
            self._closing = True
            self.notify()
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                log.warning("a read of weights did not end within %g s: the server is left open", CLOSE_S)
                return
            with self._lock:
                wake, self._wake = self._wake, -1
            os.close(wake)

    # The thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        self._authenticator.register(lambda socket, _: poller.register(socket, zmq.POLLIN))
        try:
            while not self._closing:
                poller.poll(BUSY_MS if self._out else int(1000 * WAIT_S))
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                self._authenticator.drain()
                self._receive()
                self._answer_all()
        finally:
            self._router.close(0)
            self._authenticator.close()
            self._context.destroy(linger=0)

    def _receive(self) -> None:
        for _ in range(256):
            try:
                sender, frames = self._authenticator.receive(self._router, MAX_FRAMES)
                identity, _, content = (bytes(frame) for frame in frames)  # type: ignore[arg-type]
                ask: ChunkAsk = codec.decode(content, ChunkAsk)
            except zmq.Again:
                return
            except (MalformedMessage, ValueError):
                continue
            if sender.revoked or (identity not in self._pending and len(self._pending) >= PEERS_LIMIT):
                continue
            asks = self._pending.setdefault(identity, {})
            if len(asks) < CREDIT:
                asks.setdefault(content, (ask, time.monotonic()))

    def _answer_all(self) -> None:
        self._forget_sent()
        now = time.monotonic()
        for identity in tuple(self._pending):
            asks = self._pending.pop(identity)
            for content, (ask, since) in tuple(asks.items()):
                if len(self._out) >= OUT_LIMIT or self._out_of[identity] >= CREDIT:
                    break
                data = self._find(ask, since, now)
                if data is not None:
                    del asks[content]
                    self._send(identity, [DATA, content, data] if data else [GONE, content, b""])
            if asks:
                self._pending[identity] = asks  # behind the others: each has its turn
        if now >= self._waited_at + WAIT_S:
            self._waited_at = now
            self._pending = {
                identity: asks for identity, asks in self._pending.items() if self._send(identity, [WAIT, b"", b""])
            }

    def _find(self, ask: ChunkAsk, since: float, now: float) -> bytes | None:
        """Return what was asked for; empty: it is gone; None: it may come."""
        if ask.file == COPY_FILE:
            return self._copy_index(ask.folder)
        with self._lock:
            folder = self._offered.get(ask.folder)
        if folder is None:
            return None if self.is_patient and ask.patient and now < since + UNKNOWN_S else b""
        if ask.file != INDEX_FILE and not folder.has_chunk(ask.file, ask.chunk):
            return b""
        try:
            data = folder.read(ask.file, ask.chunk)
        except RequestTimeout:
            return None  # the copy is locked
        except (OSError, ValueError, ProrlError) as error:
            if str(error) != self._warned:
                self._warned = str(error)
                log.warning("a chunk of weights is not served: %s", error)
            return b""
        return b"" if data is None and not folder.is_open else data

    def _copy_index(self, weights: str) -> bytes | None:
        """Return the index of the copy, which another thread makes."""
        with self._lock:
            if weights in self._copies or self._find_copy is None:
                known = self._copies.get(weights)
                return known.index if known is not None else b""
            if not self._is_finding:
                self._is_finding = True
                Thread(target=self._look_for_copy, args=(weights,), name="index of weights", daemon=True).start()
        return None

    def _look_for_copy(self, weights: str) -> None:
        assert self._find_copy is not None, "it was asked for"
        with self._lock:
            copies = self._copies
        folder = None
        try:
            folder = self._find_copy(weights)
        except (OSError, ProrlError) as error:
            log.info("the copy of weights is not served: %s", error)
        with self._lock:
            self._is_finding = False
            while len(self._copies) >= COPIES_LIMIT:
                del self._copies[next(iter(self._copies))]
            if folder is not None:
                self._copies[weights] = self._offered[folder.digest] = folder
            else:
                copies[weights] = None  # not of a copy that has changed meanwhile
        self.notify()

    def _send(self, identity: bytes, frames: list[bytes]) -> bool:
        """Send an answer; return False if the host is gone, or reads nothing."""
        large = len(frames[-1]) >= COPY_LIMIT_BYTES
        try:
            for frame in (identity, b"", *frames[:-1]):
                self._router.send(frame, NOBLOCK | int(zmq.SNDMORE))
            tracker = self._router.send(frames[-1], NOBLOCK, copy=not large, track=large)
        except zmq.ZMQError:
            return False
        self.sent_bytes += len(frames[-1])
        if isinstance(tracker, zmq.MessageTracker):
            self._out.append((identity, tracker))
            self._out_of[identity] += 1
        return True

    def _forget_sent(self) -> None:
        left: deque[tuple[bytes, zmq.MessageTracker]] = deque()
        for identity, tracker in self._out:
            if not tracker.done:
                left.append((identity, tracker))
            elif self._out_of[identity] > 1:
                self._out_of[identity] -= 1
            else:
                del self._out_of[identity]
        self._out = left
