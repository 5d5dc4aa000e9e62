"""`ResultStore`: results of ended jobs, until their holders acknowledge them. Pure: no sockets, no clock.

A result is delivered to one client at a time: again to that client if it asks for more without having acknowledged the
result (the reply was lost), and to any client of the holder after `REDELIVER_S` (the client died). A live client
remembers the ids it has seen, so it gets each result exactly once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...wire.codec import HEADER_LIMIT_BYTES
from ..journal.records import StoredBlock

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...wire.messages.jobs import Result
    from ..journal.records import Finished

FIXED_BYTES = 1024
"""Upper bound of a packed result without its maps and its error."""
ITEM_BYTES = 16
"""Upper bound of a packed number, or of the head of a text."""
STEP_ITEMS = 4
"""Numbers and array of a step; the size bound thus also bounds a header's arrays (`codec.CONTAINER_LIMIT`)."""
PART_ITEMS = 8
"""Numbers, names and map of a conversation."""
REDELIVER_S = 30.0
"""Seconds after which an unacknowledged result may go to another client."""


@dataclass(slots=True)
class _Delivery:
    client_id: str
    at: float


class ResultStore:
    """The unacknowledged results by holder, oldest first."""

    def __init__(self) -> None:
        self._holders: dict[str, dict[str, Finished]] = {}
        self._deliveries: dict[str, _Delivery] = {}
        self._holder_of: dict[str, str] = {}
        self._held_back: set[str] = set()
        """Jobs whose results are not delivered yet."""
        self.memory_bytes = 0
        """Size of the blocks in memory."""

    def __len__(self) -> int:
        return len(self._holder_of)

    def get(self, job_id: str) -> Finished | None:
        holder = self._holder_of.get(job_id)
        return self._holders[holder][job_id] if holder is not None else None

    def waiting(self, holder: str) -> int:
        """Return the number of a holder's unacknowledged results."""
        return len(self._holders.get(holder, ()))

    def job_ids(self, holder: str) -> list[str]:
        """Return the ids of a holder's results, including those held back."""
        return list(self._holders.get(holder, ()))

    def counts(self) -> Counter[str]:
        """Return the number of results by session, including its batches' results."""
        counts: Counter[str] = Counter()
        for results in self._holders.values():
            counts[next(iter(results.values())).session] += len(results)
        return counts

    def hold_back(self, finished: Finished) -> None:
        """Add a result, or hold back a stored one, until it is `put`."""
        self.put(finished)
        self._held_back.add(finished.result.job_id)

    def put(self, finished: Finished) -> None:
        """Store a result for its holder, or release one that was held back."""
        job_id = finished.result.job_id
        self._held_back.discard(job_id)
        results = self._holders.setdefault(finished.holder, {})
        self.memory_bytes += _in_memory(finished) - _in_memory(results.get(job_id))
        results[job_id] = finished
        self._holder_of[job_id] = finished.holder

    def is_held_back(self, job_id: str) -> bool:
        return job_id in self._held_back

    def acknowledge(self, holder: str, job_ids: Iterable[str]) -> list[Finished]:
        """Remove results that the client has, except those held back; return the removed ones."""
        return self.drop(holder, [job_id for job_id in job_ids if job_id not in self._held_back])

    def drop(self, holder: str, job_ids: Iterable[str]) -> list[Finished]:
        """Remove results, including those held back; return the removed ones."""
        results = self._holders.get(holder, {})
        known = [job_id for job_id in job_ids if job_id in results]
        dropped = [results.pop(job_id) for job_id in dict.fromkeys(known)]
        for finished in dropped:
            self.memory_bytes -= _in_memory(finished)
            self._deliveries.pop(finished.result.job_id, None)
            self._held_back.discard(finished.result.job_id)
            del self._holder_of[finished.result.job_id]
        if holder in self._holders and not results:
            del self._holders[holder]
        return dropped

    def take(
        self, holder: str, client_id: str, max_results: int, now: float, limit_bytes: int = HEADER_LIMIT_BYTES // 2
    ) -> list[Finished]:
        """Return up to `max_results` results that no other client has, within `limit_bytes` if more than one."""
        taken: list[Finished] = []
        size = 0
        for job_id, finished in self._holders.get(holder, {}).items():
            if len(taken) == max_results:
                break
            if job_id in self._held_back:
                continue
            delivery = self._deliveries.get(job_id)
            if delivery is None or delivery.client_id == client_id or delivery.at + REDELIVER_S <= now:
                size += size_bound(finished.result)
                if taken and size > limit_bytes:
                    break
                self._deliveries[job_id] = _Delivery(client_id, now)
                taken.append(finished)
        return taken

    def named(
        self, holder: str, job_ids: Iterable[str], max_results: int, limit_bytes: int = HEADER_LIMIT_BYTES // 2
    ) -> list[Finished]:
        """Return those of the given results that are stored, without changing anything."""
        results = self._holders.get(holder, {})
        found: list[Finished] = []
        size = 0
        for job_id in dict.fromkeys(job_ids):
            finished = results.get(job_id)
            if finished is None or job_id in self._held_back:
                continue
            size += size_bound(finished.result)
            if len(found) == max_results or (found and size > limit_bytes):
                break
            found.append(finished)
        return found

    def take_leave(self, client_id: str) -> None:
        """Allow the holder's next client to get what a leaving client has not acknowledged."""
        for job_id in [key for key, delivery in self._deliveries.items() if delivery.client_id == client_id]:
            del self._deliveries[job_id]

    def put_back(self, taken: Iterable[Finished]) -> None:
        """Undo `take`: the client is gone, so any client of the holder may get the results at once."""
        for finished in taken:
            self._deliveries.pop(finished.result.job_id, None)


def size_bound(result: Result) -> int:
    """Return an upper bound of a packed result's size in bytes, without packing it."""
    texts = [
        *result.metrics,
        *result.timings,
        *result.notes,
        *result.notes.values(),
        result.stop_reason,
        result.backend,
    ]
    if result.kept is not None:
        texts += [result.kept.node, result.kept.endpoint, result.kept.socket]  # the rest is in `FIXED_BYTES`
    if result.error is not None:
        texts += [result.error.message, *result.error.fields, *map(str, result.error.fields.values())]
    texts += [step.name for step in result.steps]
    if result.conversations:
        texts += [text for part in result.conversations for text in (part.name, part.stop_reason)]
    joined = "".join(texts)
    characters = len(joined) if joined.isascii() else 4 * len(joined)
    items = len(texts) + len(result.segments) + STEP_ITEMS * (len(result.steps) + len(result.turn_rewards))
    items += PART_ITEMS * len(result.conversations)
    return FIXED_BYTES + ITEM_BYTES * items + characters


def _in_memory(finished: Finished | None) -> int:
    """Return the size of a result's block in memory."""
    block = finished.block if finished is not None else None
    return 0 if block is None or isinstance(block, StoredBlock) else len(block)
