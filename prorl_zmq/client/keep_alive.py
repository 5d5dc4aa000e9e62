"""`KeepAlive`: renews a client's lease, such as that of its batches, from a thread with its own socket.

A trainer may spend minutes in one optimiser step, in which neither its thread nor its event loop can send. When the
trainer is killed the renewals stop, and the lease expires.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import zmq

from ..errors import ProrlError
from ..wire.messages.base import new_id
from .blocking.transport import RequestConnection
from .requests import read_reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..security.keyring import Keyring
    from ..wire.messages.base import Message

ANSWER_S = 1.0
"""Longest wait for one answer; also about how long `close` may take."""

log = logging.getLogger("prorl.client")


class KeepAlive:
    def __init__(
        self,
        endpoint: str,
        keyring: Keyring | None,
        find: Callable[[], str] | None,
        renewal: Callable[[str], Message],
        lease_s: float,
    ) -> None:
        """Renew the lease at a broker, found again by `find` after a move, with what `renewal` makes of an id."""
        self._find = find
        self._endpoint = endpoint
        self._keyring = keyring
        self._renewal = renewal
        self._every_s = lease_s / 4
        self._over = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prorl-keep-alive", daemon=True)
        self._thread.start()

    def shorten(self, lease_s: float) -> None:
        """Renew often enough for this lease too."""
        if lease_s / 4 < self._every_s:
            self._every_s = lease_s / 4
            self._wake.set()

    def stop(self) -> None:
        """Stop renewing."""
        self._over = True
        self._wake.set()

    def close(self) -> None:
        """Stop, and wait for a renewal in progress. Idempotent."""
        self.stop()
        self._thread.join(2 * ANSWER_S)

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            connection = RequestConnection(context, self._endpoint, self._keyring, self._find)
            while True:
                self._wake.wait(self._every_s)
                self._wake.clear()
                if self._over:
                    return
                request = self._renewal(new_id())
                try:
                    read_reply(connection.ask_frames(request, time.monotonic() + ANSWER_S))
                except ProrlError as error:
                    log.warning("a lease was not renewed: %s: %s", request, error.message)
                except Exception:
                    log.exception("a lease was not renewed: %s", request)  # the next renewal may succeed
        finally:
            context.destroy(linger=0)
