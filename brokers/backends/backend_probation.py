"""Backends on which a generation failed: when each is tried again, with one job at a time. Pure.

A backend is on probation from its first failure on. After `FIRST_PAUSE_S` it is offered to one job, and as long as
none was served, to one more each time a pause has passed that doubles up to `MAX_PAUSE_S`: so a broken one costs few
jobs a try, and one that fails once in a while is back in a second. Failures during a probation are of the same trouble
and prolong nothing. A generation that succeeded ends it, unless it may have been over before the failure: a job that
had the backend already counts its generations, but says so with its process's next heartbeat only.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""Between a failure and the first try, and between two tries at most."""
STALE_S = 2.0
"""What a job that is no try says was served may have been served before: so much earlier at most."""


@dataclass(slots=True)
class _Case:
    since: float
    due: float
    """When the next job may try it."""
    pause_s: float
    """How long after that try the one behind it is due."""
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
        """Return whether a success, heard of `now`, ends a probation; `trial`: of a job that tried the backend."""
        case = self._cases.get(backend_id)
        if case is None or not (trial or case.since + STALE_S <= now):
            return False
        self.forget(backend_id)
        return True

    def forget(self, backend_id: str) -> None:
        if self._cases.pop(backend_id, None) is not None:
            self._look()

    def take_due(self, now: float) -> list[str]:
        """Return the backends that a job may try from now on; each once until it was tried."""
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
        """Return the seconds until a backend may be tried, 0 if the next job will; None: it is not on probation."""
        case = self._cases.get(backend_id)
        return max(0.0, case.due - now) if case is not None else None

    def _look(self) -> None:
        self._next_due = min((case.due for case in self._cases.values() if not case.offered), default=None)
