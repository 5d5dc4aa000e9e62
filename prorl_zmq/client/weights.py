"""How a client gives all backends new weights: each call is one request to the backend broker, which asks the engines.

The broker and the engine hosts keep what was begun (see `inference.engine_updates` and
`brokers.backends.weight_requests`); here is no state, so any client may end or cancel what another one began. A client
that dies in between leaves that to their limits.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..wire.messages.backends import (
    TAKE_BACK_S,
    BeginWeights,
    CancelWeights,
    EndWeights,
    LoadWeights,
    SetWeightVersion,
)
from ..wire.messages.base import new_id

if TYPE_CHECKING:
    from pathlib import Path

    from ..wire.messages.engines import UpdateMode
    from .backends import Backends

UPDATE_LIMIT_S = 600.0
"""How long engines wait for the end of an update, unless they are told otherwise: beyond it the trainer is dead."""
REPLY_SLACK_S = 1.0
"""How much later the broker's reply may arrive than it has to be sent."""


class Weights:
    """Updates the weights of all backends; a part of `RolloutClient`, whose methods say what each of these raises."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends

    def begin(self, version: int, mode: UpdateMode, limit_s: float, until: float) -> None:
        """See `RolloutClient.begin_weights`."""
        self._ask(BeginWeights(new_id(), version, limit_s, mode, allowed_s(until)))

    def end(self, version: int, until: float) -> None:
        """See `RolloutClient.end_weights`."""
        self._ask(EndWeights(new_id(), version, allowed_s(until)))

    def cancel(self, version: int, until: float) -> None:
        """See `RolloutClient.cancel_weights`."""
        self._ask(CancelWeights(new_id(), version, allowed_s(until)))

    def update(self, path: Path | str, version: int, mode: UpdateMode, until: float) -> None:
        """See `RolloutClient.update_weights`."""
        self._ask(LoadWeights(new_id(), str(path), version, mode, allowed_s(until)))

    def set_version(self, version: int, until: float) -> None:
        """See `RolloutClient.set_weight_version`."""
        self._ask(SetWeightVersion(new_id(), version, None, allowed_s(until)))

    def _ask(self, request: Any) -> None:
        self._backends.ask(request, reply_s(request))


def allowed_s(until: float) -> float:
    """Return how long engine hosts have to answer, in seconds, by when the call is to be over."""
    return min(max(0.001, until - time.monotonic()), 7 * 86400.0)


def reply_s(request: Any) -> float:
    """Return how long to wait for the broker's reply, in seconds: it names the host that did not answer in time."""
    return float(request.timeout_s + TAKE_BACK_S + REPLY_SLACK_S)
