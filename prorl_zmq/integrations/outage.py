"""`Outage`: a service that is away for a while, such as one that is started again, and a trainer that waits for it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..errors import ProrlError

log = logging.getLogger("prorl.trainer")

PAUSE_S = 1.0


class Outage:
    """Counts how long the service has been away; `limit_s` is the longest."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since_s: float | None = None

    def pause_s(self, error: ProrlError) -> float:
        """Return how long to wait before the next try, in seconds; raise the error if it was away for too long."""
        now = time.monotonic()
        self._since_s = self._since_s if self._since_s is not None else now
        if now - self._since_s > self._limit_s:
            raise error
        log.warning("%s; again in a second", error.message)
        return PAUSE_S

    def end(self) -> None:
        """It has answered."""
        self._since_s = None
