"""`TrainerLease`: the lease of the one trainer that publishes a model's weights to the engines. Pure.

The first trainer (a session's name) that sends a weight request of a model gets its lease; another trainer is refused
unless it takes over. The client renews the lease and ends it when closed; a killed trainer loses the lease within
`LEASE_S` seconds. The lease is not in the journal: a live trainer renews it at a restarted broker.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ...errors import WeightsHeld
from ...wire.messages.base import POLICY

if TYPE_CHECKING:
    from ...wire.messages.backends import HoldWeights
    from ...wire.messages.engines import WeightUpdate

LEASE_S = 15.0

log = logging.getLogger("prorl.backend_broker")


class TrainerLease:
    def __init__(self, model: str = POLICY) -> None:
        self._model = model
        self._trainer = ""
        self._heard_at = 0.0

    def holder(self, now: float) -> str:
        """Return the trainer that holds the lease; empty if none does."""
        return self._trainer if self._trainer and now < self._heard_at + LEASE_S else ""

    def is_lost(self, trainer: str, now: float) -> bool:
        """Return whether another trainer has the lease, or none was heard of for as long as a lease lasts."""
        return now >= self._heard_at + LEASE_S or self._trainer not in ("", trainer)

    def check(self, request: WeightUpdate, now: float) -> None:
        """Raise `WeightsHeld` if another trainer holds the lease and the request does not take over."""
        holder = self.holder(now)
        if holder in ("", request.trainer) or request.take_over:
            return
        silent_s = now - self._heard_at
        raise WeightsHeld(
            f"session {holder} gives this service the weights of the model {self._model}, and its client was heard "
            f"{silent_s:.0f} s ago. Two trainers need two models (two adapters, or two `name`s in `[[backends]]`) or "
            "two services (`prorl serve --name NAME`). A client that is closed lets others do so at once, one that was "
            f"killed after {LEASE_S:.0f} s. To do so now, although that trainer is then refused: take_over=True, or "
            "--take-over",
            session=holder,
        )

    def begin(self, request: WeightUpdate, now: float) -> None:
        """Give the lease to the trainer of an accepted request; a request without a trainer clears the lease."""
        holder, trainer = self.holder(now), request.trainer
        if holder not in ("", trainer):
            log.warning(
                "session %s takes over the weights of %s from session %s", trainer or "(none)", self._model, holder
            )
        self._trainer, self._heard_at = trainer, now

    def renew(self, request: HoldWeights, now: float) -> None:
        """Renew or end a trainer's lease; a trainer without one gets it if it is free."""
        if self.holder(now) in ("", request.trainer):
            self._trainer, self._heard_at = ("" if request.goodbye else request.trainer), now
