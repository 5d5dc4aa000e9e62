"""The backend assignments of a stage process, and its reports of them to the backend broker. Pure.

A report names the changed assignments and a digest of all; a broker with another digest asks for all of them.
"""

from __future__ import annotations

from msgspec.structs import replace

from ..wire.change_reports import FULL_EVERY
from ..wire.messages.backends import HeldAssignment, OwnerAlive, assignment_digest
from ..wire.messages.base import new_id


class HeldAssignments:
    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._held: dict[str, HeldAssignment] = {}
        """By holder."""
        self._besides: set[str] = set()
        """Holders of models other than their jobs' own."""
        self._served: set[str] = set()
        """Holders whose backends served a generation since the last report."""
        self._full_in = 0

    def __len__(self) -> int:
        return len(self._held)

    def wait(self, holder_id: str, attempt: int, *, own: bool = True) -> None:
        """Note that a job waits for a backend; `own`: of the model of the job's own turns."""
        self._held[holder_id] = HeldAssignment(attempt, pinned=self.pinned(holder_id, attempt))
        if not own:
            self._besides.add(holder_id)

    def assigned(self, holder_id: str, attempt: int, backend_id: str, pinned: int | None = None) -> None:
        held = self._held.get(holder_id)
        if held is not None and held.attempt == attempt and not held.backend_id:  # it may have been released meanwhile
            self._held[holder_id] = replace(held, backend_id=backend_id, pinned=pinned)

    def pinned(self, holder_id: str, attempt: int) -> int | None:
        """Return the adapter's version to which an attempt is pinned."""
        held = self._held.get(holder_id)
        return held.pinned if held is not None and held.attempt == attempt else None

    def note_served(self, holder_id: str, attempt: int) -> None:
        held = self._held.get(holder_id)
        if held is not None and held.attempt == attempt:
            self._held[holder_id] = replace(held, served=held.served + 1)
            self._served.add(holder_id)

    def release(self, holder_id: str, attempt: int) -> HeldAssignment | None:
        """Forget an assignment and return it; an assignment of a newer attempt stays."""
        held = self._held.get(holder_id)
        if held is None or held.attempt > attempt:
            return None
        self._besides.discard(holder_id)
        return self._held.pop(holder_id)

    def backends(self) -> dict[str, str]:
        """Return the backends of the jobs' own turns, by job."""
        return {
            one.partition("/")[0]: held.backend_id
            for one, held in self._held.items()
            if held.backend_id and one not in self._besides
        }

    def report(self, *, full: bool = False) -> OwnerAlive:
        """Return the next heartbeat; it lists everything if the broker asked, and at intervals."""
        full = full or not self._full_in
        self._full_in = FULL_EVERY if full else self._full_in - 1
        named = self._held.keys() if full else self._served & self._held.keys()
        self._served.clear()
        digest = None if full else sum(map(self._digest, self._held))
        return OwnerAlive(new_id(), self._owner, {holder_id: self._held[holder_id] for holder_id in named}, digest)

    def _digest(self, holder_id: str) -> int:
        held = self._held[holder_id]
        return assignment_digest(holder_id, held.attempt, held.backend_id) if held.backend_id else 0
