"""Rollouts on simulated engines (`scheduling_engine`), admitted by the cores of the service, in a virtual clock.

Each RUN slot has a rollout, which waits for a backend or is live; the next one waits as soon as it has ended. The
backend broker's `AdmissionQueue` and `BackendHeap` decide which rollout gets which engine. How many an engine takes is
a fixed number, or comes from the engine host's `Room`, which gets each `HEARTBEAT_S` what a host can know: figures of
its engine, the contexts of the turns that it saw, and the broker's counts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from scheduling_engine import CONTEXT_TOKENS, GROUP, Counts, KvEngine, Prompt, Rollout, make_rollouts

from prorl_zmq.brokers.backends.admission_queue import AdmissionQueue
from prorl_zmq.brokers.backends.backend_heap import BackendHeap
from prorl_zmq.inference.hosting.parking import Parking
from prorl_zmq.inference.hosting.room import Held, KvReport, Room
from prorl_zmq.wire.messages.backends import Assign, Backend

if TYPE_CHECKING:
    from collections.abc import Callable

HEARTBEAT_S = 5.0
WARM_UP = 0.25
"""Share of the time that the figures leave out."""
MAX_IN_FLIGHT = 256
STARVED_S = 600.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens in a simulation."""

    hours: float
    slots: int
    """RUN slots for each engine."""
    tools: float = 1.0
    """Factor of the duration of tool calls."""
    cap: int | None = None
    """Rollouts that each engine takes; None: its `Room` decides."""
    seed: int = 0
    engines: int = 1
    clients: int = 1
    """Those whose rollouts arrive mixed."""
    weights_s: float = math.inf
    """Seconds between updates of the weights."""
    lost: tuple[float, float] | None = None
    """The hours at which the first engine is lost, and returns."""
    burst: tuple[float, float, int] | None = None
    """The hours at which a burst begins and ends, and its RUN slots for each engine."""
    halved: float | None = None
    """The hour at which the KV caches lose half of their tokens."""
    parks: bool = True
    """Whether hosts with a `Room` hold turns back."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of a simulation after the warm-up."""

    tokens_per_s: float
    live: float
    """Rollouts that hold an engine, on average."""
    most_live: int
    """During the warm-up."""
    again: float
    """Share of prompt tokens that had been cached and were computed again."""
    preempted: int
    group_s: float
    """Seconds from a group's first admission to its last end: p95."""
    ended: int
    """Rollouts, of the whole simulation."""
    starved: int
    """Rollouts before which some of later groups started for longer than `STARVED_S`, in the whole simulation."""
    longest_passed_s: float
    """The longest time in which rollouts of later groups started before one that waited."""
    longest_by_group_s: float
    """The same, of later rollouts of groups that came earlier."""
    longest_turn_s: float
    """Most seconds that a turn waited in an engine."""
    longest_parked_s: float
    """Most seconds for which a turn was parked, in the whole simulation."""


@dataclass(eq=False)
class _Host:
    """An engine and what its host knows."""

    name: str
    engine: KvEngine
    room: Room | None
    parking: Parking[Rollout] | None
    prompts: dict[int, Prompt] = field(default_factory=dict)
    """By group."""
    parked: dict[Rollout, float] = field(default_factory=dict)
    """Rollouts whose turn is parked, with the time since."""
    longest_parked_s: float = 0.0
    ended: int = 0
    contexts: dict[int, int] = field(default_factory=dict)
    """By rollout, the one with the latest turn last."""
    counted: Counts = field(default_factory=Counts)
    """At the last heartbeat."""
    at: float = 0.0

    def arrive(self, rollout: Rollout, began: float, now: float) -> None:
        """Begin a turn, or hold it back."""
        if self.parking is not None and self.parking.hold(rollout, rollout.number, began, rollout.context, now):
            self.parked[rollout] = now
        else:
            self.engine.arrive(rollout, now)

    def update(self, held: Held, now: float) -> int | None:
        """Return the engine's room after a heartbeat."""
        if self.room is None:
            return None
        counts, last, elapsed = self.engine.counts, self.counted, now - self.at
        report = KvReport(
            self.engine.capacity,
            min(1.0, (counts.used_s - last.used_s) / elapsed) if elapsed else 0.0,
            counts.preempted - last.preempted,
            len(self.engine.waiting),
            counts.prompt - last.prompt,
            counts.again - last.again,
        )
        self.counted, self.at = replace(counts), now
        while len(self.contexts) > held.rollouts:  # rollouts that ended have been silent for longest
            del self.contexts[next(iter(self.contexts))]
        self.room.update(report, held, self.contexts.values(), now)
        for rollout in self.parking.update(report, held.rollouts, now) if self.parking is not None else ():
            self.longest_parked_s = max(self.longest_parked_s, now - self.parked.pop(rollout))
            self.engine.arrive(rollout, now)
        return self.room.rollouts


class Simulation:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seconds = 3600 * plan.hours
        self._heap = BackendHeap()
        self._queue: AdmissionQueue[Rollout] = AdmissionQueue()
        self._hosts: dict[str, _Host] = {}
        self._on: dict[Rollout, _Host] = {}
        self._rollouts = make_rollouts(plan.seed, plan.tools, plan.clients)
        self._slots = 0
        """RUN slots to fill; negative: as many rollouts that end are not followed by others."""
        self._calls: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = count()
        self._version = 0
        self._entered: dict[Rollout, tuple[int, bool]] = {}
        """Of each waiting rollout, the number of its arrival, and whether it lost its engine."""
        self._arrivals = 0
        self._passed: dict[Rollout, tuple[float, float]] = {}
        """When a rollout of a later group first started before a waiting one, and when that happened last."""
        self._passed_by_group: dict[Rollout, tuple[float, float]] = {}
        """The same, of later rollouts of groups that came earlier."""
        self._came: dict[int, int] = {}
        """When each group came, as a number of an arrival."""
        self._longest_passed = self._longest_by_group = 0.0
        self._starved = 0
        self._groups: dict[int, float] = {}
        self._left: dict[int, int] = defaultdict(lambda: GROUP)
        self._group_s: list[tuple[float, float]] = []
        self._ended = self._ended_tokens = 0
        self._most_live = 0
        self._live_s = self._counted_at = 0.0
        self._gone = Counts()
        """Of engines that were lost."""
        self._longest_turn = self._longest_parked = 0.0

    def run(self) -> Outcome:
        plan = self._plan
        for number in range(plan.engines):
            self._at(0.0, lambda now, name=f"engine-{number}": self._join(name, now))
        self._at(0.0, lambda now: self._add_slots(plan.slots * plan.engines, now))
        if plan.weights_s < math.inf:
            self._at(plan.weights_s, self._update_weights)
        if plan.lost is not None:
            self._at(3600 * plan.lost[0], lambda now: self._lose("engine-0", now))
            self._at(3600 * plan.lost[1], lambda now: self._join("engine-0", now))
        if plan.burst is not None:
            more = (plan.burst[2] - plan.slots) * plan.engines
            self._at(3600 * plan.burst[0], lambda now: self._add_slots(more, now))
            self._at(3600 * plan.burst[1], lambda now: self._add_slots(-more, now))
        if plan.halved is not None:
            self._at(3600 * plan.halved, self._halve)
        self._advance(WARM_UP * self._seconds)
        first, live_s, began, most_live = self._counts(), self._live_s, self._counted_at, self._most_live
        self._advance(self._seconds)
        last, duration = self._counts(), self._counted_at - began
        groups = [end - start for start, end in self._group_s if end >= began]
        for passed in (self._passed, self._passed_by_group):
            for rollout in tuple(passed):
                self._note_passed(passed, rollout)
        return Outcome(
            tokens_per_s=(last.generated - first.generated) / duration,
            live=(self._live_s - live_s) / duration,
            most_live=most_live,
            again=(last.again - first.again) / max(1, last.prompt - first.prompt),
            preempted=last.preempted - first.preempted,
            group_s=float(np.percentile(groups, 95)) if groups else math.inf,
            ended=self._ended,
            starved=self._starved,
            longest_passed_s=self._longest_passed,
            longest_by_group_s=self._longest_by_group,
            longest_turn_s=self._longest_turn,
            longest_parked_s=max(self._longest_parked, *(host.longest_parked_s for host in self._hosts.values())),
        )

    def _at(self, when: float, call: Callable[[float], None]) -> None:
        heappush(self._calls, (when, next(self._number), call))

    def _advance(self, until: float) -> None:
        while True:
            host = min(self._hosts.values(), key=lambda host: host.engine.step_ends, default=None)
            step = host.engine.step_ends if host is not None else math.inf
            if min(step, self._calls[0][0]) >= until:
                break
            if host is not None and step <= self._calls[0][0]:
                for rollout in host.engine.end_step():
                    self._end_turn(rollout, host, step)
            else:
                when, _, call = heappop(self._calls)
                call(when)
        self._count_live(until)

    def _count_live(self, now: float) -> None:
        self._live_s += (now - self._counted_at) * len(self._on)
        self._counted_at = now

    def _counts(self) -> Counts:
        every = [self._gone, *(host.engine.counts for host in self._hosts.values())]
        return Counts(**{name: sum(getattr(one, name) for one in every) for name in Counts.__slots__})

    # Engines ----------------------------------------------------------------------------------------------------------

    def _join(self, name: str, now: float) -> None:
        plan = self._plan
        room = Room(min(plan.slots, MAX_IN_FLIGHT), CONTEXT_TOKENS) if plan.cap is None else None
        parking = Parking[Rollout]() if room is not None and plan.parks else None
        host = self._hosts[name] = _Host(name, KvEngine(), room, parking, at=now)
        self._heap.add(Backend(backend_id=name, endpoint=f"ipc:///nowhere/{name}", max_in_flight=MAX_IN_FLIGHT))
        self._heap.set_room(name, plan.cap)
        self._beat(host, now)

    def _beat(self, host: _Host, now: float) -> None:
        if self._hosts.get(host.name) is not host:
            return
        held = Held(
            len(self._heap.member(host.name).jobs), host.ended, self._ended, self._ended_tokens / max(1, self._ended)
        )
        if host.room is not None:
            self._heap.set_room(host.name, host.update(held, now))
        self._admit(now)
        self._at(now + HEARTBEAT_S, lambda at: self._beat(host, at))

    def _lose(self, name: str, now: float) -> None:
        host = self._hosts.pop(name)
        counts = host.engine.counts
        for one in Counts.__slots__:
            setattr(self._gone, one, getattr(self._gone, one) + getattr(counts, one))
        self._heap.remove(name)
        self._longest_parked = max(self._longest_parked, host.longest_parked_s)
        under_way = [*host.engine.stop_all(), *host.parked]
        self._count_live(now)
        for rollout in [rollout for rollout, on in self._on.items() if on is host]:
            del self._on[rollout]
        for rollout in under_way:
            self._enter(rollout, now, has_left=True)
        self._admit(now)

    def _halve(self, _now: float) -> None:
        for host in self._hosts.values():
            host.engine.capacity //= 2

    def _update_weights(self, now: float) -> None:
        self._version += 1
        for host in self._hosts.values():
            host.engine.clear_cache()
            if host.room is not None:
                host.room.note_weights(now)
        self._at(now + self._plan.weights_s, self._update_weights)

    # Rollouts ---------------------------------------------------------------------------------------------------------

    def _add_slots(self, slots: int, now: float) -> None:
        self._slots += slots
        self._fill(now)

    def _fill(self, now: float) -> None:
        while self._slots > 0:
            self._slots -= 1
            self._enter(next(self._rollouts), now)
        self._admit(now)

    def _enter(self, rollout: Rollout, now: float, *, has_left: bool = False) -> None:
        self._arrivals += 1
        self._entered[rollout] = (self._arrivals, has_left)
        self._came.setdefault(rollout.group, self._arrivals)
        self._queue.enter(f"job-{rollout.number}", f"group-{rollout.group}", rollout, now, has_left=has_left)

    def _admit(self, now: float) -> None:
        for job_id, rollout in self._queue.in_order(now):
            group_id = f"group-{rollout.group}"
            request = Assign(job_id, owner="bench", job_id=job_id, attempt=1, wait_s=60.0, group_id=group_id)
            backend = self._heap.assign(request)
            if backend is None:
                return
            self._queue.note_admitted(job_id, group_id, self._version, now)
            self._note_order(rollout, now)
            host = self._hosts[backend.backend_id]
            self._count_live(now)
            self._on[rollout] = host
            self._most_live = max(self._most_live, len(self._on))
            self._groups.setdefault(rollout.group, now)
            rollout.prompt = host.prompts.setdefault(rollout.group, Prompt(rollout.prompt.tokens))
            host.arrive(rollout, self._groups[rollout.group], now)

    def _note_order(self, rollout: Rollout, now: float) -> None:
        arrival, has_left = self._entered.pop(rollout)
        for passed in (self._passed, self._passed_by_group):
            if rollout in passed:
                self._note_passed(passed, rollout)
        if has_left:
            return
        came = self._came[rollout.group]
        for other, (earlier, _) in self._entered.items():
            if earlier < arrival:
                passed = self._passed if self._came[other.group] < came else self._passed_by_group
                passed[other] = (passed.get(other, (now, now))[0], now)

    def _note_passed(self, passed: dict[Rollout, tuple[float, float]], rollout: Rollout) -> None:
        first, last = passed.pop(rollout)
        if passed is self._passed_by_group:
            self._longest_by_group = max(self._longest_by_group, last - first)
        else:
            self._longest_passed = max(self._longest_passed, last - first)
            self._starved += last - first > STARVED_S

    def _begin_turn(self, rollout: Rollout, now: float) -> None:
        host = self._on.get(rollout)
        if host is not None:
            host.arrive(rollout, self._groups[rollout.group], now)
        else:  # its engine was lost meanwhile
            self._enter(rollout, now, has_left=True)
            self._admit(now)

    def _end_turn(self, rollout: Rollout, host: _Host, now: float) -> None:
        host.contexts.pop(rollout.number, None)
        host.contexts[rollout.number] = rollout.context
        if host.parking is not None:
            host.parking.ended(rollout.number, now)
        if rollout.turn < len(rollout.generated):
            self._at(now + rollout.tool_s[rollout.turn - 1], lambda at: self._begin_turn(rollout, at))
            return
        self._count_live(now)
        del self._on[rollout]
        self._heap.release(f"job-{rollout.number}", 1)
        host.ended += 1
        self._ended += 1
        self._ended_tokens += rollout.context
        self._longest_turn = max(self._longest_turn, host.engine.longest_wait_s)
        self._left[rollout.group] -= 1
        if not self._left[rollout.group]:
            del self._left[rollout.group]
            self._group_s.append((self._groups.pop(rollout.group), now))
            for other in self._hosts.values():
                other.prompts.pop(rollout.group, None)
        self._slots += 1
        self._fill(now)


def simulate(plan: Plan) -> Outcome:
    return Simulation(plan).run()
