"""Which flow gets the next slot: each its share by weight, at every moment. Pure.

A flow is one session's plain jobs, or the jobs of its batches. A free slot goes to the waiting flow for which
(slots that it uses + 1) / weight is smallest, if this does not exceed its share of all slots in use; among equals to
the one whose count changed longest ago. So a flow that waits is below its share, rounded down, for no longer than one
job takes, however much others have submitted.

If each waiting flow has its share, rounded down, the flows take turns in proportion to their weights (stride
scheduling: each slot that a flow gets moves its place by 1 / weight, and the flow is next that comes to the smallest
place; a flow that is new here starts from the mean place). So a flow whose share is less than a slot gets one in turn,
and what one flow leaves is divided among the others.

A flow of a higher priority goes first, whatever its share. Within a flow jobs start in the order of acceptance.
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
"""Of sums of weights."""
TAKEN = {
    (Phase.INIT, True): (Phase.INIT,),
    (Phase.RUN, False): (Phase.INIT,),
    (Phase.RUN, True): (Phase.INIT, Phase.RUN),
    (Phase.EVAL, True): (Phase.EVAL,),
}
"""Of which stages a job takes a slot, by its phase and whether a stage process holds it."""


class Entry(NamedTuple):
    """A job's attempt that waits."""

    sequence: int
    job_id: str
    attempt: int


@dataclass(slots=True, eq=False)
class Shares:
    """What all flows have together."""

    weight: float = 0.0
    used: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))
    place: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    """The mean of the flows' places: each slot moves it by 1 / the weight of all."""


@dataclass(slots=True, eq=False)
class Flow:
    """The jobs of one holder: what they use, and where some wait."""

    name: str
    shares: Shares
    weight: float = 1.0
    priority: int = 0
    unfinished: int = 0
    used: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))
    """Slots of RUN and of EVAL; for INIT the jobs that it has begun and RUN has not ended, since these take from what
    INIT may prepare."""
    place: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    """Where it stands in turns."""
    marks: dict[Phase, dict[Requirement, dict[str, Flow]]] = field(
        default_factory=lambda: {phase: {} for phase in Phase}
    )
    """Of each queue in which jobs of this flow wait: the flows that have changed."""

    def __post_init__(self) -> None:
        self.shares.weight += self.weight

    def moved(self, phase: Phase, change: int, *, held: bool) -> None:
        """Count a job that comes to a phase (1) or leaves it (-1), as queued or as `held`."""
        if held and change > 0:
            reached = self.shares.place
            reached[phase] += 1 / max(self.shares.weight, self.weight)  # rounding may have lost a small weight
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
        """It has no more jobs: the others share its slots."""
        self.shares.weight -= self.weight

    def load(self, phase: Phase) -> float:
        """Return how much of a phase it would use for its weight with one more slot."""
        return (self.used[phase] + 1) / self.weight

    def is_below_share(self, phase: Phase) -> bool:
        """Return whether one more slot does not exceed its share of the slots in use, the new one included."""
        share = self.weight * (self.shares.used[phase] + 1)  # of the weight of all
        return (self.used[phase] + 1) * self.shares.weight <= share * (1 + ROUNDING)

    def turn(self, phase: Phase) -> tuple[int, bool, float]:
        """Return its place among the flows that wait for a phase: the smallest is next."""
        if self.is_below_share(phase):
            return -self.priority, False, self.load(phase)
        return -self.priority, True, self.next_place(phase)

    def next_place(self, phase: Phase) -> float:
        """Return where it comes to with one more slot."""
        return self.place[phase] + 1 / self.weight


class FairQueue:
    """The jobs that wait for one requirement, by flow."""

    def __init__(self, requirement: Requirement) -> None:
        self._requirement = requirement
        self.flows: dict[str, Flow] = {}
        self._entries: dict[str, list[Entry]] = {}
        """Of each flow, a heap."""
        self._loads: LeastLoaded[str] = LeastLoaded()
        self._places: LeastLoaded[str] = LeastLoaded()
        self._marked: dict[str, Flow] = {}
        """Flows whose turn may have changed: the next question moves them to their places."""

    def push(self, flow: Flow, entry: Entry) -> None:
        heapq.heappush(self._of(flow), entry)

    def append(self, flow: Flow, entry: Entry) -> None:
        """Have a job wait behind all others of its flow: the quicker way for many that come in order."""
        self._of(flow).append(entry)  # a sorted list is a heap

    def first(self) -> tuple[Flow, Entry] | None:
        """Return the job whose turn it is, with its flow."""
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
        """Take the oldest job of a flow."""
        entries = self._entries[flow.name]
        entry = heapq.heappop(entries)
        if not entries:
            self.take_flow(flow)
        return entry

    def take_flow(self, flow: Flow) -> list[Entry]:
        """Take all jobs of a flow."""
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
        if self.flows.get(flow.name) is not flow:  # new here, or new again: all jobs that it had were cancelled
            phase = self._requirement.role
            if not flow.marks[phase]:  # it waits anew, and may not claim what it left to others
                flow.place[phase] = max(flow.place[phase], flow.shares.place[phase])
            self.flows[flow.name] = self._marked[flow.name] = flow
            flow.marks[phase][self._requirement] = self._marked
            self._entries[flow.name] = []
        return self._entries[flow.name]

    def _rank(self) -> None:
        """Move the flows that have changed to their places."""
        phase = self._requirement.role
        for flow in self._marked.values():
            self._loads.set(flow.name, flow.load(phase), -flow.priority)
            self._places.set(flow.name, flow.next_place(phase), -flow.priority)
        self._marked.clear()


def setting_of(session: str, settings: Mapping[str, Value], default: Value) -> Value:
    """Return what the first pattern that fits a session's name is set to."""
    return next((value for pattern, value in settings.items() if fnmatchcase(session, pattern)), default)
