"""Finished jobs on their way to the trainer: each stays until its session acknowledges it. Pure: no sockets, no clock.

A result is given to one client of the session at a time. It is given again to that client if it asks for more without
having acknowledged it (the reply was lost), and to any client of the session once `redeliver_s` have passed (the client
died). A live client, which knows the ids it has seen, so gets each result exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from ...wire.codec import HEADER_LIMIT_BYTES, encode
from ..journal.journal import StoredBlock

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...wire.messages.jobs import Result

REDELIVER_S = 30.0
"""How long a client may hold a result that it has not acknowledged."""


class Finished(NamedTuple):
    """An ended job."""

    session: str
    result: Result
    block: Any
    """The trajectory's block as received (bytes or a frame), or a `StoredBlock`; None if it has no tokens."""
    job_digest: bytes = b""
    """Tells whether a job that is submitted again is this one."""
    sequence: int = 0
    """The job's number in the journal."""
    history: bytes = b""
    """What the job went through (see `JobHistory`)."""


def job_digest(packed: bytes) -> bytes:
    """Give what stands for a packed job once its bytes are gone, 16 bytes."""
    return blake2b(packed, digest_size=16).digest()


@dataclass(slots=True)
class _Delivery:
    client_id: str
    at: float


class ResultStore:
    """The results that no client has acknowledged, by session, oldest first."""

    def __init__(self) -> None:
        self._sessions: dict[str, dict[str, Finished]] = {}
        self._deliveries: dict[str, _Delivery] = {}
        self._session_of: dict[str, str] = {}
        self._held_back: set[str] = set()
        """Those that are not to be given yet."""
        self.memory_bytes = 0
        """What the blocks take that are in memory."""

    def __len__(self) -> int:
        return len(self._session_of)

    def get(self, job_id: str) -> Finished | None:
        """Give an ended job; None if it is not here."""
        session = self._session_of.get(job_id)
        return self._sessions[session][job_id] if session is not None else None

    def waiting(self, session: str) -> int:
        """Give the number of a session's results that were not acknowledged."""
        return len(self._sessions.get(session, ()))

    def hold_back(self, finished: Finished) -> None:
        """Keep an ended job that nobody is to be told of before it is `put`."""
        self.put(finished)
        self._held_back.add(finished.result.job_id)

    def put(self, finished: Finished) -> None:
        """Keep an ended job for its session, or let one go that was held back."""
        job_id = finished.result.job_id
        self._held_back.discard(job_id)
        results = self._sessions.setdefault(finished.session, {})
        self.memory_bytes += _in_memory(finished) - _in_memory(results.get(job_id))
        results[job_id] = finished
        self._session_of[job_id] = finished.session

    def is_held_back(self, job_id: str) -> bool:
        """Tell whether nobody is to be told of a job yet."""
        return job_id in self._held_back

    def acknowledge(self, session: str, job_ids: Iterable[str]) -> list[Finished]:
        """Drop results that the client has; give those that were here."""
        return self.drop(session, [job_id for job_id in job_ids if job_id not in self._held_back])

    def drop(self, session: str, job_ids: Iterable[str]) -> list[Finished]:
        """Drop results, those too that are held back; give those that were here."""
        results = self._sessions.get(session, {})
        known = [job_id for job_id in job_ids if job_id in results]
        dropped = [results.pop(job_id) for job_id in dict.fromkeys(known)]
        for finished in dropped:
            self.memory_bytes -= _in_memory(finished)
            self._deliveries.pop(finished.result.job_id, None)
            self._held_back.discard(finished.result.job_id)
            del self._session_of[finished.result.job_id]
        if session in self._sessions and not results:
            del self._sessions[session]
        return dropped

    def take(
        self, session: str, client_id: str, max_results: int, now: float, limit_bytes: int = HEADER_LIMIT_BYTES // 2
    ) -> list[Finished]:
        """Give results to a client that has none of an earlier reply: up to `max_results`, or what fits one header."""
        taken: list[Finished] = []
        size = 0
        for job_id, finished in self._sessions.get(session, {}).items():
            if len(taken) == max_results:
                break
            if job_id in self._held_back:
                continue
            delivery = self._deliveries.get(job_id)
            if delivery is None or delivery.client_id == client_id or delivery.at + REDELIVER_S <= now:
                size += len(encode(finished.result))
                if taken and size > limit_bytes:
                    break
                self._deliveries[job_id] = _Delivery(client_id, now)
                taken.append(finished)
        return taken

    def take_leave(self, client_id: str) -> None:
        """A client will not ask again: what it has not acknowledged is for its session's next client."""
        for job_id in [key for key, delivery in self._deliveries.items() if delivery.client_id == client_id]:
            del self._deliveries[job_id]

    def put_back(self, taken: Iterable[Finished]) -> None:
        """Undo `take`: the client is gone, so any client of the session may have them at once."""
        for finished in taken:
            self._deliveries.pop(finished.result.job_id, None)


def _in_memory(finished: Finished | None) -> int:
    """Give the bytes of memory that a result's block takes."""
    block = finished.block if finished is not None else None
    return 0 if block is None or isinstance(block, StoredBlock) else len(block)
