"""Fair queueing: which flow gets the next slot, by weighted shares. Pure.

A flow is one session's plain jobs, or the jobs of its batches. A free slot goes to the waiting flow with the smallest
(slots in use + 1) / weight, if this does not exceed its share of all slots in use; of equal flows, to the one whose
count changed longest ago. A waiting flow is thus below its share, rounded down, for at most the duration of one job.

If every waiting flow has its share, rounded down, the flows take turns by weight (stride scheduling: each slot advances
a flow's place by 1 / weight, and the flow that would reach the smallest place is next; a new flow starts from the mean
place). So a flow with a share below one slot gets a slot in turn, and unused shares are divided among the others.

Flows of a higher priority go first, whatever their share. Within a flow, jobs start in order of acceptance.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ...wire.messages.jobs import Phase
from ..least_loaded import LeastLoaded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .stage_pool import Requirement

Value = TypeVar("Value", int, float)

ROUNDING = 1e-9
"""Tolerance for sums of weights."""
TAKEN = {
    (Phase.INIT, True): (Phase.INIT,),
    (Phase.RUN, False): (Phase.INIT,),
    (Phase.RUN, True): (Phase.INIT, Phase.RUN),
    (Phase.EVAL, True): (Phase.EVAL,),
    (Phase.SCORE, True): (Phase.SCORE,),
}
"""Stages of which a job uses a slot, by its phase and whether a stage process holds it."""


class Entry(NamedTuple):
    """A waiting attempt of a job."""

    sequence: int
    job_id: str
    attempt: int


@dataclass(slots=True, eq=False)
class Shares:
    """Totals over all flows."""

    weight: float = 0.0
    used: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))
    place: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    """The mean of the flows' places: each slot advances it by 1 / total weight."""


@dataclass(slots=True, eq=False)
class Flow:
    """The jobs of one holder: their slots and queues."""

    name: str
    shares: Shares
    weight: float = 1.0
    priority: int = 0
    unfinished: int = 0
    used: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))
    """Slots of RUN, EVAL, SCORE; for INIT, the jobs between INIT's start and RUN's end, which use its ready limit."""
    place: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    """Place in stride scheduling."""
    marks: dict[Phase, dict[Requirement, dict[str, Flow]]] = field(
        default_factory=lambda: {phase: {} for phase in Phase}
    )
    """Per queue in which this flow waits: the flows that have changed."""

    def __post_init__(self) -> None:
        self.shares.weight += self.weight

    def moved(self, phase: Phase, change: int, *, held: bool) -> None:
        """Count a job that enters (1) or leaves (-1) a phase, as queued or as `held`."""
        if held and change > 0:
            reached = self.shares.place
            reached[phase] += 1 / max(self.shares.weight, self.weight)  # rounding may have dropped a small weight
            self.place[phase] = max(self.place[phase] + 1 / self.weight, reached[phase])
        for stage in TAKEN.get((phase, held), ()):
            self.used[stage] += change
            self.shares.used[stage] += change
            if queues := self.marks[stage]:
                for marked in queues.values():
                    marked[self.name] = self

    def weigh(self, weight: float) -> None:
        self.shares.weight += weight - self.weight
        self.weight = weight
        for queues in self.marks.values():
            for marked in queues.values():
                marked[self.name] = self

    def leave(self) -> None:
        """Remove the weight of a flow without jobs, so the others share its slots."""
        self.shares.weight -= self.weight

    def load(self, phase: Phase) -> float:
        """Return (slots in use + 1) / weight for a phase."""
        return (self.used[phase] + 1) / self.weight

    def is_below_share(self, phase: Phase) -> bool:
        """Return whether one more slot stays within the flow's share of the slots in use, including the new one."""
        share = self.weight * (self.shares.used[phase] + 1)  # times the total weight
        return (self.used[phase] + 1) * self.shares.weight <= share * (1 + ROUNDING)

    def turn(self, phase: Phase) -> tuple[int, bool, float]:
        """Return the flow's sort key among those that wait for a phase: the smallest is next."""
        if self.is_below_share(phase):
            return -self.priority, False, self.load(phase)
        return -self.priority, True, self.next_place(phase)

    def next_place(self, phase: Phase) -> float:
        """Return the flow's place after one more slot."""
        return self.place[phase] + 1 / self.weight


class FairQueue:
    """The jobs that wait for one requirement, by flow."""

    def __init__(self, requirement: Requirement) -> None:
        self._requirement = requirement
        self.flows: dict[str, Flow] = {}
        self._entries: dict[str, list[Entry]] = {}
        """A heap per flow."""
        self._loads: LeastLoaded[str] = LeastLoaded()
        self._places: LeastLoaded[str] = LeastLoaded()
        self._marked: dict[str, Flow] = {}
        """Flows that may have changed; the next `first` re-ranks them."""

    def push(self, flow: Flow, entry: Entry) -> None:
        heapq.heappush(self._of(flow), entry)

    def append(self, flow: Flow, entry: Entry) -> None:
        """Add a job behind all others of its flow; faster than `push` for many jobs in order."""
        self._of(flow).append(entry)  # a sorted list is a heap

    def first(self) -> tuple[Flow, Entry] | None:
        """Return the next job and its flow, or None."""
        if not self.flows:
            return None
        if len(self.flows) == 1:
            name = next(iter(self.flows))
        else:
            self._rank()
            name = self._loads.first() or ""
            if not self.flows[name].is_below_share(self._requirement.role):
                name = self._places.first() or ""
        return self.flows[name], self._entries[name][0]

    def pop(self, flow: Flow) -> Entry:
        """Remove and return the oldest job of a flow."""
        entries = self._entries[flow.name]
        entry = heapq.heappop(entries)
        if not entries:
            self.take_flow(flow)
        return entry

    def take_flow(self, flow: Flow) -> list[Entry]:
        """Remove and return all jobs of a flow."""
        del self.flows[flow.name]
        del flow.marks[self._requirement.role][self._requirement]
        self._marked.pop(flow.name, None)
        self._loads.discard(flow.name)
        self._places.discard(flow.name)
        return self._entries.pop(flow.name)

    def entries(self) -> Iterator[Entry]:
        for entries in self._entries.values():
            yield from entries

    def _of(self, flow: Flow) -> list[Entry]:
        if self.flows.get(flow.name) is not flow:  # a new flow, or one that replaced a flow without jobs
            phase = self._requirement.role
            if not flow.marks[phase]:  # it starts to wait: no credit for time in which it did not
                flow.place[phase] = max(flow.place[phase], flow.shares.place[phase])
            self.flows[flow.name] = self._marked[flow.name] = flow
            flow.marks[phase][self._requirement] = self._marked
            self._entries[flow.name] = []
        return self._entries[flow.name]

    def _rank(self) -> None:
        """Re-rank the flows that have changed."""
        phase = self._requirement.role
        for flow in self._marked.values():
            self._loads.set(flow.name, flow.load(phase), -flow.priority)
            self._places.set(flow.name, flow.next_place(phase), -flow.priority)
        self._marked.clear()


def setting_of(session: str, settings: Mapping[str, Value], default: Value) -> Value:
    """Return the value of the first pattern that matches a session's name, or the default."""
    return next((value for pattern, value in settings.items() if fnmatchcase(session, pattern)), default)
