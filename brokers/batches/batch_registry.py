"""The batches that are open, and their sessions: who they are, and whose lease still runs. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import UnknownBatch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...wire.messages.batches import BatchClosed
    from .batch_records import BatchRecord, SessionRecord


class BatchRegistry:
    def __init__(self) -> None:
        self.sessions: dict[str, SessionRecord] = {}
        """By name; those too that have no batch now, and carry groups."""
        self.batches: dict[str, BatchRecord] = {}
        """By id, in the order in which they were opened."""

    def __len__(self) -> int:
        return len(self.batches)

    def restore(self, sessions: Iterable[SessionRecord], batches: Iterable[BatchRecord]) -> None:
        self.sessions.update((record.session, record) for record in sessions)
        for batch in batches:
            record = self.sessions[batch.session]
            self.batches[batch.batch_id] = batch
            record.batches.add(batch.batch_id)
            batch.take_prompts(record)

    def find(self, batch_id: str) -> BatchRecord | None:
        return self.batches.get(batch_id)

    def batch(self, batch_id: str, session: str | None = None) -> BatchRecord:
        """Return a batch.

        Raises:
            UnknownBatch: there is none of that id, or not in that session.
        """
        batch = self.batches.get(batch_id)
        if batch is None or session not in (None, batch.session):
            raise UnknownBatch(
                f"no batch {batch_id} is open here: it was closed, its client was silent for longer than its lease, or "
                "the rollout broker was restarted without its journal",
                batch_id=batch_id,
            )
        return batch

    def closed(self, session: str, request_id: str) -> BatchClosed | None:
        """Return what a request was answered that has closed a batch; None if it has not."""
        record = self.sessions.get(session)
        return record.closed.get(request_id) if record is not None else None

    def wants_room(self) -> bool:
        return any(batch.state == "open" for batch in self.batches.values())

    def heard(self, session: str, now: float) -> None:
        if session in self.sessions:
            self.sessions[session].heard_at = now

    def silent_sessions(self, now: float) -> list[str]:
        return [name for name, record in self.sessions.items() if record.heard_at + record.lease_s <= now]
