"""Asks sources for chunks, one source at a time, and continues with the next one when it must."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import zmq

from ...errors import InvalidEndpoint, InvalidWeights, MalformedMessage, RequestTimeout
from ...security.handshake import Handshake
from ...wire import codec
from ...wire.messages.relay import DATA, GONE, ChunkAsk
from ...wire.sockets import NOBLOCK
from ..checkpoint import INDEX_LIMIT_BYTES
from .chunk_plan import CREDIT, ChunkPlan, SourceOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from typing import Self

    from ...security.keyring import Keyring
    from ...wire.messages.relay import WeightSource
    from .chunk_plan import Key

GONE_S = 1.0
"""After this time a source is left at whose address no process listens."""
SILENCE_S = 5.0
"""After this time without a word a source is left. A stopped process is disconnected earlier, by the heartbeats."""
STALL_S = 30.0
"""After this time without a chunk it is left, although it asks for patience."""
ROUND_S = 0.2
"""The pause after all sources fell silent without a chunk."""
MESSAGES_LIMIT = 2 * CREDIT
"""Most messages that are taken between two looks at the deadline, and that wait in the memory."""
LOOK_MS = 100
"""Milliseconds between two looks at the deadline."""

log = logging.getLogger("prorl.relay")


class ChunkSource:
    """Fetches chunks from the first source that gives them, for one thread; a context manager.

    Args:
        context: for the sockets.
        keyring: the keys of this process; None: it has none.
        sources: whom to ask, the first one first.
        check: raises if the transfer must end, as when it is late.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keyring: Keyring | None,
        sources: tuple[WeightSource, ...],
        check: Callable[[], None],
    ) -> None:
        self._context = context
        self._keyring = keyring
        self._sources = sources
        self._check = check
        self._order = SourceOrder(len(sources))
        self._connection: Handshake | None = None
        self._connected: WeightSource | None = None
        """To which source."""
        self._is_gone = False
        """Whether no process listens at the source's address."""
        self._heard = self._fed = 0.0
        self._barren = 0
        """How many fell silent since a chunk came."""
        self.fed_by: dict[str, int] = {}
        """The bytes that each source gave."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._disconnect()

    @property
    def giver(self) -> WeightSource | None:
        """The source that is asked now; None: none is left."""
        at = self._order.source
        return self._sources[at] if at is not None else None

    def fetch(
        self,
        keys: Iterable[Key],
        take: Callable[[Key, bytes], bool],
        *,
        waits: bool = True,
        again: bool = True,
        without: Collection[WeightSource] = (),
    ) -> None:
        """Fetch chunks.

        Args:
            keys: which.
            take: gets each one as it comes, and returns whether it is right.
            waits: a source that does not know the folder yet may answer a little later.
            again: a source that fell silent is asked again after the others.
            without: sources that are not asked.

        Raises:
            InvalidWeights: no source has them, or those that have them lied.
            ProrlError: as `check`.
        """
        plan = ChunkPlan(keys)
        self._order.begin(at for at, source in enumerate(self._sources) if source in without)
        left = 0
        while not plan.is_complete:
            self._check()
            at = self._order.source
            if at is None or (not again and left >= len(self._sources)):
                names = ", ".join(source.name for source in self._sources)
                raise InvalidWeights(f"no source has the right weights; asked: {names}", path="")
            source = self._sources[at]
            problem, lied = self._connect(source), False
            lacks = bool(problem)
            if not problem and self._connection is not None:
                try:
                    for key in plan.ask():
                        self._connection.socket.send_multipart([b"", codec.encode(ChunkAsk(*key, waits))], NOBLOCK)
                except zmq.Again:
                    problem = "takes no more asks"
                else:
                    problem, lied, lacks = self._receive(plan, source, take)
            if problem:
                log.log(logging.ERROR if lied else logging.INFO, "%s at %s %s", source.name, source.endpoint, problem)
                left += 1
                plan.left()
                self._order.leave(lied=lied, lacks=lacks)
                self._disconnect()
                self._barren += not (lied or lacks)  # else it is not asked again
                if self._barren >= len(self._sources):
                    self._barren = 0
                    time.sleep(ROUND_S)

    def leave_liar(self, problem: str) -> None:
        """Never again ask the source that was asked last: what it gave is wrong as a whole."""
        log.error("%s %s", self.giver.name if self.giver is not None else "", problem)
        self._order.leave(lied=True)
        self._disconnect()

    def _receive(
        self, plan: ChunkPlan, source: WeightSource, take: Callable[[Key, bytes], bool]
    ) -> tuple[str, bool, bool]:
        """Take what has come; return why to leave the source, and whether it lied or lacks a chunk."""
        assert self._connection is not None, "it was connected"
        socket, events = self._connection.socket, self._connection.events
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        if events is not None:
            poller.register(events, zmq.POLLIN)
        ready = dict(poller.poll(LOOK_MS))
        now = time.monotonic()
        for _ in range(MESSAGES_LIMIT if socket in ready else 0):
            try:
                frames = socket.recv_multipart(NOBLOCK)
            except zmq.Again:
                break
            self._heard = now
            if len(frames) != 4 or frames[1] not in (DATA, GONE):
                continue
            try:
                ask: ChunkAsk = codec.decode(frames[2], ChunkAsk)
            except MalformedMessage as error:
                return f"gave a malformed answer: {error}", True, False
            key = (ask.folder, ask.file, ask.chunk)
            if not plan.is_asked(key):
                return f"gave chunk {ask.chunk} of file {ask.file}, which was not asked for", True, False
            if frames[1] == GONE:
                return "does not have the weights (any more)", False, True
            if not take(key, frames[3]):
                return f"gave wrong bytes of chunk {ask.chunk} of file {ask.file}: it is not asked again", True, False
            plan.came(key)
            self._fed, self._barren = now, 0
            self.fed_by[source.name] = self.fed_by.get(source.name, 0) + len(frames[3])
            return "", False, False
        is_disconnected = False
        while events is not None and events.poll(0):
            event = self._connection.note(events.recv_multipart())
            is_disconnected |= event == zmq.Event.DISCONNECTED
            if event in (zmq.Event.CONNECTED, zmq.Event.CONNECT_RETRIED):
                self._is_gone = event == zmq.Event.CONNECT_RETRIED
        if self._connection.refused:
            return self._connection.problem, False, True
        if is_disconnected:
            return self._connection.problem or "is disconnected", False, False
        return self._silence(now), False, False

    def _silence(self, now: float) -> str:
        """Return why to leave a source that gives nothing; empty: it has time left."""
        if self._is_gone and now > self._heard + GONE_S:
            return f"is gone: for {GONE_S:g} s no process has listened there"
        if now > self._heard + SILENCE_S:
            return f"says nothing for {SILENCE_S:g} s"
        if now > self._fed + STALL_S:
            return f"has given nothing for {STALL_S:g} s"
        return ""

    def _connect(self, source: WeightSource) -> str:
        """Connect to a source if it is not; return why that is not possible."""
        if self._connection is None or source != self._connected:
            self._disconnect()
            self._connected = source
            self._is_gone = False
            self._heard = self._fed = time.monotonic()
            try:
                self._connection = Handshake(
                    self._context,
                    zmq.DEALER,
                    source.endpoint,
                    self._keyring,
                    curve_key=source.curve_key,
                    limit_bytes=INDEX_LIMIT_BYTES,
                    messages=MESSAGES_LIMIT,
                    watch=True,
                    retries=True,
                )
            except InvalidEndpoint as error:
                return error.message
        return ""

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def check_deadline(until: float) -> None:
    """Raise `RequestTimeout` after this time."""
    if time.monotonic() > until:
        raise RequestTimeout("the weights were not fetched in time")
