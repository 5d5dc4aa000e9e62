"""`BlockServer`: serves a node's blocks to clients that present their ids.

    ROUTER, bound next to the node's inbox  ⇄ clients anywhere, over CURVE: `FetchBlock`
    Unix socket in the run folder (SEQPACKET) ⇄ clients on this machine: an id, answered with a file descriptor

A block id is a random capability, which the broker discloses only with the result. Only programs of the node's own
account can reach the Unix socket, which is in a private folder.
"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import zmq
from msgspec.structs import replace

from ...data.records import padded, scores_problem
from ...data.trajectory import TOKEN_ID_BYTES, oldest_version, records_at, records_in
from ...errors import MalformedMessage, VersionMismatch
from ...security.rights import Listener
from ...wire import codec
from ...wire.messages.base import Refused
from ...wire.messages.blocks import BlockGiven, FetchBlock, block_checksum, is_block
from ...wire.messages.jobs import BlockHandle, Phase
from ...wire.records import TEACHER
from ...wire.request_routing import NODE_BROKER, convert_request
from ...wire.sockets import CONTROL_FRAME_BYTES, NOBLOCK, open_socket, send, split_envelope
from ..dropped_records import without_records
from ..loop import BATCH

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ...security.zap_authenticator import ZapAuthenticator
    from ...wire.messages.stages import PhaseDone, PhaseFailed
    from ...wire.sockets import Frame
    from ..loop import Loop
    from .block_store import BlockStore
    from .broker_link import BrokerLink

WAITING_BLOCKS = 64
"""Most blocks queued for one client that does not read; its further requests get no reply."""
LOCAL_CLIENTS = 256
ID_BYTES = 64
FOUND, LOST = b"+", b"-"

log = logging.getLogger("prorl.node_broker")


class BlockServer:
    """A server that binds its sockets when it is created and serves after `register`.

    Raises:
        EndpointInUse, InvalidEndpoint: the server could not bind.
    """

    def __init__(self, loop: Loop, store: BlockStore, authenticator: ZapAuthenticator, bind: str, path: Path) -> None:
        self._loop = loop
        self._store = store
        self._router = open_socket(loop.context, zmq.ROUTER, CONTROL_FRAME_BYTES)
        self._router.sndhwm = WAITING_BLOCKS
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.endpoint = authenticator.bind(self._router, bind, Listener.BLOCKS)
        self.curve_key = authenticator.curve_key(self.endpoint)
        self.path = str(path)
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(self.path)
        self._listener.listen(LOCAL_CLIENTS)
        self._local: set[socket.socket] = set()
        self._is_listening = False

    def register(self) -> None:
        self._loop.register(self._router, self._drain)
        self._listen()

    def _listen(self) -> None:
        if not self._is_listening:
            self._is_listening = True
            self._loop.register_file(self._listener, self._accept)

    def close(self) -> None:
        self._router.close()
        for one in (self._listener, *self._local):
            one.close()

    def keep(
        self, node: str, broker: str, number: int, end: PhaseDone | PhaseFailed, frame: Frame
    ) -> tuple[PhaseDone | PhaseFailed, memoryview, BlockHandle | None]:
        """Store the block of a phase's end, numbered for its broker; drop its records if there is no room for them.

        Return the end and its block, without the records that were dropped, and the handle; None: there is no room.

        Raises:
            MalformedMessage: the block is not what the end says.
        """
        block = memoryview(frame.buffer if isinstance(frame, zmq.Frame) else frame)
        version = oldest_version(block, end)
        records_in(block, end)
        block_id = self._store.keep(broker, number, block)
        if end.records and (block_id is None or self._store.size(broker, block_id) != len(block)):
            end, block = without_records(end, block, "the node's disk was full")
            block_id = self._store.keep(broker, number, block)
        if block_id is None:
            return end, block, None
        start = records_at(end.tokens, end.turns, end.records)
        handle = BlockHandle(
            node=node,
            block_id=block_id,
            checksum=block_checksum(block, start),
            records_at=start,
            endpoint=self.endpoint,
            curve_key=self.curve_key,
            socket=self.path,
            oldest_version=version,
        )
        return end, block, handle

    def take_end(
        self, node: str, link: BrokerLink, end: PhaseDone | PhaseFailed, rest: Sequence[Frame]
    ) -> tuple[PhaseDone | PhaseFailed, Sequence[Frame], BlockHandle | None]:
        """Store the block of a phase's end, if its broker wants that; return what to forward, and the block's handle.

        Raises:
            OSError: a trajectory cannot be read now; the end is complete when it comes again.
        """
        number = link.number(end)
        if end.phase == Phase.SCORE:
            kept = end.kept
            if kept is not None and (end.records or rest):
                end, kept = self.add_scores(link.broker, number, end, kept, rest)
            return end, rest if kept is None else (), kept
        if link.keep != "node" or len(rest) != 1:
            return end, rest, None
        try:
            end, block, handle = self.keep(node, link.broker, number, end, rest[0])
        except MalformedMessage as error:
            log.warning("a malformed end of job %s goes to its broker as it is: %s", end.job_id, error)
            return end, rest, None
        return end, (block,), handle

    def token_ids(self, kept: BlockHandle, tokens: int) -> memoryview | bytes:
        """Return the token ids of a stored trajectory, int32 as bytes; empty if they are lost.

        Raises:
            OSError: they cannot be read now.
        """
        return (self._store.read(kept.block_id) or b"")[: TOKEN_ID_BYTES * tokens]

    def add_scores(
        self, broker: str, number: int, end: PhaseDone | PhaseFailed, kept: BlockHandle, rest: Sequence[Frame]
    ) -> tuple[PhaseDone | PhaseFailed, BlockHandle]:
        """Store a trajectory's block a second time, with the scores with which SCORE ends, numbered for its broker.

        Return the end and the new block's handle; if there is no room, or the scores are not what they claim to be, the
        end without scores and the old handle. The broker then releases the old block.

        Raises:
            OSError: the trajectory cannot be read now.
        """
        problem = scores_problem(end.records, rest)
        if problem:
            log.warning("the scores of job %s are dropped: %s", end.job_id, problem)
            return replace(end, records=(), records_dropped={TEACHER: problem}), kept
        (frame,) = rest
        block_id, why = self._store.known(broker, number), "the node lost the trajectory"
        block = self._store.read(kept.block_id) if block_id is None else None
        if block is not None and is_block(block, kept):
            padding = bytes(padded(len(block)) - len(block))
            scores = frame.buffer if isinstance(frame, zmq.Frame) else frame
            block_id, why = self._store.keep(broker, number, block, padding, scores), "the node's disk was full"
        joined = self._store.read(block_id) if block_id is not None else None
        if block_id is None or joined is None:
            return replace(end, records=(), records_dropped={TEACHER: why}), kept
        start = kept.records_at or len(joined) - len(frame)
        checksum = block_checksum(joined, start)
        return end, replace(kept, block_id=block_id, checksum=checksum, records_at=start)

    def _drain(self) -> None:
        self._listen()
        for _ in range(BATCH):
            try:
                frames = self._router.recv_multipart(NOBLOCK)
            except zmq.Again:
                return
            try:
                envelope, message = split_envelope(frames)
                content = codec.unpack(message[0])
                request: FetchBlock = convert_request(content, FetchBlock, NODE_BROKER)
            except VersionMismatch as error:
                reply: list[Frame] = [*envelope, codec.encode(Refused(codec.request_id(content), error.info()))]
            except (MalformedMessage, IndexError) as error:
                log.debug("dropped a request for a block: %s", error)  # anybody can send one: no log flood
                continue
            else:
                try:
                    block = self._store.read(request.block_id)
                except OSError as error:
                    log.warning("a block cannot be read now, and its client will ask again: %s", error)
                    continue
                reply = [*envelope, codec.encode(BlockGiven(request.request_id)), *([] if block is None else [block])]
            with suppress(zmq.ZMQError):  # the client is gone or does not read; it retries
                send(self._router, reply, NOBLOCK)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError as error:
            log.warning("falling back to TCP for a client: the descriptor socket cannot accept: %s", error)
            # The pending connection would wake the loop at once. The next request over TCP listens again.
            self._loop.unregister_file(self._listener)
            self._is_listening = False
            return
        if len(self._local) >= LOCAL_CLIENTS:
            client.close()
            return
        client.setblocking(False)
        self._local.add(client)
        self._loop.register_file(client, partial(self._answer, client))

    def _answer(self, client: socket.socket) -> None:
        try:
            block_id = client.recv(ID_BYTES).decode("ascii", "replace")
            if block_id:
                self._give(client, block_id)
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._loop.unregister_file(client)
        self._local.discard(client)
        client.close()

    def _give(self, client: socket.socket, block_id: str) -> None:
        file = self._store.open(block_id)
        if file is None:
            client.send(LOST)
            return
        try:
            socket.send_fds(client, [FOUND], [file])
        finally:
            os.close(file)
