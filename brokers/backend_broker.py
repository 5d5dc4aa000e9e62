"""The backend broker's process: a ROUTER that says which inference backend each job talks to.

Stage processes ask for assignments and release them, engine hosts register and send heartbeats, trainers add, drain and
list backends. The tokens themselves never pass here. When this process dies, running jobs keep the backend that they
know; its successor learns of the engine hosts from their next heartbeats, and of assignments as jobs ask.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import zmq

from .. import codec
from ..errors import MalformedMessage, ProrlError
from ..messages import AnyBackendRequest, BackendRefused
from ..sockets import NOBLOCK, bind, open_socket, send, split_envelope
from .backend_desk import Answer, BackendDesk
from .loop import Loop

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..config import Topology
    from ..sockets import Frame

BATCH = 256
"""Requests answered before timers get their turn."""

log = logging.getLogger("prorl.backend_broker")


class BackendBroker:
    """The backend broker, bound and ready to `run`.

    Raises:
        EndpointInUse, InvalidEndpoint: it could not bind.
    """

    def __init__(self, topology: Topology) -> None:
        self._loop = Loop()
        self._router = open_socket(self._loop.context, zmq.ROUTER)
        try:
            template = topology.backend_broker.endpoint
            self.endpoint = bind(self._router, topology.endpoint(template), insecure=topology.service.insecure)
        except ProrlError:
            self._loop.close()
            raise
        self._lease_s = topology.backend_broker.lease_s
        self._desk = BackendDesk(self._lease_s, topology.backend_broker.affinity)
        self._next_tick = time.monotonic()

    def run(self) -> None:
        """Serve until `stop`, SIGTERM or SIGINT; then close all sockets."""
        self._loop.register(self._router, self._drain)
        try:
            self._loop.run(self._housekeep, self._say_ready)
        finally:
            self._loop.close()

    def stop(self) -> None:
        """End `run`; may be called from another thread or a signal handler."""
        self._loop.stop()

    def _say_ready(self) -> None:
        log.info("ready: %s", self.endpoint)

    def _housekeep(self) -> float:
        now = time.monotonic()
        deadline = self._desk.next_deadline()
        if now >= self._next_tick or (deadline is not None and now >= deadline):
            self._next_tick = now + min(1.0, self._lease_s / 4)
            self._send(self._desk.tick(now))
            deadline = self._desk.next_deadline()
        return max(0.0, min(self._next_tick, deadline if deadline is not None else self._next_tick) - now)

    def _drain(self) -> None:
        for _ in range(BATCH):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                envelope, message = split_envelope(frames)
            except MalformedMessage:
                continue  # without a delimiter there is no telling where an answer would go
            self._send(self._answers(envelope, message))

    def _answers(self, envelope: Sequence[Frame], message: Sequence[bytes]) -> list[Answer]:
        request_id = "unknown"
        try:
            content = codec.unpack(message[0])
            request_id = codec.request_id(content)
            if len(message) > 1:
                raise MalformedMessage(f"{len(message) - 1} unexpected frames behind the header")
            return self._desk.handle(envelope, codec.convert(content, AnyBackendRequest), time.monotonic())
        except MalformedMessage as error:
            return [Answer(envelope, BackendRefused(request_id, error.info()))]

    def _send(self, answers: Iterable[Answer]) -> None:
        for envelope, reply in answers:
            try:
                send(self._router, [*envelope, codec.encode(reply)], NOBLOCK)
            except zmq.Again:
                log.warning("a client does not read its replies; one was dropped")
