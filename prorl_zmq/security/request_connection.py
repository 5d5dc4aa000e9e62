"""`AsyncRequestConnection`: requests and their replies over a DEALER, on an asyncio loop.

When a request is sent again and when it fails is decided by `wire.requester`. Many requests may wait at once; a reply
finds its request by the id. A reply that no request waits for is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq

from ..errors import Closed, MalformedMessage
from ..wire import codec
from ..wire.requester import RESEND_S, Request, Requester
from ..wire.sockets import MAX_FRAME_BYTES
from .peer_connection import PeerConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..errors import ProrlError
    from ..wire.sockets import Frame
    from .keyring import Keyring

log = logging.getLogger("prorl.client")


@dataclass(slots=True)
class _Asked:
    request: Request
    news: asyncio.Future[None]
    reply: list[bytes | zmq.Frame] | None = None
    error: ProrlError | None = None

    def wake(self) -> None:
        if not self.news.done():
            self.news.set_result(None)


class AsyncRequestConnection(PeerConnection):
    """A DEALER that connects to another process; made on a running loop. Times are on the clock `time.monotonic`.

    `find`, `resend_s`, `reconnect_s` and `hint` are those of `Requester`.

    Args:
        context: in which the socket is opened.
        endpoint: where the other side is.
        keyring: our keys; None: none.
        curve_key: the public key of a peer, empty for none; None: the other side is a broker.
        fail_if_refused: fail with `NotAllowed` what waits when the other side refuses our key; else it waits on.
        is_interim: called with each message that arrives; true: it does not end the wait of its request.
        limit_bytes: largest frame of a reply.
        copied: how many frames of a message arrive as bytes, with the envelope; the others are views.

    Raises:
        InvalidEndpoint: the endpoint is malformed; or only one of us and a peer has keys.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keyring: Keyring | None,
        find: Callable[[], str] | None = None,
        *,
        resend_s: float = RESEND_S,
        reconnect_s: float = math.inf,
        curve_key: str | None = None,
        fail_if_refused: bool = True,
        is_interim: Callable[[dict[str, Any]], bool] = lambda _content: False,
        hint: str = "is the service running? (`prorl serve`)",
        limit_bytes: int = MAX_FRAME_BYTES,
        copied: int = 2,
    ) -> None:
        self.requester = Requester(
            endpoint, time.monotonic(), find, resend_s=resend_s, reconnect_s=reconnect_s, hint=hint
        )
        self._asked: dict[str, _Asked] = {}
        self._is_interim = is_interim
        super().__init__(
            context,
            zmq.DEALER,
            endpoint,
            keyring,
            self._take_reply,
            curve_key=curve_key,
            copied=copied,
            on_refused=self._refused if fail_if_refused else None,
            on_connected=self._connected if reconnect_s < math.inf else None,
            on_disconnected=self._disconnected if reconnect_s < math.inf else None,
            limit_bytes=limit_bytes,
        )

    @property
    def waiting(self) -> int:
        """How many requests have no reply."""
        return len(self._asked)

    async def ask_frames(
        self, message: Any, until: float, payload: Sequence[bytes] = (), held_s: float = 0.0, *, warns: bool = False
    ) -> list[bytes | zmq.Frame]:
        """Send a request with the frames behind its header, and return the frames of its reply.

        Args:
            message: the request; its `request_id` names it.
            until: when to give up.
            payload: the frames behind the header.
            held_s: how many seconds the other side may hold the reply.
            warns: log that the first reply is late.

        Raises:
            NotAllowed: the other side refused our key.
            RequestTimeout: there was no reply by `until`; with `unreachable`, the connection was down for too long.
            MalformedMessage: the other side sent no message of ours, over a connection that resends nothing.
            Closed: the connection was closed.
        """
        frames = [codec.encode(message), *payload]
        request = Request(time.monotonic(), until, held_s, warns)
        asked = self._asked[message.request_id] = _Asked(request, self._loop.create_future())
        try:
            while asked.reply is None:
                if asked.error is not None:
                    raise asked.error
                self._do_step(request, frames)
                asked.news = self._loop.create_future()
                await asyncio.wait([asked.news], timeout=self.requester.wake_at(request) - time.monotonic())
        finally:
            del self._asked[message.request_id]
        return asked.reply

    def extend(self, request_id: str, until: float) -> None:
        """Wait longer for a reply than was asked for."""
        if request_id in self._asked:
            self._asked[request_id].request.until = until

    def send(self, frames: Sequence[Frame]) -> None:
        """Send a message without waiting for a reply."""
        super().send([b"", *frames])

    def reconnect(self, endpoint: str = "") -> None:
        """Connect again, to where the other side is now; what was sent and not delivered is lost."""
        self.requester.endpoint = endpoint or self.requester.moved() or self.requester.endpoint
        self.handshake.renew(self.requester.endpoint)

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; what waits for a reply gets `Closed`. May be called again."""
        super().close(linger_ms)
        self._fail(Closed("the client was closed"))

    def _do_step(self, request: Request, frames: Sequence[Frame]) -> None:
        step = self.requester.step(request, time.monotonic(), self.handshake.problem)
        if step.move_to:
            self.handshake.renew(step.move_to)
        if step.warning:
            log.warning("%s", step.warning)
        if step.error is not None:
            raise step.error
        if step.send:
            self.send(frames)

    def _take_reply(self, frames: list[bytes | zmq.Frame]) -> None:
        try:
            content = codec.unpack(frames[1])  # type: ignore[arg-type]
        except (MalformedMessage, IndexError) as error:
            if self.requester.resend_s == math.inf:
                self._fail(MalformedMessage(f"{self.requester.endpoint} sent what is not a message: {error}"))
            return
        is_interim = self._is_interim(content)
        asked = self._asked.get(codec.request_id(content))
        if asked is not None and not is_interim:
            asked.reply = asked.reply or frames[1:]
            asked.wake()

    def _connected(self) -> None:
        self.requester.connected()
        self._wake_all()

    def _disconnected(self) -> None:
        self.requester.disconnected(time.monotonic())
        self._wake_all()

    def _wake_all(self) -> None:
        for asked in self._asked.values():
            asked.wake()

    def _refused(self) -> None:
        self._fail(self.handshake.error())

    def _fail(self, error: ProrlError) -> None:
        for asked in self._asked.values():
            asked.error = asked.error or error
        self._wake_all()
