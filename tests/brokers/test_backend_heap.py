from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prorl_zmq.brokers.backend_heap import BackendHeap
from prorl_zmq.errors import DuplicateBackend, UnknownBackend
from prorl_zmq.messages import Backend

JOBS = st.sampled_from([f"job-{number}" for number in range(6)])
BACKENDS = st.sampled_from(["x", "y", "z"])
OWNERS = st.sampled_from(["run-1", "run-2"])
ATTEMPTS = st.integers(1, 3)


VERSIONS = st.integers(0, 3)


def backend(name: str, endpoint: str = "", version: int = 0) -> Backend:
    return Backend(backend_id=name, endpoint=endpoint or f"ipc://{name}", weight_version=version)


def heap_of(*names: str) -> BackendHeap:
    heap = BackendHeap()
    for name in names:
        heap.add(backend(name))
    return heap


def assign(heap: BackendHeap, job_id: str, attempt: int = 1, owner: str = "run-1") -> str | None:
    given = heap.assign(job_id, attempt, owner)
    return given.backend_id if given is not None else None


def in_flight(heap: BackendHeap) -> dict[str, int]:
    return {status.backend.backend_id: status.in_flight for status in heap.status()}


def test_no_backend_no_assignment() -> None:
    assert assign(BackendHeap(), "a") is None


def test_the_least_loaded_is_chosen_and_ties_go_to_the_longest_idle() -> None:
    heap = heap_of("x", "y")
    assert [assign(heap, job) for job in "abc"] == ["x", "y", "x"]
    heap.release("a", 1)
    heap.release("b", 1)
    # x: 1 in flight; y: none.
    assert [assign(heap, job) for job in "de"] == ["y", "x"]


def test_weight_is_assignments_in_flight_and_not_those_ever_made() -> None:
    heap = heap_of("x", "y")
    for job in "abcd":
        assign(heap, job)
    for job in "ac":  # both on x, which has served as many jobs as y
        heap.release(job, 1)
    assert [assign(heap, job) for job in "ef"] == ["x", "x"]
    assert [status.assigned for status in heap.status()] == [4, 2]


def test_a_job_keeps_its_backend() -> None:
    heap = heap_of("x", "y")
    assert assign(heap, "a") == "x"
    assert assign(heap, "a") == "x"
    assert assign(heap, "a", attempt=2, owner="run-2") == "x"
    assert in_flight(heap) == {"x": 1, "y": 0}


def test_a_draining_backend_keeps_its_jobs_and_gets_no_more() -> None:
    heap = heap_of("x", "y")
    assign(heap, "a")
    heap.drain("x")
    assert assign(heap, "a") == "x"
    assert assign(heap, "b") == "y"
    assert assign(heap, "c") == "y"
    assert assign(heap, "a", attempt=2) == "y"
    heap.drain("y")
    assert assign(heap, "d") is None
    heap.add(backend("x"))
    assert assign(heap, "d") == "x"


def test_an_older_attempt_changes_nothing() -> None:
    heap = heap_of("x", "y")
    assign(heap, "a", attempt=2)
    before = heap.status()
    assert assign(heap, "a", attempt=1, owner="run-2") == "x"
    assert not heap.release("a", 1)
    assert heap.status() == before


def test_removing_a_backend_frees_its_jobs_for_others() -> None:
    heap = heap_of("x", "y")
    assign(heap, "a")
    heap.remove("x")
    assert assign(heap, "a") == "y"
    heap.clear()
    assert heap.status() == ()
    assert assign(heap, "a") is None


def test_a_silent_owner_loses_all_and_a_live_one_what_it_does_not_name() -> None:
    heap = heap_of("x")
    for job in "abc":
        assign(heap, job, owner="run-1")
    assign(heap, "d", owner="run-2")
    heap.keep_only("run-1", {"a": 1, "b": 2})  # b: of another attempt
    assert in_flight(heap) == {"x": 2}
    heap.drop_owner("run-1")
    heap.drop_owner("run-1")
    assert in_flight(heap) == {"x": 1}
    assert list(heap.owners()) == ["run-2"]


def test_ids_are_checked() -> None:
    heap = heap_of("x")
    with pytest.raises(DuplicateBackend) as duplicate:
        heap.add(backend("x", "ipc://elsewhere"))
    assert duplicate.value.backend == "x"
    for change in (heap.drain, heap.remove, lambda name: heap.set_weight_version(1, name)):
        with pytest.raises(UnknownBackend):
            change("unknown")
    assert "x" in heap
    assert "unknown" not in heap


def test_weight_versions_are_noted_of_one_or_all() -> None:
    heap = heap_of("x", "y")
    heap.set_weight_version(1)
    heap.set_weight_version(2, "y")
    assert [status.backend.weight_version for status in heap.status()] == [1, 2]
    given = heap.assign("a", 1, "run-1")
    assert given is not None
    assert given.weight_version == 1


def test_a_backend_with_older_weights_than_needed_gets_jobs_once_it_has_caught_up() -> None:
    heap = heap_of("x")
    assign(heap, "a")
    heap.add(backend("x", version=1), needed_version=3)
    assert heap.known_version("x") == 3
    assert assign(heap, "a") == "x", "what holds it keeps it"
    assert assign(heap, "b") is None
    heap.set_weight_version(2)
    assert [status.state for status in heap.status()] == ["draining"]
    heap.set_weight_version(3, "x")
    assert assign(heap, "b") == "x"
    heap.set_weight_version(1, "x")
    assert [status.state for status in heap.status()] == ["ready"], "a trainer may go back"
    assert heap.known_version("x") == 1


def test_a_backend_that_has_caught_up_still_drains_if_it_was_asked_to() -> None:
    heap = heap_of()
    heap.add(backend("x"), needed_version=1)
    heap.drain("x")
    heap.set_weight_version(1)
    assert assign(heap, "a") is None


@dataclass
class ModelBackend:
    endpoint: str
    changed: int
    draining: bool = False
    version: int = 0
    needed: int = 0
    jobs: set[str] = field(default_factory=set)

    @property
    def takes_jobs(self) -> bool:
        return not self.draining and self.needed == 0


class HeapMachine(RuleBasedStateMachine):
    """The heap against a list that is searched from end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.heap = BackendHeap()
        self.backends: dict[str, ModelBackend] = {}
        self.assigned: dict[str, tuple[str, int, str]] = {}
        self.clock = 0

    def touch(self, name: str) -> None:
        self.clock += 1
        self.backends[name].changed = self.clock

    def drop(self, job_id: str) -> None:
        name, _, _ = self.assigned.pop(job_id)
        self.backends[name].jobs.discard(job_id)
        self.touch(name)

    @rule(name=BACKENDS, endpoint=st.sampled_from(["ipc://1", "ipc://2"]), version=VERSIONS, needed=VERSIONS)
    def add(self, name: str, endpoint: str, version: int, needed: int) -> None:
        known = self.backends.get(name)
        if known is not None and known.endpoint != endpoint:
            with pytest.raises(DuplicateBackend):
                self.heap.add(backend(name, endpoint, version), needed)
            return
        self.heap.add(backend(name, endpoint, version), needed)
        member = self.backends.setdefault(name, ModelBackend(endpoint, 0))
        member.draining = False
        member.version, member.needed = version, needed if version < needed else 0
        self.touch(name)

    @rule(name=st.none() | BACKENDS, version=VERSIONS)
    def set_weight_version(self, name: str | None, version: int) -> None:
        if name is not None and name not in self.backends:
            with pytest.raises(UnknownBackend):
                self.heap.set_weight_version(version, name)
            return
        self.heap.set_weight_version(version, name)
        for one in self.backends if name is None else [name]:
            member = self.backends[one]
            member.version = version
            if 0 < member.needed <= version:
                member.needed = 0
                self.touch(one)

    @rule(name=BACKENDS)
    def drain(self, name: str) -> None:
        if name not in self.backends:
            with pytest.raises(UnknownBackend):
                self.heap.drain(name)
            return
        self.heap.drain(name)
        self.backends[name].draining = True

    @rule(name=BACKENDS)
    def remove(self, name: str) -> None:
        if name not in self.backends:
            with pytest.raises(UnknownBackend):
                self.heap.remove(name)
            return
        self.heap.remove(name)
        for job_id in tuple(self.backends[name].jobs):
            self.drop(job_id)
        del self.backends[name]

    @rule(job_id=JOBS, attempt=ATTEMPTS, owner=OWNERS)
    def assign(self, job_id: str, attempt: int, owner: str) -> None:
        held = self.assigned.get(job_id)
        given = assign(self.heap, job_id, attempt, owner)
        if held is not None and held[1] >= attempt:
            assert given == held[0]
            return
        if held is not None:
            self.drop(job_id)
        ready = [name for name, member in self.backends.items() if member.takes_jobs]
        if held is not None and held[0] in ready:
            expected: str | None = held[0]
        else:
            expected = min(
                ready, key=lambda name: (len(self.backends[name].jobs), self.backends[name].changed), default=None
            )
        assert given == expected
        if given is not None:
            self.assigned[job_id] = (given, attempt, owner)
            self.backends[given].jobs.add(job_id)
            self.touch(given)

    @rule(job_id=JOBS, attempt=ATTEMPTS)
    def release(self, job_id: str, attempt: int) -> None:
        held = self.assigned.get(job_id)
        expected = held is not None and held[1] <= attempt
        assert self.heap.release(job_id, attempt) == expected
        if expected:
            self.drop(job_id)

    @rule(owner=OWNERS, jobs=st.dictionaries(JOBS, ATTEMPTS))
    def keep_only(self, owner: str, jobs: dict[str, int]) -> None:
        self.heap.keep_only(owner, jobs)
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
        order = {name: sequence for name, (_, sequence) in self.heap._ready._entries.items()}
        for name in sorted(order, key=order.__getitem__):
            self.touch(name)

    @invariant()
    def weight_is_assignments_in_flight(self) -> None:
        assert in_flight(self.heap) == {name: len(member.jobs) for name, member in self.backends.items()}
        assert sum(in_flight(self.heap).values()) == len(self.assigned)
        assert set(self.heap.owners()) == {owner for _, _, owner in self.assigned.values()}
        states = {status.backend.backend_id: status.state == "ready" for status in self.heap.status()}
        assert states == {name: member.takes_jobs for name, member in self.backends.items()}
        known = {name: self.heap.known_version(name) for name in self.backends}
        assert known == {name: max(member.version, member.needed) for name, member in self.backends.items()}


TestBackendHeap = HeapMachine.TestCase
