"""The backend broker's process: a ROUTER that assigns an inference backend to each job.

Stage processes request and release assignments. Engine hosts register and send heartbeats. Trainers list and change
backends and publish weights, which the broker has the engine hosts load (`EngineConnections`). Tokens never pass
through the broker. After a crash, running jobs keep their backends; the next process reads the backends from the
journal and the assignments from the stage processes' heartbeats. Each change is written to the journal before any
message that depends on it is sent.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import zmq

from ...config import SERVICE_VARIABLE
from ...errors import JournalFailed, MalformedMessage, NotAllowed, ProrlError, VersionMismatch
from ...security.keyring import BROKER, Keyring
from ...security.rights import Listener
from ...security.zap_authenticator import ZapAuthenticator
from ...wire import codec
from ...wire.messages.backends import AnyBackendRequest, KeyList, ListKeys
from ...wire.messages.base import Refused
from ...wire.request_routing import BACKEND_BROKER, convert_request
from ...wire.sockets import CONTROL_FRAME_BYTES, NOBLOCK, open_socket, send, split_envelope
from ..loop import Loop
from .backend_gauges import set_gauges
from .engine_connections import EngineConnections
from .request_handler import BackendRequestHandler
from .weight_calls import Answer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ...config import Topology
    from ...security.rights import Sender
    from ...wire.messages.engines import EngineReady
    from ...wire.sockets import Frame
    from .backend_journal import BackendJournal
    from .backend_records import BackendRecord, WeightsRecord
    from .weight_calls import EngineAddress

BATCH = 256
"""Most requests answered before timers are served."""

log = logging.getLogger("prorl.backend_broker")


class BackendBroker:
    """The broker, bound, with its journal's content restored, and ready to `run`."""

    def __init__(self, topology: Topology, journal: BackendJournal | None = None) -> None:
        self._run_dir = topology.run_dir
        keyring = Keyring.load(topology.security.keys, BROKER)
        self._loop = Loop()
        self._authenticator = ZapAuthenticator(self._loop.context, keyring, insecure=topology.service.insecure)
        self._engines = EngineConnections(
            self._loop, keyring, self._engine_answered, self._engine_refused, self._engine_returned
        )
        self._router = open_socket(self._loop.context, zmq.ROUTER, CONTROL_FRAME_BYTES)
        self._lease_s = topology.backend_broker.lease_s
        settings = topology.backend_broker
        self._handler = BackendRequestHandler(self._lease_s, settings.affinity, heeds_room=settings.schedule == "kv")
        self._next_tick = self._loop.clock.now()
        self._journal = journal
        self._unwritten: dict[str, BackendRecord | None] = {}
        """Changes that the journal has not accepted yet."""
        self._unwritten_weights: tuple[WeightsRecord, ...] | None = None
        try:
            endpoint = topology.endpoint(topology.backend_broker.endpoint)
            self.endpoint = self._authenticator.bind(self._router, endpoint, Listener.BACKEND_BROKER)
            if journal is not None:
                of_before = journal.begin_service(os.environ.get(SERVICE_VARIABLE, ""))
                records, weights = journal.load(), journal.load_weights()
                self._handler.restore(records, self._next_tick, of_before=of_before, weights=weights)
        except ProrlError:
            self._close()
            raise

    def run(self) -> None:
        self._loop.report_metrics(self._run_dir, "backend_broker", lambda: set_gauges(self._handler))
        self._loop.register(self._router, self._drain)
        self._authenticator.register(self._loop.register)
        try:
            self._loop.run(self._housekeep, lambda: log.info("ready: %s", self.endpoint))
        finally:
            self._close()

    def stop(self) -> None:
        """Make `run` return; may be called from another thread or a signal handler."""
        self._loop.stop()

    def _close(self) -> None:
        self._engines.close()
        self._loop.close()

    def _housekeep(self) -> float:
        now = self._loop.clock.now()
        deadline = self._handler.next_deadline()
        if now >= self._next_tick or (deadline is not None and now >= deadline):
            self._next_tick = now + min(1.0, self._lease_s / 4)
            self._carry_out(self._handler.tick(now), tick=True)
            deadline = self._handler.next_deadline()
        return max(0.0, min(self._next_tick, deadline if deadline is not None else self._next_tick) - now)

    def _drain(self) -> None:
        for _ in range(BATCH):
            try:
                sender, frames = self._authenticator.receive(self._router)
                envelope, message = split_envelope(frames)
            except zmq.Again:
                return
            except MalformedMessage:
                continue  # without a delimiter, the sender's envelope is unknown
            self._carry_out(self._answers(envelope, message, sender))  # type: ignore[arg-type]

    def _answers(self, envelope: Sequence[Frame], message: Sequence[bytes], sender: Sender) -> list[Answer]:
        request_id = "unknown"
        try:
            content = codec.unpack(message[0])
            request_id = codec.request_id(content)
            if len(message) > 1:
                raise MalformedMessage(f"{len(message) - 1} unexpected frames behind the header")
            request: AnyBackendRequest = convert_request(content, AnyBackendRequest, BACKEND_BROKER)
            sender.check(request)
            if isinstance(request, ListKeys):
                return [Answer(envelope, self._keys(request))]
            return self._handler.handle(envelope, request, self._loop.clock.now())
        except (MalformedMessage, NotAllowed, VersionMismatch) as error:
            return [Answer(envelope, Refused(request_id, error.info()))]

    def _keys(self, request: ListKeys) -> KeyList:
        allowed = self._authenticator.allow_list
        allowed.reread()
        keys = None if request.state == allowed.list_state else allowed.listed()
        return KeyList(request.request_id, allowed.list_state, keys)

    def _engine_answered(self, request_id: str, error: ProrlError | None, ready: EngineReady | None) -> None:
        self._carry_out(self._handler.engine_answered(request_id, error, self._loop.clock.now(), ready))

    def _engine_refused(self, address: EngineAddress, error: ProrlError) -> None:
        self._carry_out(self._handler.engine_unreachable(address, error, self._loop.clock.now()))

    def _engine_returned(self, address: EngineAddress) -> None:
        self._handler.weights.reconnected(address)
        self._carry_out([])

    def _carry_out(self, answers: list[Answer], *, tick: bool = False) -> None:
        self._note(tick=tick)
        self._send(answers)
        while calls := self._handler.weights.take_calls():
            answers = []
            for call in calls:
                try:
                    self._engines.send(call)
                except ProrlError as error:
                    answers += self._handler.engine_unreachable(call.address, error, self._loop.clock.now())
            self._note(tick=False)
            self._send(answers)
        if len(self._engines):
            self._engines.keep_only(self._handler.weights.addresses())

    def _note(self, *, tick: bool) -> None:
        """Write changes to the journal; after a failure, the next change or tick retries."""
        changes, weights = self._handler.take_changes(), self._handler.take_weights()
        unwritten = self._unwritten or self._unwritten_weights is not None
        if self._journal is not None and (changes or weights is not None or (tick and unwritten)):
            self._unwritten.update(changes)
            self._unwritten_weights = weights if weights is not None else self._unwritten_weights
            try:
                self._journal.write(self._unwritten, self._unwritten_weights)
                self._unwritten, self._unwritten_weights = {}, None
            except JournalFailed as error:
                log.error("%s; if this broker ends now, the last changes of backends are lost", error.message)  # noqa: TRY400

    def _send(self, answers: Iterable[Answer]) -> None:
        for envelope, reply in answers:
            try:
                send(self._router, [*envelope, codec.encode(reply)], NOBLOCK)
            except zmq.Again:
                log.warning("a client does not read its replies; one was dropped")
