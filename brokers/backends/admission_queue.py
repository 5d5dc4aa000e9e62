"""`AdmissionQueue`: the jobs that wait for a backend of one model, in the order in which they get one. Pure: no clock.

| order | jobs |
|---|---|
| 1 | those that hold a backend of another model, for which others wait: they need no room |
| 2 | those that had a backend and left it: their rollouts have begun |
| 3 | those of a group whose first job was admitted less than `PRECEDENCE_S` ago |
| 4 | all others |

Of 1 to 3, the jobs whose group began with the oldest weights are first; then, and in 4, the order is that of arrival.
No size is compared: a job that finds no room waits at the head, and no smaller one passes it. A later job passes an
earlier one only by 1 to 3, and all are bounded: only admitted jobs hold or leave a backend, and only for a time does a
group come first, however many jobs it has. So each job is admitted, if backends get room as long as it waits.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

Item = TypeVar("Item")

PRECEDENCE_S = 600.0
"""Seconds after a group's first admission in which its other jobs come before those of groups that have not begun."""
GROUP_LIMIT = 10_000
"""Most groups remembered; the one that began first is forgotten."""
COMPACT_FROM = 64
"""The heap is compacted once it is larger than this and more than three quarters of it is stale."""
HOLDS, LEFT, BEGUN, FRESH = range(4)


class _Rank(NamedTuple):
    order: int
    weight_version: int
    arrival: int


class _Begun(NamedTuple):
    weight_version: int
    since: float


@dataclass(slots=True)
class _Entry(Generic[Item]):
    group_id: str
    has_left: bool
    arrival: int
    item: Item
    rank: _Rank


class AdmissionQueue(Generic[Item]):
    """The jobs of one queue.

    Args:
        holds: whether a job holds a backend of another model; `rerank` must follow once a waiting job does.
    """

    def __init__(self, holds: Callable[[str], bool] = lambda _: False) -> None:
        self._holds = holds
        self._entries: dict[str, _Entry[Item]] = {}
        """By job."""
        self._heap: list[tuple[_Rank, str]] = []
        """With stale entries: one counts if its rank is still that of its job."""
        self._by_group: dict[str, set[str]] = {}
        """The waiting jobs of each group."""
        self._begun: OrderedDict[str, _Begun] = OrderedDict()
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_blank(self) -> bool:
        """Whether no job waits, and no group has begun."""
        return not self._entries and not self._begun

    def forget_groups(self, now: float) -> None:
        """Forget the groups that have begun, if no job waits and none would come first."""
        if self._begun and not self._entries and next(reversed(self._begun.values())).since + PRECEDENCE_S <= now:
            self._begun.clear()

    def age_s(self, group_id: str, now: float) -> float:
        """Return the seconds since a group began; 0: it has not, or is forgotten."""
        begun = self._begun.get(group_id)
        return now - begun.since if begun is not None else 0.0

    def items(self) -> Iterator[tuple[str, Item]]:
        """Yield jobs and items in no particular order."""
        return ((job_id, entry.item) for job_id, entry in self._entries.items())

    def find(self, job_id: str) -> Item | None:
        entry = self._entries.get(job_id)
        return entry.item if entry is not None else None

    def enter(self, job_id: str, group_id: str, item: Item, now: float, *, has_left: bool = False) -> None:
        """Add a job, or replace the item of a job that waits, which keeps its place.

        Args:
            job_id: the job.
            group_id: its group; empty: it has none.
            item: what `find` and `in_order` return.
            now: the time.
            has_left: whether the job had a backend in this attempt.
        """
        known = self._entries.get(job_id)
        if known is not None:
            known.item = item
            return
        self._arrivals += 1
        entry = _Entry(group_id, has_left, self._arrivals, item, _Rank(FRESH, 0, self._arrivals))
        self._entries[job_id] = entry
        if group_id:
            self._by_group.setdefault(group_id, set()).add(job_id)
        self._place(job_id, entry, now)

    def withdraw(self, job_id: str) -> None:
        """Remove a job; one that does not wait is ignored."""
        entry = self._entries.pop(job_id, None)
        if entry is None:
            return
        if entry.group_id:
            jobs = self._by_group[entry.group_id]
            jobs.discard(job_id)
            if not jobs:
                del self._by_group[entry.group_id]
        if not self._entries:
            self._heap.clear()

    def note_admitted(self, job_id: str, group_id: str, weight_version: int, now: float) -> None:
        """Remove a job, if it waits, since it got a backend that serves this version. Its group has begun."""
        self.withdraw(job_id)
        if not group_id or group_id in self._begun:
            return
        self._begun[group_id] = _Begun(weight_version, now)
        if len(self._begun) > GROUP_LIMIT:
            self._begun.popitem(last=False)
        for other in self._by_group.get(group_id, ()):
            self.rerank(other, now)

    def rerank(self, job_id: str, now: float) -> None:
        """Move a job to the place that it has by now; one that does not wait is ignored."""
        entry = self._entries.get(job_id)
        if entry is not None and entry.rank != self._rank(job_id, entry, now):
            self._place(job_id, entry, now)

    def in_order(self, now: float) -> Generator[tuple[str, Item]]:
        """Yield jobs and items, the first first. Meanwhile jobs may be admitted and withdrawn; O(log n) for each job.

        A job of a group that begins meanwhile comes next.
        """
        passed: list[tuple[_Rank, str]] = []
        try:
            while self._heap:
                rank, job_id = heapq.heappop(self._heap)
                entry = self._entries.get(job_id)
                if entry is None or entry.rank != rank:
                    continue
                if rank.order in (HOLDS, BEGUN) and self._rank(job_id, entry, now) != rank:
                    self._place(job_id, entry, now)
                    continue
                passed.append((rank, job_id))
                yield job_id, entry.item
        finally:
            for one in passed:
                if one[1] in self._entries:
                    heapq.heappush(self._heap, one)

    def _place(self, job_id: str, entry: _Entry[Item], now: float) -> None:
        entry.rank = self._rank(job_id, entry, now)
        heapq.heappush(self._heap, (entry.rank, job_id))
        if len(self._heap) > COMPACT_FROM and len(self._heap) > 4 * len(self._entries):
            self._heap = [(entry.rank, job_id) for job_id, entry in self._entries.items()]
            heapq.heapify(self._heap)

    def _rank(self, job_id: str, entry: _Entry[Item], now: float) -> _Rank:
        begun = self._begun.get(entry.group_id)
        version = begun.weight_version if begun is not None else 0
        if self._holds(job_id):
            return _Rank(HOLDS, version, entry.arrival)
        if entry.has_left:
            return _Rank(LEFT, version, entry.arrival)
        if begun is not None and now < begun.since + PRECEDENCE_S:
            return _Rank(BEGUN, version, entry.arrival)
        return _Rank(FRESH, 0, entry.arrival)
