"""`Requester`: decides when requests of one connection are sent, resent and failed. No socket and no clock.

`security.request_connection` (asyncio) and `client.blocking.transport` are its shells: they pass in the time and the
connection's state, and carry out each `Step`. A restart of the other side loses requests in transit, so a request may
arrive twice; the other side answers both with the same reply.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import RequestTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

RESEND_S = 2.0
"""A request is resent after this time without a reply, added to the time that its reply may be held: about how long a
killed broker takes to come back (bench/chaos.py)."""


@dataclass(frozen=True, slots=True)
class Step:
    """What to do for a request now, in the order of the fields."""

    move_to: str = ""
    """Connect to this endpoint instead of the current one; empty: stay."""
    warning: str = ""
    """Text to log."""
    error: RequestTimeout | None = None
    """The request has failed."""
    send: bool = False


@dataclass(slots=True)
class Request:
    """A request without a reply; times are in seconds, on the clock of `Requester.step`."""

    asked_at: float
    until: float
    """When it fails without a reply; may be changed."""
    held_s: float
    """How long the other side may hold the reply."""
    warns: bool
    """Log the first late reply."""
    sent_at: float = -math.inf
    connection: int = 0
    """The number of the connection that it was sent on; 0: not sent."""


class Requester:
    """The requests of one connection.

    Args:
        endpoint: where the other side is.
        now: the time in seconds.
        find: returns where the other side is now, or an empty string; called for a late reply. None: it does not move.
        resend_s: seconds without a reply after which a request is resent over the same connection.
        reconnect_s: seconds the connection may be down before its requests fail. If finite, requests are sent only
            after `connected`, and resent after each reconnection; if infinite, neither `connected` nor `disconnected`
            is called.
        hint: what a person should check when there is no reply.
    """

    def __init__(
        self,
        endpoint: str,
        now: float,
        find: Callable[[], str] | None = None,
        *,
        resend_s: float = RESEND_S,
        reconnect_s: float = math.inf,
        hint: str = "",
    ) -> None:
        self.endpoint = endpoint
        self.resend_s = resend_s
        self.reconnect_s = reconnect_s
        self._find = find
        self._hint = hint
        self._connections = 1
        self._down_at = now if reconnect_s < math.inf else None

    def connected(self) -> None:
        self._connections += 1
        self._down_at = None

    def disconnected(self, now: float) -> None:
        if self._down_at is None:
            self._down_at = now

    def down_s(self, now: float) -> float:
        """Return how many seconds the connection has been down."""
        return 0.0 if self._down_at is None else now - self._down_at

    def moved(self) -> str:
        """Return the other side's new endpoint if it has moved, else an empty string."""
        place = self._find() if self._find is not None else ""
        if not place or place == self.endpoint:
            return ""
        self.endpoint = place
        return place

    def wake_at(self, request: Request) -> float:
        """Return when the request's next step is due if neither a reply nor a connection change comes first."""
        if self._down_at is not None:
            limit = self._down_at + self.reconnect_s
            return min(request.until, limit if request.asked_at < limit else request.asked_at + self.reconnect_s)
        if request.connection != self._connections:
            return -math.inf
        return min(request.until, request.sent_at + request.held_s + self.resend_s)

    def step(self, request: Request, now: float, problem: str = "") -> Step:
        """Return what to do for a request now; `problem`: the known reason why there is no connection."""
        due_at = self.wake_at(request)
        if now < due_at:
            return Step()
        move_to, warning, why = "", "", problem or self._hint
        if due_at > -math.inf:  # the reply or the connection is late
            move_to, waited = self.moved(), now - request.asked_at
            if now >= request.until:
                message = _with_reason(f"no reply from {self.endpoint} within {waited:.1f} s", why)
                return Step(move_to, error=RequestTimeout(message, timeout_s=waited))
            if self._down_at is not None:
                message = _with_reason(f"no connection to {self.endpoint} for {self.reconnect_s:g} s", why)
                return Step(move_to, error=RequestTimeout(message, timeout_s=waited, unreachable=True))
            if request.warns:
                request.warns = False
                left_s = request.until - now
                warning = f"no reply from {self.endpoint} yet; waiting for up to {left_s:.0f} s more: {why}"
        request.sent_at, request.connection = now, self._connections
        return Step(move_to, warning, send=True)


def _with_reason(message: str, why: str) -> str:
    return f"{message}; {why}" if why else message
