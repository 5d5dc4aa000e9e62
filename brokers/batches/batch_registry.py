"""`BatchRegistry`: the open batches, their sessions with leases, and the models' weight versions. Pure.

The last closed batches are remembered in memory, for viewers.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from ...errors import UnknownBatch
from .training_steps import TrainingSteps

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ...wire.messages.batches import BatchClosed
    from .batch_records import AsksFor, BatchRecord, RememberedBatch, SessionRecord

REMEMBERED_LIMIT = 256
"""Most closed batches remembered."""
MATCHES = 4
"""Most ids listed for an ambiguous request."""


class BatchRegistry:
    def __init__(self, asks: AsksFor) -> None:
        self.asks = asks
        self.sessions: dict[str, SessionRecord] = {}
        """By name, including sessions that only carry groups."""
        self.batches: dict[str, BatchRecord] = {}
        """By id, in order of opening."""
        self.versions: Mapping[str, int] = {}
        """The current weight versions, by model; never modified, since jobs keep those that they began with."""
        self.steps = TrainingSteps()
        self._remembered: OrderedDict[str, RememberedBatch] = OrderedDict()

    def __len__(self) -> int:
        return len(self.batches)

    def version(self, model: str) -> int:
        return self.versions.get(model, 0)

    def set_version(self, model: str, version: int) -> None:
        self.versions = {**self.versions, model: version}

    def restore(
        self, sessions: Iterable[SessionRecord], batches: Iterable[BatchRecord], versions: Mapping[str, int]
    ) -> None:
        self.versions = {**self.versions, **versions}
        self.sessions.update((record.session, record) for record in sessions)
        for batch in batches:
            record = self.sessions[batch.session]
            self.batches[batch.batch_id] = batch
            record.batches.add(batch.batch_id)
            batch.take_prompts(record, self.asks)

    def find(self, batch_id: str) -> BatchRecord | None:
        return self.batches.get(batch_id)

    def batch(self, batch_id: str, session: str | None = None) -> BatchRecord:
        """Return an open batch.

        Raises:
            UnknownBatch: no open batch has this id, or it is of another session.
        """
        batch = self.batches.get(batch_id)
        if batch is None or session not in (None, batch.session):
            raise UnknownBatch(
                f"no batch {batch_id} is open here: it was closed, its client was silent for longer than its lease, or "
                "the rollout broker was restarted without its journal",
                batch_id=batch_id,
            )
        return batch

    def remove(self, batch_id: str, now: float) -> BatchRecord:
        """Remove an open batch and remember its summary."""
        batch = self.batches.pop(batch_id)
        self.steps.closed(batch, now)
        self._remembered[batch_id] = batch.remembered(now)
        self._remembered.move_to_end(batch_id)
        if len(self._remembered) > REMEMBERED_LIMIT:
            self._remembered.popitem(last=False)
        return batch

    def look_for(self, beginning: str) -> BatchRecord | RememberedBatch:
        """Return the one batch, open or closed, whose id is `beginning` or begins with it.

        Raises:
            UnknownBatch: no batch or several batches match.
        """
        known = self._remembered | self.batches
        found = [beginning] if beginning in known else [name for name in known if name.startswith(beginning)]
        if len(found) == 1:
            return known[found[0]]
        if found:
            some = ", ".join(found[:MATCHES]) + (", …" if len(found) > MATCHES else "")
            message = f"{len(found)} batches have an id that begins with {beginning}: {some}; give more of it"
        else:
            message = (
                f"no batch {beginning}: it was never opened here, or it was closed so long ago that it is forgotten "
                f"(the newest {REMEMBERED_LIMIT} are remembered, and none over a restart of the rollout broker)"
            )
        raise UnknownBatch(message, batch_id=beginning, matches=len(found))

    def closed(self, session: str, request_id: str) -> BatchClosed | None:
        """Return the reply to a request that closed a batch, or None."""
        record = self.sessions.get(session)
        return record.closed.get(request_id) if record is not None else None

    def weights(self) -> dict[str, float]:
        """Return the total weight of the open batches, by session."""
        weights: dict[str, float] = {}
        for batch in self.batches.values():
            if batch.state == "open":
                weights[batch.session] = weights.get(batch.session, 0.0) + batch.options.weight
        return weights

    def heard(self, session: str, now: float) -> None:
        if session in self.sessions:
            self.sessions[session].heard_at = now

    def silent_sessions(self, now: float) -> list[str]:
        return [name for name, record in self.sessions.items() if record.heard_at + record.lease_s <= now]
