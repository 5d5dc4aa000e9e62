"""Shares of slots: no flow that waits is below its share for longer than one job takes, whatever the others submit."""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.brokers.rollout.actions import Action, Start
from prorl_zmq.brokers.rollout.fair_queue import Entry, FairQueue, Flow, Shares, setting_of
from prorl_zmq.brokers.rollout.job_counts import JobCounts
from prorl_zmq.brokers.rollout.job_table import JobTable
from prorl_zmq.brokers.rollout.stage_pool import Requirement
from prorl_zmq.wire.messages.jobs import Job, Phase
from prorl_zmq.wire.messages.stages import PhaseDone, StageReport, Task

RUN = Requirement(Phase.RUN, "t", None)
LONGEST = 20


class Arrival(NamedTuple):
    at: int
    flow: str
    length: int


def arrivals() -> st.SearchStrategy[list[Arrival]]:
    one = st.builds(Arrival, st.integers(0, 60), st.sampled_from("abcd"), st.integers(1, LONGEST))
    bulk = st.builds(
        lambda jobs, at, flow, length: [Arrival(at, flow, length)] * jobs,
        st.integers(1, 60),
        st.integers(0, 40),
        st.sampled_from("abcd"),
        st.integers(1, LONGEST),
    )
    return st.lists(one.map(lambda arrival: [arrival]) | bulk, min_size=1, max_size=12).map(
        lambda parts: sorted(arrival for part in parts for arrival in part)
    )


class Slots:
    """Slots that flows share, in simulated time."""

    def __init__(self, slots: int, weights: dict[str, float]) -> None:
        self.slots = slots
        shares = Shares()
        self.flows = {name: Flow(name, shares, weight) for name, weight in weights.items()}
        self.queue = FairQueue(RUN)
        self.waiting: Counter[str] = Counter()
        self.order: list[int] = []
        self._busy: list[tuple[int, int, str]] = []
        self._lengths: dict[int, int] = {}

    def used(self, name: str) -> int:
        return self.flows[name].used[Phase.RUN]

    def arrive(self, number: int, arrival: Arrival) -> None:
        self._lengths[number] = arrival.length
        self.waiting[arrival.flow] += 1
        self.queue.push(self.flows[arrival.flow], Entry(number, str(number), 1))

    def advance(self, now: int) -> None:
        """End what is over, one job after the other, and give each slot on at once."""
        while self._busy and self._busy[0][0] <= now:
            _, _, name = heapq.heappop(self._busy)
            self.flows[name].moved(Phase.RUN, -1, held=True)
            self._start(now)
        while len(self._busy) < self.slots and self._start(now):
            pass

    def _start(self, now: int) -> bool:
        first = self.queue.first()
        if first is None:
            return False
        flow, entry = first
        assert self.queue.pop(flow) == entry
        flow.moved(Phase.RUN, 1, held=True)
        self.waiting[flow.name] -= 1
        self.order.append(entry.sequence)
        heapq.heappush(self._busy, (now + self._lengths[entry.sequence], entry.sequence, flow.name))
        return True


@given(
    arrivals(), st.integers(1, 16), st.fixed_dictionaries(dict.fromkeys("abcd", st.sampled_from([0.5, 1.0, 2.0, 3.0])))
)
def test_no_flow_waits_below_its_share_for_longer_than_a_job(
    jobs: list[Arrival], slots: int, weights: dict[str, float]
) -> None:
    model = Slots(slots, weights)
    shares = {name: int(slots * weight / sum(weights.values()) + 1e-9) for name, weight in weights.items()}
    below_since: dict[str, int] = {}
    flow_of = dict(enumerate(job.flow for job in jobs))
    left = list(enumerate(jobs))
    now = 0
    while left or sum(model.waiting.values()):
        while left and left[0][1].at <= now:
            model.arrive(*left.pop(0))
        model.advance(now)
        assert not sum(model.waiting.values()) or sum(map(model.used, weights)) == slots, "a slot is free"
        for name, share in shares.items():
            if model.waiting[name] and model.used(name) < share:
                assert now - below_since.setdefault(name, now) <= LONGEST, (name, share, now)
            else:
                below_since.pop(name, None)
        now += 1
    assert sorted(model.order) == sorted(flow_of), "each job starts once"
    for name in weights:
        mine = [number for number in model.order if flow_of[number] == name]
        assert mine == sorted(mine), "a flow's jobs start in order"
    assert not model.queue.flows


@given(
    st.integers(1, 8),
    st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from([0.1, 0.5, 1.0, 2.0, 10.0]), min_size=2),
)
def test_flows_that_always_wait_get_slots_in_proportion_to_their_weights(slots: int, weights: dict[str, float]) -> None:
    model, rounds = Slots(slots, weights), 200
    for name in weights:
        for number in range(rounds * slots):
            model.arrive(ord(name) * 1_000_000 + number, Arrival(0, name, 1))
    for now in range(rounds):
        model.advance(now)
    for name, weight in weights.items():
        started = rounds * slots - model.waiting[name]
        share = rounds * slots * weight / sum(weights.values())
        assert abs(started - share) <= slots + len(weights), (name, started, share)


@pytest.mark.parametrize(("weight", "others"), [(1.0, 1), (1.0, 8), (10.0, 1), (0.1, 3), (10.0, 30)])
def test_sessions_of_one_job_at_a_time_get_their_share_and_no_more(weight: float, others: int) -> None:
    """Each of their jobs is of a new flow, as the one before has ended."""
    queue, shares, started, rounds = FairQueue(RUN), Shares(), Counter[str](), 4000
    trainer = Flow("trainer", shares, weight)
    for number in range(rounds):
        queue.push(trainer, Entry(number, "trainer", 1))
    for number in range(others):
        queue.push(Flow(f"other-{number}", shares), Entry(number, "other", 1))
    for number in range(rounds):
        first = queue.first()
        assert first is not None
        flow, _ = first
        queue.pop(flow)
        for change in (1, -1):
            flow.moved(Phase.RUN, change, held=True)
        started[flow.name] += 1
        if flow is not trainer:
            flow.leave()
            queue.push(Flow(flow.name, shares), Entry(number, "other", 1))
    share = rounds * weight / (weight + others)
    assert share / 1.5 <= started["trainer"] <= 1.5 * share
    assert rounds - started["trainer"] >= (rounds - share) / 1.5


def test_a_flow_that_came_again_under_its_name_is_counted_anew() -> None:
    shares = Shares()
    queue, old, new = FairQueue(RUN), Flow("a", shares), Flow("a", shares)
    queue.push(old, Entry(1, "cancelled", 1))
    queue.push(new, Entry(2, "again", 1))
    queue.push(Flow("b", shares), Entry(3, "other", 1))
    new.moved(Phase.RUN, 1, held=True)
    assert [entry.job_id for _, entry in iter_of(queue)] == ["other", "again"]


def iter_of(queue: FairQueue) -> list[tuple[Flow, Entry]]:
    found = []
    while (first := queue.first()) is not None:
        queue.pop(first[0])
        found.append(first)
    return found


class Service:
    """A job table with a process of INIT and one of RUN whose jobs all take as long."""

    def __init__(self, weights: dict[str, float], priorities: dict[str, int]) -> None:
        self.counts = JobCounts(weights, priorities)
        self.table = JobTable(10.0, 4, 2.5, self.counts)
        self.running: list[str] = []
        for role, slots in ((Phase.INIT, 2), (Phase.RUN, 8)):
            report = StageReport(
                stage_id=role, role=role, node="n", slots=slots, endpoint="ipc://s", tasks=(Task("t"),)
            )
            self.table.stage_reported(report, 0.0)

    def submit(self, session: str, jobs: int, *, in_batch: bool = False) -> None:
        for number in range(jobs):
            job = Job(task="t", instance={}, job_id=f"{session}-{number}")
            self.perform(self.table.submit(session, job, b"", 0.0, in_batch=in_batch))

    def end_jobs(self, jobs: int) -> Counter[str]:
        """End RUN of the oldest jobs there; return how many slots of RUN each session has then."""
        for _ in range(jobs):
            job_id = self.running.pop(0)
            done = PhaseDone(stage_id="run", job_id=job_id, attempt=1, phase=Phase.RUN, stop_reason="done", backend="b")
            self.perform(self.table.phase_done(done, None, 0.0))
        return Counter(job_id.partition("-")[0] for job_id in self.running)

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start) and action.command.phase == Phase.RUN:
                self.running.append(action.command.job_id)
            elif isinstance(action, Start) and action.command.phase == Phase.INIT:
                done = PhaseDone(stage_id="init", job_id=action.command.job_id, attempt=1, phase=Phase.INIT)
                self.perform(self.table.phase_done(done, None, 0.0))


@pytest.mark.parametrize(
    ("weights", "batches", "expected"),
    [({}, 1.0, 4), ({}, 3.0, 6), ({"trainer": 3.0}, 1.0, 6), ({"bulk": 3.0}, 1.0, 2)],
)
def test_a_bulk_submission_leaves_another_sessions_batch_its_share(
    weights: dict[str, float], batches: float, expected: int
) -> None:
    service = Service(weights, {})
    service.submit("bulk", 300)
    service.counts.weigh_batches({"trainer": batches})
    service.submit("trainer", 16, in_batch=True)
    assert service.end_jobs(16)["trainer"] == expected, "the eight that ran, and the four that were prepared"


def test_a_session_whose_share_is_less_than_a_slot_gets_one_in_turn() -> None:
    service = Service({"large": 20.0}, {})
    service.submit("large", 400)
    service.submit("small", 10)
    turns = [service.end_jobs(1)["small"] for _ in range(210)]
    assert max(turns) == 1
    assert 7 <= sum(not before and now for before, now in pairwise(turns)) <= 10, "one in 21 starts, later at first"


def test_the_weight_of_a_batch_that_opens_counts_at_once() -> None:
    service = Service({}, {})
    service.submit("bulk", 100)
    service.submit("trainer", 100, in_batch=True)
    assert service.end_jobs(16)["trainer"] == 4
    service.counts.weigh_batches({"trainer": 3.0})
    assert service.end_jobs(16)["trainer"] == 6
    service.counts.weigh_batches({})
    assert service.end_jobs(16)["trainer"] == 4


def test_a_session_of_a_higher_priority_goes_first() -> None:
    service = Service({}, {"evaluation-*": 1})
    service.submit("bulk", 300)
    service.submit("evaluation-5", 12)
    assert service.end_jobs(12)["evaluation"] == 8


def test_the_first_pattern_that_fits_a_name_counts() -> None:
    settings = {"evaluation-?": 2.0, "eval*": 3.0}
    assert [setting_of(name, settings, 1.0) for name in ("evaluation-1", "evaluation-12", "t")] == [2.0, 3.0, 1.0]


def test_cancelled_jobs_that_never_had_their_turn_take_no_memory() -> None:
    queue, shares = FairQueue(RUN), Shares()
    urgent = Flow("urgent", shares, priority=1)
    queue.push(urgent, Entry(0, "urgent", 1))
    for number in range(1, 101):  # each time a new flow, since all jobs of the one before were cancelled
        queue.push(Flow("starved", shares), Entry(number, f"job-{number}", 1))
    assert sorted(entry.job_id for entry in queue.entries()) == ["job-100", "urgent"]
    assert queue.first() == (urgent, Entry(0, "urgent", 1))
