"""`TrainerLease`: which trainer's weights the engines serve. Pure.

The first trainer that asks for something about weights holds them from then on, and another one that asks is refused,
unless it says that it takes over. A trainer is a session's name. Its client renews the lease while it lives, and ends
it when it is closed; a trainer that was killed loses it within `LEASE_S`. The lease is not in the journal: a trainer
that lives renews it at a broker that was restarted.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ...errors import WeightsHeld

if TYPE_CHECKING:
    from ...wire.messages.backends import HoldWeights
    from ...wire.messages.engines import WeightUpdate

LEASE_S = 15.0

log = logging.getLogger("prorl.backend_broker")


class TrainerLease:
    def __init__(self) -> None:
        self._trainer = ""
        self._heard_at = 0.0

    def holder(self, now: float) -> str:
        """Return which trainer holds the weights; empty: none."""
        return self._trainer if self._trainer and now < self._heard_at + LEASE_S else ""

    def check(self, request: WeightUpdate, now: float) -> None:
        """Raise `WeightsHeld` if another trainer holds the weights that one asks something about."""
        holder = self.holder(now)
        if holder in ("", request.trainer) or request.take_over:
            return
        silent_s = now - self._heard_at
        raise WeightsHeld(
            f"session {holder} gives this service its weights, and its client was heard {silent_s:.0f} s ago. Two "
            "trainers need two services (`prorl serve --name NAME`). A client that is closed lets others do so at "
            f"once, one that was killed after {LEASE_S:.0f} s. To do so now, although that trainer is then refused: "
            "take_over=True, or --take-over",
            session=holder,
        )

    def begin(self, request: WeightUpdate, now: float) -> None:
        """Give the weights to the trainer whose request was accepted; one that is no trainer takes them from all."""
        holder, trainer = self.holder(now), request.trainer
        if holder not in ("", trainer):
            log.warning("session %s takes over the weights from session %s", trainer or "(none)", holder)
        self._trainer, self._heard_at = trainer, now

    def renew(self, request: HoldWeights, now: float) -> None:
        """Renew the lease of a trainer, or end it; a trainer that holds nothing gets what no other one holds."""
        if self.holder(now) in ("", request.trainer):
            self._trainer, self._heard_at = ("" if request.goodbye else request.trainer), now
