"""`StagePool`: the stage processes and their credit. Pure: no sockets, no clock.

A stage process has as many credits as slots. A phase takes one credit, which returns only when the process reports the
phase's end or its lease expires; a process still stopping a cancelled job gets no other. A quiet process, whose lease
has not expired yet, gets no new phases.

A member is the reporting unit with one lease: a stage process by itself, or a node for all of its stage processes.

Sandboxes stay on their node, so INIT prepares none there for a task of which as many jobs wait on the node as its RUN
and EVAL processes have slots. A node whose RUN or EVAL slots are stuck thus holds only a few jobs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from ...wire.messages.front_door import StageStatus
from ...wire.messages.jobs import Phase
from ..least_loaded import LeastLoaded
from .deadlines import Deadlines
from .node_losses import NodeLosses

if TYPE_CHECKING:
    from collections.abc import Iterator, KeysView

    from ...wire.messages.nodes import NodeFacts
    from ...wire.messages.stages import StageReport


class Requirement(NamedTuple):
    """What a phase of a job requires of a stage process."""

    role: Phase
    task: str
    node: str | None
    """The node of its sandbox; None for any node."""


class SlotClaim(NamedTuple):
    """A job's attempt that takes one slot of a stage process."""

    job_id: str
    attempt: int


@dataclass
class Lease:
    """A member's hold on the phases of its stage processes."""

    member: str
    heard_at: float
    number: int = 0
    """Number of the last report."""
    quiet: bool = False
    """Whether the member has not reported for `quiet_s` or refuses connections."""
    disconnected: bool = False
    """Whether its connection has ended since its last report."""
    facts: NodeFacts | None = None
    """Reported facts about its machine."""
    stages: dict[str, StageProcess] = field(default_factory=dict)


@dataclass
class StageProcess:
    stage_id: str
    role: Phase
    node: str
    slots: int
    tasks: frozenset[str]
    lease: Lease
    leaving: bool = False
    claims: set[SlotClaim] = field(default_factory=set)
    stopped_at: dict[SlotClaim, float] = field(default_factory=dict)
    """When it was asked to stop claims that it should not have."""
    counted_slots: int = 0
    """Working slots as counted by the pool."""
    changed: int = 0
    """Number of its last change."""
    marks: tuple[set[str], ...] = ()
    """Per requirement that it meets: the processes that have changed."""

    @property
    def working_slots(self) -> int:
        """Slots, busy or free, that jobs may get."""
        return 0 if self.leaving or self.lease.quiet else self.slots

    @property
    def credit(self) -> int:
        """Free slots; never negative."""
        free = self.slots - len(self.claims)
        return 0 if free < 0 or self.leaving or self.lease.quiet else free

    @cached_property
    def requirements(self) -> KeysView[Requirement]:
        """The requirements that this process meets, in order."""
        all_of_them = (Requirement(self.role, task, node) for task in self.tasks for node in (None, self.node))
        return dict.fromkeys(all_of_them).keys()


@dataclass
class _Node:
    """Slots and waiting jobs of one node, by task."""

    stages: dict[str, StageProcess] = field(default_factory=dict)
    slots: Counter[str] = field(default_factory=Counter)
    """Working slots of RUN and EVAL processes."""
    waiting: Counter[str] = field(default_factory=Counter)
    """Jobs with a sandbox here that wait for RUN or EVAL."""

    def is_full(self, task: str) -> bool:
        """Return whether as many jobs of a task wait here as there are slots, at least one."""
        return self.waiting.get(task, 0) >= max(1, self.slots.get(task, 0))


class _Offers:
    """The processes that meet a requirement and have credit.

    A change only marks a process; the next look-up of a requirement re-ranks its marked processes.
    """

    def __init__(self) -> None:
        self.free: LeastLoaded[str] = LeastLoaded()
        self.marked: set[str] = set()

    def withdraw(self, stage_id: str) -> None:
        self.free.discard(stage_id)
        self.marked.discard(stage_id)


class StagePool:
    def __init__(self, lease_s: float, quiet_s: float) -> None:
        self.lease_s = lease_s
        self._quiet_s = quiet_s
        self._stages: dict[str, StageProcess] = {}
        self._leases: dict[str, Lease] = {}
        self._quiet: set[str] = set()
        self._deadlines: Deadlines[str] = Deadlines()
        """When a member becomes quiet, or its lease expires."""
        self._offers: defaultdict[Requirement, _Offers] = defaultdict(_Offers)
        self._changes = 0
        """Number of changes of processes."""
        self._serving: Counter[Requirement] = Counter()
        self._slots: Counter[Requirement] = Counter()
        """Working slots, busy or free, by requirement."""
        self._role_slots: Counter[Phase] = Counter()
        self._nodes: defaultdict[str, _Node] = defaultdict(_Node)
        self._expected: dict[str, set[SlotClaim]] = {}
        """Processes that held jobs when the broker restarted, until they report."""
        self._gone: list[str] = []
        self._unserved: dict[Requirement, bool] = {}
        """Requirements that lost their last process since the last `take_unserved`."""
        self.losses = NodeLosses()

    def __contains__(self, stage_id: str) -> bool:
        return stage_id in self._stages

    def __iter__(self) -> Iterator[StageProcess]:
        return iter(self._stages.values())

    def get(self, stage_id: str) -> StageProcess | None:
        return self._stages.get(stage_id)

    def expect(self, stage_id: str, claim: SlotClaim) -> None:
        """Take a slot of a process that has not reported to this broker yet."""
        self._expected.setdefault(stage_id, set()).add(claim)

    def is_expected(self, stage_id: str) -> bool:
        """Return whether a process may still report phases that an earlier broker gave it."""
        return stage_id in self._expected

    def expected(self) -> dict[str, set[SlotClaim]]:
        """Return the expected processes and their claims."""
        return self._expected

    def expect_no_more(self, stage_id: str) -> None:
        """Stop expecting a process, whose phases are lost."""
        del self._expected[stage_id]

    @property
    def members(self) -> int:
        """The number of nodes; a stage process without a node counts as one."""
        return len(self._leases)

    def lease(self, member: str) -> Lease | None:
        return self._leases.get(member)

    def heard_at(self, member: str) -> float | None:
        """Return when a member last reported; None if it is unknown."""
        lease = self._leases.get(member)
        return lease.heard_at if lease is not None else None

    def heard(self, report: StageReport, now: float) -> StageProcess:
        """Add or update the process of a report, and renew its lease."""
        lease = self._leases.setdefault(report.from_member, Lease(report.from_member, now))
        stage = self._stages.get(report.stage_id)
        tasks = frozenset(task.name for task in report.tasks)
        if stage is None:
            stage = StageProcess(report.stage_id, report.role, report.node, report.slots, tasks, lease)
            stage.claims = self._expected.pop(report.stage_id, set())
            stage.marks = self._marks_of(stage)
            self._stages[report.stage_id] = lease.stages[report.stage_id] = stage
            self._nodes[stage.node].stages[stage.stage_id] = stage
            self._serving.update(stage.requirements)
            self._count_slots(stage)
            self._offer_node(stage.node)
            self.losses.joined(stage.node)
        elif not report.draining and (stage.leaving or stage.tasks != tasks):
            self._begin_again(stage, report.slots, tasks)
        elif stage.slots != report.slots:
            stage.slots = report.slots
            self._count_slots(stage)
            self._offer_node(stage.node)
        if report.draining:
            self.leave(stage.stage_id)
        self.lives(stage.lease, report.number, now, report.facts)
        return stage

    def _begin_again(self, stage: StageProcess, slots: int, tasks: frozenset[str]) -> None:
        """Restart a node's pool that had no process, or other tasks."""
        self.leave(stage.stage_id)
        self._withdraw(stage)
        stage.leaving, stage.slots, stage.tasks = False, slots, tasks
        del stage.requirements
        stage.marks = self._marks_of(stage)
        self._serving.update(stage.requirements)
        self._count_slots(stage)
        self._offer_node(stage.node)

    def lives(self, lease: Lease, number: int, now: float, facts: NodeFacts | None = None) -> None:
        """Renew a lease and record the machine's facts, if any."""
        was_quiet = lease.quiet
        lease.facts = facts or lease.facts
        lease.heard_at, lease.number = now, number
        lease.disconnected = False
        self._set_quiet(lease, quiet=False)
        if was_quiet or lease.member not in self._deadlines:
            self._deadlines.set(lease.member, now + self._quiet_s)

    def disconnected(self, member: str, now: float) -> float:
        """Record that a member refuses connections; return until when it may report over another one."""
        until = now + self._quiet_s
        lease = self._leases.get(member)
        if lease is not None:
            until = now if lease.quiet else until
            lease.disconnected = True
            lease.heard_at = min(lease.heard_at, until - self.lease_s)
            self._set_quiet(lease, quiet=True)
            self._deadlines.set(member, lease.heard_at + self.lease_s)
        return until

    def quiet(self) -> tuple[str, ...]:
        """Return the quiet members."""
        return tuple(self._quiet)

    def claims_of(self, member: str) -> Iterator[tuple[str, SlotClaim]]:
        lease = self._leases.get(member)
        for stage in lease.stages.values() if lease is not None else ():
            for claim in stage.claims:
                yield stage.stage_id, claim

    def expire(self, now: float) -> list[StageProcess]:
        """Remove and return the processes with expired leases; mark silent members as quiet."""
        removed = []
        for member in self._deadlines.due(now):
            lease = self._leases.get(member)
            if lease is None:
                continue
            if lease.heard_at + self.lease_s <= now:
                for stage in tuple(lease.stages.values()):
                    self.remove(stage.stage_id, in_order=False)
                    removed.append(stage)
            elif lease.heard_at + self._quiet_s <= now:
                self._set_quiet(lease, quiet=True)
                self._deadlines.set(member, lease.heard_at + self.lease_s)
            else:
                self._deadlines.set(member, lease.heard_at + self._quiet_s)
        for stage in removed:
            lease, is_whole = stage.lease, not self.of_node(stage.node)
            self.losses.lost(stage.node, stage.stage_id, lease.facts, now, died=lease.disconnected, is_whole=is_whole)
        return removed

    def restart_leases(self, now: float) -> None:
        """Extend the leases after a pause of this process."""
        for lease in self._leases.values():
            lease.heard_at = max(lease.heard_at, now - self._quiet_s)

    def take_gone(self) -> list[str]:
        """Return the processes that were removed since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def take_unserved(self) -> list[tuple[Requirement, bool]]:
        """Return the requirements that lost their last process since the last call, and whether it left in order."""
        unserved, self._unserved = self._unserved, {}
        return list(unserved.items())

    def _set_quiet(self, lease: Lease, *, quiet: bool) -> None:
        """Mark a member as quiet or not, which changes its working slots."""
        if lease.quiet != quiet:
            lease.quiet = quiet
            (self._quiet.add if quiet else self._quiet.discard)(lease.member)
            for stage in lease.stages.values():
                self._count_slots(stage)
                self._offer_node(stage.node)

    def wait_on(self, node: str, task: str, jobs: int) -> None:
        """Change the number of a task's jobs that wait on a node for RUN or EVAL."""
        place = self._nodes[node]
        was_full = place.is_full(task)
        place.waiting[task] += jobs
        if place.is_full(task) != was_full:
            self._offer_node(node)
        if not place.waiting[task]:
            del place.waiting[task]
        self._forget_if_idle(node)

    def miss(self, requirement: Requirement) -> None:
        """Record a requirement as unserved if its node is shutting down in order."""
        place = self._nodes.get(requirement.node or "")
        if place is not None and any(stage.leaving for stage in place.stages.values()):
            self._unserved[requirement] = True

    def leave(self, stage_id: str, *, in_order: bool = True) -> None:
        """Stop giving jobs to a process that is ending; it keeps its phases."""
        stage = self._stages.get(stage_id)
        if stage is not None and not stage.leaving:
            stage.leaving = True
            self._serving.subtract(stage.requirements)
            self._unserved |= {one: in_order for one in stage.requirements if not self._serving[one]}
            self._count_slots(stage)
            self._offer_node(stage.node)

    def remove(self, stage_id: str, *, in_order: bool = True) -> set[SlotClaim]:
        self.leave(stage_id, in_order=in_order)
        stage = self._stages.pop(stage_id, None)
        if stage is None:
            return self._expected.pop(stage_id, set())
        self._gone.append(stage_id)
        del stage.lease.stages[stage_id]
        if not stage.lease.stages:
            del self._leases[stage.lease.member]
            self._quiet.discard(stage.lease.member)
            self._deadlines.discard(stage.lease.member)
        del self._nodes[stage.node].stages[stage_id]
        self._forget_if_idle(stage.node)
        self._withdraw(stage)
        for requirement in stage.requirements:
            if not self._serving[requirement]:
                del self._serving[requirement], self._slots[requirement]
                self._offers.pop(requirement, None)
        return stage.claims

    def can_serve(self, requirement: Requirement) -> bool:
        """Return whether a live process, busy or free, meets the requirement."""
        return self._serving[requirement] > 0

    def slots(self, requirement: Requirement) -> int:
        """Return the number of working slots, busy or free, that meet a requirement."""
        return self._slots[requirement]

    def role_slots(self, role: Phase) -> int:
        return self._role_slots[role]

    def has_free(self, requirement: Requirement) -> bool:
        """Return whether a process that meets the requirement has credit."""
        free = self._free(requirement)
        return free is not None and free.first() is not None

    def take(self, requirement: Requirement, claim: SlotClaim, avoids: str = "") -> str | None:
        """Take a slot of the least loaded process that meets the requirement and has credit; None if there is none.

        The node `avoids` is skipped while another node serves the requirement: a broken node, which fails fast and so
        looks idle, would attract every retry.
        """
        free = self._free(requirement)
        stage_id = free.first() if free is not None else None
        if (
            avoids
            and free is not None
            and stage_id is not None
            and self._stages[stage_id].node == avoids
            and self._slots[requirement] > self._slots[requirement._replace(node=avoids)]
        ):
            stage_id = free.first_but(lambda key: self._stages[key].node == avoids)
        if stage_id is not None:
            stage = self._stages[stage_id]
            stage.claims.add(claim)
            self._offer(stage)
        return stage_id

    def holds(self, stage_id: str, claim: SlotClaim) -> bool:
        """Return whether a claim still takes a slot of a live process."""
        stage = self._stages.get(stage_id)
        return stage is not None and claim in stage.claims

    def give_back(self, stage_id: str, claim: SlotClaim) -> StageProcess | None:
        """Free the slot of a claim; return the process if that freed a credit."""
        stage = self._stages.get(stage_id)
        if stage is None:
            self._expected.get(stage_id, set()).discard(claim)
        if stage is None or claim not in stage.claims:
            return None
        stage.claims.discard(claim)
        self._offer(stage)
        return stage

    def status(self) -> tuple[StageStatus, ...]:
        return tuple(
            StageStatus(stage.stage_id, stage.role, stage.node, stage.slots, len(stage.claims)) for stage in self
        )

    def tasks(self) -> frozenset[str]:
        return frozenset(task for stage in self if not stage.leaving for task in stage.tasks)

    def nodes(self) -> Iterator[str]:
        """Return the names of the nodes with stage processes."""
        return (name for name, node in self._nodes.items() if node.stages)

    def of_node(self, node: str) -> list[StageProcess]:
        return list(self._nodes[node].stages.values()) if node in self._nodes else []

    def on_node(self, node: str) -> str | None:
        """Return a live process of a node, or None."""
        return next((stage.stage_id for stage in self.of_node(node) if not stage.leaving), None)

    def _count_slots(self, stage: StageProcess) -> None:
        more = stage.working_slots - stage.counted_slots
        stage.counted_slots += more
        self._role_slots[stage.role] += more
        for requirement in stage.requirements:
            self._slots[requirement] += more

    def _offer_node(self, node: str) -> None:
        place = self._nodes[node]
        place.slots = Counter()
        for stage in place.stages.values():
            if stage.role in (Phase.RUN, Phase.EVAL):
                place.slots.update(dict.fromkeys(stage.tasks, stage.working_slots))
        for stage in place.stages.values():
            self._offer(stage)

    def _forget_if_idle(self, node: str) -> None:
        if not self._nodes[node].stages and not self._nodes[node].waiting:
            del self._nodes[node]

    def _offer(self, stage: StageProcess) -> None:
        """Mark a process as changed."""
        self._changes += 1
        stage.changed = self._changes
        for marked in stage.marks:
            marked.add(stage.stage_id)

    def _free(self, requirement: Requirement) -> LeastLoaded[str] | None:
        """Return the processes that meet a requirement and have credit, or None if none meets it."""
        offers = self._offers.get(requirement)
        if offers is None:
            return None
        if not offers.marked:
            return offers.free
        marked = [self._stages[stage_id] for stage_id in offers.marked]
        offers.marked.clear()
        for stage in marked if len(marked) == 1 else sorted(marked, key=attrgetter("changed")):
            is_full = requirement.role == Phase.INIT and self._nodes[stage.node].is_full(requirement.task)
            if stage.credit > 0 and not is_full:
                offers.free.set(stage.stage_id, len(stage.claims) / stage.slots)
            else:
                offers.free.discard(stage.stage_id)
        return offers.free

    def _marks_of(self, stage: StageProcess) -> tuple[set[str], ...]:
        return tuple(self._offers[requirement].marked for requirement in stage.requirements)

    def _withdraw(self, stage: StageProcess) -> None:
        for requirement in stage.requirements:
            if requirement in self._offers:
                self._offers[requirement].withdraw(stage.stage_id)
