"""`PeerConnection`: an `AsyncSocket` that connects to another process, reports why it cannot, and keeps trying.

A refused connection is begun again after `RENEW_S`, so a key that is allowed later needs no restart.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import zmq

from ..wire.async_socket import AsyncSocket
from .handshake import Handshake

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from .keyring import Keyring

RENEW_S = 1.0

log = logging.getLogger("prorl.security")


class PeerConnection(AsyncSocket):
    """A socket that connects to a broker, or to a peer that announced itself to one.

    Raises:
        InvalidEndpoint: the endpoint is malformed; or only one of us and a peer has keys.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: int,
        endpoint: str,
        keyring: Keyring | None,
        on_message: Callable[[list[bytes | zmq.Frame]], None] | None,
        *,
        curve_key: str | None = None,
        copied: int = 1,
        on_refused: Callable[[], None] | None = None,
        on_connected: Callable[[], None] | None = None,
        on_disconnected: Callable[[], None] | None = None,
        limit_bytes: int,
    ) -> None:
        self.handshake = Handshake(
            context,
            kind,
            endpoint,
            keyring,
            curve_key=curve_key,
            limit_bytes=limit_bytes,
            watch=on_connected is not None,
        )
        """What is known of the connection."""
        super().__init__(self.handshake.socket, on_message, copied)
        self._on_refused = on_refused
        self._on_connected = on_connected
        self._on_disconnected = on_disconnected
        self._renewal: asyncio.TimerHandle | None = None
        events = self.handshake.events
        self._events = AsyncSocket(events, self._changed, copied=2) if events is not None else None

    def close(self, linger_ms: int = 0) -> None:
        """Stop receiving and close; what was sent has `linger_ms` to leave. May be called again."""
        if self._renewal is not None:
            self._renewal.cancel()
        self.handshake.stop()
        if self._events is not None:
            self._events.close()
        super().close(linger_ms)

    def _changed(self, frames: list[bytes | zmq.Frame]) -> None:
        before = self.handshake.problem
        event = self.handshake.note([frame if isinstance(frame, bytes) else frame.bytes for frame in frames])
        if event == zmq.Event.HANDSHAKE_SUCCEEDED and self._on_connected is not None:
            self._on_connected()
        if event == zmq.Event.DISCONNECTED and self._on_disconnected is not None:
            self._on_disconnected()
        if self.handshake.problem and self.handshake.problem != before and self._on_refused is None:
            log.warning("%s", self.handshake.problem)
        if self.handshake.refused and self._renewal is None:
            self._renewal = self._loop.call_later(RENEW_S, self._renew)
            if self._on_refused is not None:
                self._on_refused()

    def _renew(self) -> None:
        self._renewal = None
        self.handshake.renew()
