"""The heap against a list that is searched from end to end: what is assigned, and what always holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from support.machines import few_and_many

from prorl_zmq.brokers.backends.backend_heap import Affinity, BackendHeap
from prorl_zmq.errors import DuplicateBackend, UnknownBackend
from prorl_zmq.wire.messages.backends import Assign, Backend, HeldAssignment

if TYPE_CHECKING:
    from hypothesis import settings

JOBS = st.sampled_from([*(f"job-{number}" for number in range(6)), "job-0/user", "job-1/user", "job-2/user"])
"""Holders: some jobs hold a backend of each of two models."""
MODELS = ["policy", "policy", "user"]
NAMES = ["w", "x", "y", "z"]
BACKENDS = st.sampled_from(NAMES)
NODES = st.sampled_from(["n1", "n2"])
GROUPS = st.sampled_from(["", "g", "h"])
OWNERS = st.sampled_from(["run-1", "run-2"])
ATTEMPTS = st.integers(1, 3)
VERSIONS = st.integers(0, 3)


@dataclass
class ModelBackend:
    backend: Backend
    changed: int
    draining: bool = False
    version: int = 0
    needed: int = 0
    updating: bool = False
    probation: bool = False
    room: int | None = None
    jobs: set[str] = field(default_factory=set)

    @property
    def state(self) -> str:
        if self.draining or self.updating:
            return "draining" if self.draining else "updating"
        return "behind" if self.needed else "probation" if self.probation else "ready"

    @property
    def is_closed(self) -> bool:
        return self.room is not None and len(self.jobs) >= self.room

    @property
    def has_room(self) -> bool:
        return len(self.jobs) < self.backend.max_in_flight and not self.is_closed

    @property
    def rank(self) -> tuple[bool, bool, float, int]:
        return (self.is_closed, not self.has_room, len(self.jobs) / self.backend.weight, self.changed)


def model_of(holder: str) -> str:
    return holder.partition("/")[2] or "policy"


class HeapMachine(RuleBasedStateMachine):
    """The rules of `backend_heap` without a heap."""

    @initialize(affinity=st.sampled_from(["job", "group"]))
    def start(self, affinity: Affinity) -> None:
        self.heap = BackendHeap(affinity)
        self.by_group = affinity == "group"
        self.backends: dict[str, ModelBackend] = {}
        self.assigned: dict[str, tuple[str, int, str]] = {}
        self.served: dict[str, int] = {}
        self.trials: set[str] = set()
        self.offers: dict[str, None] = {}
        self.groups: dict[tuple[str, str], list[str]] = {}
        self.clock = 0
        self.requests = 0
        self.wanted: dict[str, int] = dict.fromkeys(MODELS, 0)
        self.begun: dict[str, int | None] = dict.fromkeys(MODELS)

    def touch(self, name: str) -> None:
        self.clock += 1
        self.backends[name].changed = self.clock

    def drop(self, job_id: str) -> None:
        name, _, _ = self.assigned.pop(job_id)
        del self.served[job_id]
        self.trials.discard(job_id)
        self.backends[name].jobs.discard(job_id)
        self.touch(name)

    @rule(
        name=BACKENDS,
        endpoint=st.sampled_from(["ipc://1", "ipc://2"]),
        version=VERSIONS,
        needed=VERSIONS,
        weight=st.sampled_from([0.5, 1.0, 2.0, 3.0]),
        limit=st.integers(1, 4),
        node=NODES,
        model=st.sampled_from(MODELS),
        frozen=st.booleans(),
    )
    def add(
        self,
        name: str,
        endpoint: str,
        version: int,
        needed: int,
        weight: float,
        limit: int,
        node: str,
        model: str = "policy",
        frozen: bool = False,
    ) -> None:
        backend = Backend(
            backend_id=name,
            endpoint=endpoint,
            weight_version=version,
            weight=weight,
            max_in_flight=limit,
            node=node,
            name=model,
            frozen=frozen,
        )
        known = self.backends.get(name)
        if known is not None and known.backend.endpoint != endpoint:
            with pytest.raises(DuplicateBackend):
                self.heap.add(backend, needed)
            return
        self.heap.add(backend, needed)
        if known is not None and known.backend.name != model:
            for job_id in tuple(known.jobs):
                self.drop(job_id)
        member = self.backends.setdefault(name, ModelBackend(backend, 0))
        member.backend = backend
        member.draining = member.probation = False
        self.offers.pop(name, None)
        member.version, member.needed = version, needed
        self.weigh(name)
        self.touch(name)

    @rule(name=BACKENDS)
    def add_plain(self, name: str) -> None:
        known = self.backends.get(name)
        self.add(name, known.backend.endpoint if known is not None else "ipc://1", 0, 0, 1.0, 2, "n1")

    def weigh(self, name: str) -> None:
        member = self.backends[name]
        if member.backend.frozen:
            member.updating, member.needed = False, 0
            return
        begun, wanted = self.begun[member.backend.name], self.wanted[member.backend.name]
        member.updating = begun not in (None, member.version)
        enough = member.version == begun or member.version >= max(member.needed, wanted)
        member.needed = 0 if enough else max(member.needed, wanted)

    def trained(self, model: str) -> list[str]:
        return [
            name for name, member in self.backends.items() if not member.backend.frozen and member.backend.name == model
        ]

    @rule(name=st.none() | BACKENDS, version=VERSIONS, as_wanted=st.booleans(), model=st.sampled_from(MODELS))
    def set_weight_version(self, name: str | None, version: int, as_wanted: bool, model: str) -> None:
        if name is not None and name not in self.backends:
            with pytest.raises(UnknownBackend):
                self.heap.set_weight_version(version, name, as_wanted=as_wanted)
            return
        self.heap.set_weight_version(version, name, as_wanted=as_wanted, model=model)
        if as_wanted and name is None:
            self.wanted[model] = version
        for one in self.trained(model) if name is None else [name]:
            member = self.backends[one]
            state, member.version = member.state, version
            member.needed = 0 if as_wanted else member.needed
            self.weigh(one)
            if member.state != state:
                self.touch(one)

    @rule(version=VERSIONS, model=st.sampled_from(MODELS))
    def begin_update(self, version: int, model: str) -> None:
        self.heap.begin_update(version, model)
        self.begun[model] = version
        for name in self.trained(model):
            self.weigh(name)
            self.touch(name)

    @rule(version=VERSIONS, model=st.sampled_from(MODELS))
    def end_update(self, version: int, model: str) -> None:
        trained = [self.backends[name] for name in self.trained(model)]
        assert self.heap.serves(version, model) == any(member.version == version for member in trained)
        self.heap.end_update(version, model)
        self.begun[model], self.wanted[model] = None, version
        for name in self.trained(model):
            member = self.backends[name]
            member.needed, member.updating = version if member.version != version else 0, False
            self.touch(name)

    @rule(model=st.sampled_from(MODELS))
    def give_up_update(self, model: str) -> None:
        self.heap.give_up_update("the trainer died", model)
        self.begun[model] = None
        for name in self.trained(model):
            self.weigh(name)
            self.touch(name)

    @rule(name=BACKENDS, change=st.sampled_from(["drain", "suspend", "offer", "restore", "remove"]))
    def change(self, name: str, change: str) -> None:
        said = ["it coughs"] if change == "suspend" else []
        if name not in self.backends:
            with pytest.raises(UnknownBackend):
                getattr(self.heap, change)(name, *said)
            return
        getattr(self.heap, change)(name, *said)
        member = self.backends[name]
        if change == "drain":
            member.draining = True
        elif change == "suspend":
            member.probation = True
        elif change == "offer" and member.probation:
            self.offers[name] = None
        elif change == "restore" and member.probation:
            member.probation = False
            self.offers.pop(name, None)
            self.touch(name)
        elif change == "remove":
            self.offers.pop(name, None)
            for job_id in tuple(member.jobs):
                self.drop(job_id)
            del self.backends[name]

    @rule(name=BACKENDS, room=st.none() | st.integers(0, 3))
    def set_room(self, name: str, room: int | None) -> None:
        if name not in self.backends:
            with pytest.raises(UnknownBackend):
                self.heap.set_room(name, room)
            return
        self.heap.set_room(name, room)
        member = self.backends[name]
        was_closed, member.room = member.is_closed, room
        if member.is_closed != was_closed:
            self.touch(name)

    @rule(job_id=JOBS, attempt=ATTEMPTS, owner=OWNERS, group=GROUPS, node=NODES, again=st.booleans())
    def assign(self, job_id: str, attempt: int, owner: str, group: str, node: str, again: bool) -> None:
        self.ask(job_id, attempt, owner, group, node, "", again)

    @rule(job_id=JOBS, attempt=ATTEMPTS, served=st.integers(0, 3))
    def note_served(self, job_id: str, attempt: int, served: int) -> None:
        held = self.assigned.get(job_id)
        known = held is not None and held[1] == attempt and self.served[job_id] < served
        expected = (held[0], job_id in self.trials) if known and held is not None else None
        assert self.heap.note_served(job_id, attempt, served) == expected
        if known:
            self.served[job_id] = served

    @rule(job_id=JOBS, attempt=ATTEMPTS, owner=OWNERS, name=BACKENDS, served=st.integers(0, 3))
    def adopt(self, job_id: str, attempt: int, owner: str, name: str, served: int) -> None:
        self.heap.adopt(owner, job_id, HeldAssignment(attempt, name, served))
        known = self.backends.get(name)
        if job_id not in self.assigned and known is not None and known.backend.name == model_of(job_id):
            self.hold(job_id, name, attempt, owner)
            self.served[job_id] = served

    @rule(job_id=JOBS, attempt=ATTEMPTS, group=GROUPS, node=NODES, again=st.booleans(), name=st.none() | BACKENDS)
    def cannot_go_on(self, job_id: str, attempt: int, group: str, node: str, again: bool, name: str | None) -> None:
        held = self.assigned.get(job_id)
        leaving = name if name is not None else held[0] if held is not None else ""
        owner = held[2] if held is not None else "run-1"
        if held is not None and name is None:
            attempt = held[1]
        self.ask(job_id, attempt, owner, group, node, leaving, again)

    def ask(self, job_id: str, attempt: int, owner: str, group: str, node: str, leaving: str, again: bool) -> None:
        self.requests += 1
        request = Assign(
            f"request-{self.requests}",
            owner=owner,
            job_id=job_id.partition("/")[0],
            model=model_of(job_id),
            attempt=attempt,
            wait_s=1.0,
            group_id=group,
            node=node,
            leaving=leaving,
        )
        held = self.assigned.get(job_id)
        given = self.heap.assign(request)
        name = given.backend_id if given is not None else None
        self.check(request, held, name)
        if again and name is not None:
            before = self.heap.status()
            assert self.heap.assign(request) == given, "a repeat gets the same answer"
            assert self.heap.status() == before

    def check(self, request: Assign, held: tuple[str, int, str] | None, given: str | None) -> None:
        if held is not None and (
            held[1] > request.attempt or (held[1] == request.attempt and request.leaving != held[0])
        ):
            assert given == held[0], "a job keeps its backend, and an older attempt changes nothing"
            return
        if held is not None:
            self.drop(request.holder)
        stays = held is not None and held[0] != request.leaving and self.backends[held[0]].state == "ready"
        if stays:
            assert held is not None
            expected: str | None = held[0]
        else:
            expected = self.best(request)
            left = self.backends.get(request.leaving)
            if left is not None and left.backend.name == request.model:
                self.touch(request.leaving)
            self.check_bounds(request, given)
        assert given == expected
        if given is not None:
            assert self.backends[given].backend.name == request.model, "of another model"
            self.hold(request.holder, given, request.attempt, request.owner)
            self.offers.pop(given, None)
            if self.backends[given].probation:
                self.trials.add(request.holder)
            if request.group_id and self.by_group:
                known = self.groups.setdefault((request.group_id, request.model), [])
                known += [given] if given not in known else []

    def hold(self, job_id: str, name: str, attempt: int, owner: str) -> None:
        self.assigned[job_id] = (name, attempt, owner)
        self.served[job_id] = 0
        self.backends[name].jobs.add(job_id)
        self.touch(name)

    def best(self, request: Assign) -> str | None:
        of_model = {one: member for one, member in self.backends.items() if member.backend.name == request.model}
        offered = [
            one
            for one in self.offers
            if one != request.leaving and one in of_model and of_model[one].state == "probation"
        ]
        if request.leaving not in of_model:
            return offered[0] if offered else self.best_ready(request)
        left = request.leaving if self.backends[request.leaving].state == "ready" else None
        return self.best_ready(request) or (offered[0] if offered else left)

    def best_ready(self, request: Assign) -> str | None:
        others = {
            name: member
            for name, member in self.backends.items()
            if member.state == "ready" and name != request.leaving and member.backend.name == request.model
        }
        if self.by_group and (request.group_id, request.model) in self.groups:
            group = self.groups[request.group_id, request.model]
            for name in tuple(group):
                known = self.backends.get(name)
                if known is not None and known.state == "updating" and known.backend.name == request.model:
                    continue
                if name not in others:
                    group.remove(name)
                elif others[name].has_room:
                    return name
        least = min(others, key=lambda name: others[name].rank, default=None)
        if least is None or (others[least].is_closed and not self.has_begun(request)):
            return None
        near = [name for name, member in others.items() if member.backend.node == request.node and member.has_room]
        nearest = min(near, key=lambda name: others[name].rank, default=None)
        if nearest is not None:
            member = others[nearest]
            least_load = len(others[least].jobs) / others[least].backend.weight
            if (len(member.jobs) - 1) / member.backend.weight <= least_load:
                return nearest
        return least

    def has_begun(self, request: Assign) -> bool:
        return any(one.partition("/")[0] == request.job_id for one in self.assigned if one != request.holder)

    def check_bounds(self, request: Assign, given: str | None) -> None:
        """What is promised of an assignment, said without the rules that bring it about."""
        if given is None:
            return
        chosen = self.backends[given]
        if chosen.backend.frozen:
            assert chosen.state in ("ready", "probation"), "no update concerns it"
        elif self.begun[request.model] is not None:
            assert chosen.version == self.begun[request.model], "weights are on their way, and it does not have them"
        else:
            assert chosen.version >= self.wanted[request.model], "it is behind"
        assert chosen.state == "ready" or given in self.offers, "one on probation is given only where it was offered"
        if chosen.state == "probation":
            return
        if request.leaving != given and not self.has_begun(request):
            assert not chosen.is_closed, "no new rollout for an engine without room"
        ready = [
            one
            for one in self.backends.values()
            if one.state == "ready"
            and one.has_room
            and one.backend.backend_id != request.leaving
            and one.backend.name == request.model
        ]
        if ready:
            assert chosen in ready, "a full one is given only where there is no other"
        if ready and not (self.by_group and request.group_id):
            least = min(len(one.jobs) / one.backend.weight for one in ready)
            spared = (len(chosen.jobs) - 1) / chosen.backend.weight
            assert spared <= least, "being near costs at most one assignment"
        if request.leaving == given:
            others = [one for one in self.backends.values() if one.backend.name == request.model and one is not chosen]
            assert all(one.state != "ready" or one.is_closed for one in others)

    @rule(job_id=JOBS, attempt=ATTEMPTS)
    def release(self, job_id: str, attempt: int) -> None:
        held = self.assigned.get(job_id)
        expected = held is not None and held[1] <= attempt
        assert self.heap.release(job_id, attempt) == expected
        if expected:
            self.drop(job_id)

    @rule(owner=OWNERS, jobs=st.dictionaries(JOBS, ATTEMPTS))
    def keep_only(self, owner: str, jobs: dict[str, int]) -> None:
        self.heap.keep_only(owner, {job_id: HeldAssignment(attempt) for job_id, attempt in jobs.items()})
        self.drop_all(owner, jobs)

    @rule(owner=OWNERS)
    def drop_owner(self, owner: str) -> None:
        self.heap.drop_owner(owner)
        self.drop_all(owner, {})
        assert owner not in self.heap.owners()

    def drop_all(self, owner: str, but: dict[str, int]) -> None:
        dropped = [job for job, (_, attempt, who) in self.assigned.items() if who == owner and but.get(job) != attempt]
        # The order in which one call releases several jobs is not promised; it decides ties between backends.
        for job_id in dropped:
            self.drop(job_id)
        rankings = self.heap._rankings.values()
        order = {name: sequence for ranking in rankings for name, (_, _, sequence, _) in ranking._all._entries.items()}
        for name in sorted(order, key=order.__getitem__):
            self.touch(name)

    @invariant()
    def counts_and_states_agree(self) -> None:
        listed = {status.backend.backend_id: status for status in self.heap.status()}
        assert listed.keys() == self.backends.keys()
        assert {name: (one.in_flight, one.state) for name, one in listed.items()} == {
            name: (len(member.jobs), member.state) for name, member in self.backends.items()
        }
        assert sum(one.in_flight for one in listed.values()) == len(self.assigned)
        known = {name: self.heap.member(name).known_version for name in self.backends}
        assert known == {name: max(member.version, member.needed) for name, member in self.backends.items()}
        assert set(self.heap.owners()) == {owner for _, _, owner in self.assigned.values()}
        for job_id in ("job-0", "job-1", "job-2"):
            held = {one for one in self.assigned if one.partition("/")[0] == job_id}
            assert {one for one in self.heap.holders(job_id) if self.heap.holds(one)} == held


@few_and_many(10)
def test_backend_heap(runs: settings) -> None:
    run_state_machine_as_test(HeapMachine, settings=runs)
