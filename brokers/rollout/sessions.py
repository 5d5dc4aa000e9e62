"""`Sessions`: what each session of a rollout broker holds, leases of unnamed sessions, and ending a session.

A session named by its client is permanent. An unnamed one has a lease, which each request renews; when it expires, the
session's jobs are cancelled and its results dropped. (The sampler has the leases of batches.) A client that returns to
an ended session is refused once, with the reason; a new client under its name, which begins with `Hello`, is accepted.

The journal has a note per lease, written at the session's first submission. After a broker restart, leases start over.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ...errors import SessionEnded, UnknownSession
from ...wire.messages.base import SESSIONS_LIMIT
from ...wire.messages.batches import Feed, NextGroup, OpenBatch
from ...wire.messages.front_door import (
    Collect,
    EndSession,
    Hello,
    ListSessions,
    SessionList,
    SessionRow,
    SessionStopped,
    Submit,
)
from .actions import Drop
from .job_record import JobStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ...wire.messages.front_door import FrontDoorRequest
    from .batch_runner import BatchRunner
    from .jobs import Jobs

NOTE = "lease:"
ENDED_LIMIT = 1024
"""Most ended sessions whose clients are still refused."""
JOBS_PER_TICK = 5000
"""After this many cancelled jobs, the remaining expired sessions end at the next tick."""

log = logging.getLogger("prorl.rollout_broker")


@dataclass(slots=True)
class _Lease:
    lease_s: float
    heard_at: float

    def is_over(self, now: float) -> bool:
        return self.heard_at + self.lease_s <= now


class Sessions:
    def __init__(self, jobs: Jobs, batches: BatchRunner) -> None:
        self._jobs = jobs
        self._batches = batches
        self._leases: dict[str, _Lease] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        """Reasons by ended session, until its client was refused."""

    def restore(self, notes: Mapping[str, bytes], now: float) -> dict[str, bytes]:
        """Restore leases from the journal's notes; return the other notes."""
        for name, note in notes.items():
            if name.startswith(NOTE):
                try:
                    self._leases[name.removeprefix(NOTE)] = _Lease(msgspec.msgpack.decode(note, type=float), now)
                except msgspec.MsgspecError as error:
                    log.error("the journal's note %s is damaged, and its session lasts: %s", name, error)  # noqa: TRY400
        return {name: note for name, note in notes.items() if not name.startswith(NOTE)}

    def submits(self, session: str, lease_s: float | None, now: float) -> None:
        """Record the lease of a session that submits; None makes it permanent."""
        known = self._leases.get(session)
        if lease_s is None:
            if known is not None:
                self._forget(session)
        elif known is None or known.lease_s != lease_s:
            self._leases[session] = _Lease(lease_s, now)
            self._jobs.writes.note(f"{NOTE}{session}", msgspec.msgpack.encode(lease_s))

    def asks(self, request: FrontDoorRequest, now: float) -> None:
        """Renew the lease of a requesting session.

        Raises:
            SessionEnded: the session was ended since its last request; raised once.
        """
        session = getattr(request, "session", "")
        lease = self._leases.get(session)
        if lease is not None:
            lease.heard_at = now
        if isinstance(request, Hello):
            self._ended.pop(session, None)
        if not self._ended or not isinstance(request, Submit | Collect | OpenBatch | Feed | NextGroup):
            return
        if (error := self.take_ended(session)) is not None:
            raise error

    def take_ended(self, session: str) -> SessionEnded | None:
        """Return once the reason why a session was ended; None otherwise."""
        why = self._ended.pop(session, None)
        if why is None:
            return None
        return SessionEnded(f"session {session} was ended: {why}; its jobs and results are gone", session=session)

    def restart_leases(self, now: float) -> None:
        """Restart all leases after the broker was paused."""
        for lease in self._leases.values():
            lease.heard_at = now

    def tick(self, now: float) -> None:
        """End sessions whose leases have expired."""
        over = [session for session, lease in self._leases.items() if lease.is_over(now)]
        if not over:
            return
        jobs_of, cancelled = self._jobs_of(set(over)), 0
        for session in over:
            if cancelled >= JOBS_PER_TICK:
                break
            lease_s = self._leases[session].lease_s
            why = f"it has no name, and its client was silent for {lease_s:g} s"
            jobs, results = self._stop(session, jobs_of[session], why, now)
            if jobs or results:
                log.info("ended session %s: its client was silent; %d jobs, %d results", session, jobs, results)
            cancelled += jobs

    def answer(self, request: ListSessions | EndSession, now: float) -> SessionList | SessionStopped:
        """List the sessions, or end one with its batches.

        Raises:
            UnknownSession: the session holds nothing here.
        """
        if isinstance(request, ListSessions):
            return self._list_all(request.request_id, now)
        session = request.session
        batches = self._batches.end_session(session, now)
        if batches is None and not self._holds(session):
            raise UnknownSession(
                f"session {session} holds nothing here; `prorl sessions list` shows those that do", session=session
            )
        jobs, results = self._stop(session, self._jobs_of({session})[session], "an operator has ended it", now)
        return SessionStopped(request.request_id, jobs=jobs, results=results, batches=batches or 0)

    def _list_all(self, request_id: str, now: float) -> SessionList:
        counts = self._counts()
        results, carried, batches = self._jobs.results.counts(), Counter[str](), Counter[str]()
        for name, session in self._batches.sessions().items():
            carried[name], batches[name] = len(session.carried), len(session.batches)
        names = sorted({*(session for session, _ in counts), *results, *carried, *self._leases})
        rows = [
            SessionRow(
                name,
                queued=counts[name, JobStatus.QUEUED],
                running=counts[name, JobStatus.HELD],
                results=results[name],
                batches=batches[name],
                carried_groups=carried[name],
                lease_s=self._leases[name].lease_s if name in self._leases else None,
                silent_s=max(0.0, now - self._leases[name].heard_at) if name in self._leases else None,
            )
            for name in names[:SESSIONS_LIMIT]
        ]
        return SessionList(request_id, sessions=tuple(rows), left_out=len(names) - len(rows))

    def _counts(self) -> Counter[tuple[str, JobStatus]]:
        return Counter((record.session, record.status) for record in self._jobs.table.records.values())

    def _holds(self, session: str) -> bool:
        table, results = self._jobs.table, self._jobs.results
        return session in self._leases or bool(table.unfinished(session) or results.waiting(session))

    def _jobs_of(self, sessions: Collection[str]) -> Mapping[str, list[str]]:
        """Return the sessions' own unfinished jobs, by session."""
        jobs: dict[str, list[str]] = defaultdict(list)
        for record in self._jobs.table.records.values():
            if record.holder in sessions:
                jobs[record.holder].append(record.job_id)
        return jobs

    def _stop(self, session: str, jobs: list[str], why: str, now: float) -> tuple[int, int]:
        """Cancel a session's own jobs and drop its results; return the numbers of both."""
        results = self._jobs.results.job_ids(session)
        for job_id in jobs:
            self._jobs.cancel(job_id, now)
        self._jobs.queue.append(Drop(session, [*results, *jobs]))
        if session in self._leases:
            self._forget(session)
        self._ended[session] = why
        while len(self._ended) > ENDED_LIMIT:
            self._ended.popitem(last=False)
        return len(jobs), len(results)

    def _forget(self, session: str) -> None:
        del self._leases[session]
        self._jobs.writes.note(f"{NOTE}{session}", None)
