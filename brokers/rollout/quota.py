"""`Quota`: limits on each session's jobs and results, by number and bytes. Pure.

A submission is refused as `busy` if its session would hold too much. A session may use only a share of what the others
leave, so clients that never fetch cannot block other sessions. While a session's trajectories, uncollected or in SCORE,
exceed its limit, INIT starts none of its jobs; the jobs already in RUN and EVAL, and those prepared by INIT, may exceed
the limit.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ...data.records import records_bytes
from ...errors import Busy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...wire.messages.jobs import Result
    from ...wire.messages.stages import PhaseDone, PhaseFailed
    from ..journal.records import Finished

ALL = ""
"""Key for the total of all sessions."""
RETRY_AFTER_S = 1.0


class Quota:
    def __init__(self, max_jobs: int, max_held_bytes: int, session_share: float) -> None:
        self._max_jobs = max_jobs
        self._max_bytes = max_held_bytes
        self._share = session_share
        self._packed_bytes: dict[str, int] = {}
        """By unfinished job."""
        self._jobs: Counter[str] = Counter()
        self._job_bytes: Counter[str] = Counter()
        self._trajectory_bytes: Counter[str] = Counter()
        self._judged_bytes: dict[str, int] = {}
        """Bytes of trajectories by job in SCORE."""

    def check(self, session: str, jobs: int, size_bytes: int) -> None:
        """Raise `Busy` unless a session may submit `jobs` jobs of `size_bytes` in total."""
        for held, new, limit, what in (
            (self._jobs, jobs, self._max_jobs, "jobs and uncollected results"),
            (self._job_bytes, size_bytes, self._max_bytes, "bytes of jobs"),
            (self._trajectory_bytes, 0, self._max_bytes, "bytes of uncollected trajectories"),
        ):
            most = self._most(held, session, limit)
            if held[session] + new > most:
                advice = "collect results, or submit later"
                if new > most:
                    advice = f"{new} more would exceed it: submit at most {most} at a time"
                raise Busy(
                    f"the session holds {held[session]} {what}, and may hold {most} ({self._share:.0%} of what other "
                    f"sessions leave of {limit}); {advice}",
                    retry_after_s=RETRY_AFTER_S,
                )

    def room(self, session: str) -> int:
        """Return how many more jobs a session may submit; 0 while it holds too many bytes."""
        try:
            self.check(session, 0, 0)
        except Busy:
            return 0
        return self.most_jobs(session) - self._jobs[session]

    def most_jobs(self, session: str) -> int:
        return self._most(self._jobs, session, self._max_jobs)

    def prompts(self, session: str, size_bytes: int) -> None:
        """Add the bytes of a session's waiting prompts; negative to subtract."""
        _add(self._job_bytes, session, size_bytes)

    def may_start(self, session: str) -> bool:
        """Return whether INIT may start jobs of a session: there is room for their trajectories."""
        held = self._trajectory_bytes
        return held[ALL] <= self._max_bytes and held[session] <= self._most(held, session, self._max_bytes)

    def has_room(self, session: str, size_bytes: int) -> bool:
        """Return whether a session's trajectories may grow by so much."""
        held = self._trajectory_bytes
        most = self._most(held, session, self._max_bytes)
        return held[ALL] + size_bytes <= self._max_bytes and held[session] + size_bytes <= most

    def submitted(self, session: str, job_id: str, size_bytes: int) -> None:
        """Count a job that was accepted or restored."""
        self._packed_bytes[job_id] = size_bytes
        _add(self._jobs, session, 1)
        _add(self._job_bytes, session, size_bytes)

    def judged(self, session: str, job_id: str, size_bytes: int) -> None:
        """Count the trajectory of a job that is in SCORE; a job may be counted again, in place of the first time."""
        _add(self._trajectory_bytes, session, size_bytes - self._judged_bytes.get(job_id, 0))
        self._judged_bytes[job_id] = size_bytes

    def ended(self, finished: Finished) -> None:
        """Count a job that became a result."""
        job_id = finished.result.job_id
        _add(self._job_bytes, finished.holder, -self._packed_bytes.pop(job_id))
        _add(self._trajectory_bytes, finished.holder, _size(finished) - self._judged_bytes.pop(job_id, 0))

    def recovered(self, finished: Finished) -> None:
        """Count a result that was restored."""
        _add(self._jobs, finished.holder, 1)
        _add(self._trajectory_bytes, finished.holder, _size(finished))

    def collected(self, results: Iterable[Finished]) -> None:
        """Subtract results that were acknowledged."""
        for finished in results:
            _add(self._jobs, finished.holder, -1)
            _add(self._trajectory_bytes, finished.holder, -_size(finished))

    def _most(self, held: Counter[str], session: str, limit: int) -> int:
        return int(self._share * max(0, limit - (held[ALL] - held[session])))


def _add(held: Counter[str], session: str, more: int) -> None:
    for key in (session, ALL):
        now = held.get(key, 0) + more
        if now:
            held[key] = now
        else:
            held.pop(key, None)


def _size(finished: Finished) -> int:
    return len(finished.packed) + trajectory_bytes(finished.result, finished.block)


def trajectory_bytes(end: Result | PhaseDone | PhaseFailed, block: Any) -> int:
    """Return the bytes that a trajectory takes: its block here, or its records on the node that stores it."""
    kept = records_bytes(end.records) if end.kept is not None else 0
    return kept + (len(block) if block is not None else 0)
