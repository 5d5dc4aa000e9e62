"""Which flow gets the next slot: each its share by weight, at every moment. Pure.

A flow is one session's plain jobs, or the jobs of its batches. A free slot goes to the waiting flow for which
(slots that it uses + 1) / weight is smallest; among equals to the one whose count changed longest ago. This is
D'Hondt's rule, which grants each flow at least its share, rounded down. So a flow that waits is below its share for no
longer than one job takes, however much others have submitted, and what one flow leaves is divided among the others.

A flow of a higher priority goes first, whatever its share. Within a flow jobs start in the order of acceptance.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ...wire.messages.jobs import Phase
from .least_loaded import LeastLoaded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .stage_pool import Requirement

Value = TypeVar("Value", int, float)


class Entry(NamedTuple):
    """A job's attempt that waits."""

    sequence: int
    job_id: str
    attempt: int


@dataclass(slots=True, eq=False)
class Flow:
    """The jobs of one holder: what they use, and where some wait."""

    name: str
    weight: float = 1.0
    priority: int = 0
    unfinished: int = 0
    used: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))
    """Slots of RUN and of EVAL; for INIT the jobs that it has begun and RUN has not ended, since these take from what
    INIT may prepare."""
    marks: dict[Phase, dict[Requirement, dict[str, Flow]]] = field(
        default_factory=lambda: {phase: {} for phase in Phase}
    )
    """Of each queue in which jobs of this flow wait: the flows that have changed."""

    def moved(self, phase: Phase, change: int, *, held: bool) -> None:
        """Count a job that comes to a phase (1) or leaves it (-1), as queued or as `held`."""
        if phase == Phase.RUN or (held and phase == Phase.INIT):
            self.used[Phase.INIT] += change
            if queues := self.marks[Phase.INIT]:
                for marked in queues.values():
                    marked[self.name] = self
        if held and phase != Phase.INIT:
            self.used[phase] += change
            if queues := self.marks[phase]:
                for marked in queues.values():
                    marked[self.name] = self

    def weigh(self, weight: float) -> None:
        self.weight = weight
        for queues in self.marks.values():
            for marked in queues.values():
                marked[self.name] = self

    def turn(self, phase: Phase) -> tuple[int, float]:
        """Return its place among the flows that wait for a phase: the smallest is next."""
        return -self.priority, (self.used[phase] + 1) / self.weight


class FairQueue:
    """The jobs that wait for one requirement, by flow."""

    def __init__(self, requirement: Requirement) -> None:
        self._requirement = requirement
        self.flows: dict[str, Flow] = {}
        self._entries: dict[str, list[Entry]] = {}
        """Of each flow, a heap."""
        self._turns: LeastLoaded[str] = LeastLoaded()
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
            for flow in self._marked.values():
                tier, load = flow.turn(self._requirement.role)
                self._turns.set(flow.name, load, tier)
            self._marked.clear()
            name = self._turns.first() or ""
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
        self._turns.discard(flow.name)
        return self._entries.pop(flow.name)

    def entries(self) -> Iterator[Entry]:
        for entries in self._entries.values():
            yield from entries

    def _of(self, flow: Flow) -> list[Entry]:
        if self.flows.get(flow.name) is not flow:  # new here, or new again: all jobs that it had were cancelled
            self.flows[flow.name] = self._marked[flow.name] = flow
            flow.marks[self._requirement.role][self._requirement] = self._marked
            self._entries[flow.name] = []
        return self._entries[flow.name]


def setting_of(session: str, settings: Mapping[str, Value], default: Value) -> Value:
    """Return what the first pattern that fits a session's name is set to."""
    return next((value for pattern, value in settings.items() if fnmatchcase(session, pattern)), default)
