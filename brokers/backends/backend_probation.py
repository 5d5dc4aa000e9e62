"""`Probation`: when backends on which a generation failed are tried again, one job at a time. Pure.

Probation begins with the first failure. After `FIRST_PAUSE_S` one job may try the backend, then one more after each
pause, which doubles up to `MAX_PAUSE_S`. Further failures do not extend probation. A successful generation ends it,
unless that may have completed before the failure: jobs that had the backend already report their counts only with their
process's next heartbeat.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""Seconds between a failure and the first trial, and the longest pause between two trials."""
STALE_S = 2.0
"""Largest age in seconds of a success that a job which is not a trial reports."""


@dataclass(slots=True)
class _Case:
    since: float
    due: float
    """When the next job may try the backend."""
    pause_s: float
    """Pause after that trial."""
    offered: bool = False


class Probation:
    def __init__(self) -> None:
        self._cases: dict[str, _Case] = {}
        self._next_due: float | None = None

    def __contains__(self, backend_id: str) -> bool:
        return backend_id in self._cases

    def failed(self, backend_id: str, now: float) -> None:
        if backend_id not in self._cases:
            self._cases[backend_id] = _Case(now, now + FIRST_PAUSE_S, 2 * FIRST_PAUSE_S)
            self._look()

    def tried(self, backend_id: str, now: float) -> None:
        case = self._cases[backend_id]
        case.due, case.offered = now + case.pause_s, False
        case.pause_s = min(2 * case.pause_s, MAX_PAUSE_S)
        self._look()

    def served(self, backend_id: str, now: float, *, trial: bool) -> bool:
        """Return whether a success reported `now` ends the probation; `trial`: the job was the backend's trial."""
        case = self._cases.get(backend_id)
        if case is None or not (trial or case.since + STALE_S <= now):
            return False
        self.forget(backend_id)
        return True

    def forget(self, backend_id: str) -> None:
        if self._cases.pop(backend_id, None) is not None:
            self._look()

    def take_due(self, now: float) -> list[str]:
        """Return the backends that a job may try from now on, each once per trial."""
        if self._next_due is None or self._next_due > now:
            return []
        due = [backend_id for backend_id, case in self._cases.items() if case.due <= now and not case.offered]
        for backend_id in due:
            self._cases[backend_id].offered = True
        self._look()
        return due

    def next_due(self) -> float | None:
        return self._next_due

    def next_try_s(self, backend_id: str, now: float) -> float | None:
        """Return the seconds until the next trial, 0 if the next job is one; None if not on probation."""
        case = self._cases.get(backend_id)
        return max(0.0, case.due - now) if case is not None else None

    def _look(self) -> None:
        self._next_due = min((case.due for case in self._cases.values() if not case.offered), default=None)
