from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.brokers.backends import admission_queue
from prorl_zmq.brokers.backends.admission_queue import COMPACT_FROM, PRECEDENCE_S, AdmissionQueue

if TYPE_CHECKING:
    import pytest


def order(queue: AdmissionQueue[str], now: float = 0.0) -> list[str]:
    return [job_id for job_id, _ in queue.in_order(now)]


def waiting(*jobs: str) -> AdmissionQueue[str]:
    """Return a queue in which jobs wait; of `g/1`, the group is g."""
    queue: AdmissionQueue[str] = AdmissionQueue()
    for job_id in jobs:
        queue.enter(job_id, job_id.rpartition("/")[0], job_id, 0.0)
    return queue


def test_jobs_are_admitted_in_order_of_arrival() -> None:
    queue = waiting("c", "a", "b")
    assert order(queue) == ["c", "a", "b"]
    assert order(queue) == ["c", "a", "b"], "to look admits no job"
    assert len(queue) == 3
    queue.withdraw("a")
    queue.withdraw("unknown")
    assert order(queue) == ["c", "b"]


def test_jobs_of_a_group_that_has_begun_come_before_those_of_other_groups() -> None:
    queue = waiting("g/1", "h/1", "alone", "g/2", "h/2")
    queue.note_admitted("g/1", "g", 0, 0.0)
    assert order(queue) == ["g/2", "h/1", "alone", "h/2"]
    queue.enter("g/3", "g", "g/3", 1.0)
    assert order(queue) == ["g/2", "g/3", "h/1", "alone", "h/2"]


def test_groups_begun_with_the_oldest_weights_come_first() -> None:
    queue = waiting("new/1", "old/1", "new/2", "old/2")
    queue.note_admitted("new/1", "new", 7, 0.0)
    queue.note_admitted("old/1", "old", 6, 0.0)
    assert order(queue) == ["old/2", "new/2"]
    queue.enter("old/3", "old", "old/3", 1.0)
    queue.note_admitted("old/2", "old", 8, 1.0)
    assert order(queue) == ["old/3", "new/2"], "a group keeps the version with which it began"


def test_a_job_that_left_its_backend_comes_first() -> None:
    queue = waiting("g/1", "g/2")
    queue.note_admitted("g/1", "g", 3, 0.0)
    queue.enter("new", "", "new", 1.0, has_left=True)
    queue.enter("g/1", "g", "g/1", 1.0, has_left=True)
    assert order(queue) == ["new", "g/1", "g/2"]


def test_a_group_comes_first_only_for_a_time() -> None:
    queue = waiting("endless/1", "alone")
    queue.note_admitted("endless/1", "endless", 0, 0.0)
    queue.enter("endless/2", "endless", "endless/2", 1.0)
    assert order(queue, PRECEDENCE_S - 1) == ["endless/2", "alone"]
    assert order(queue, PRECEDENCE_S) == ["alone", "endless/2"]
    queue.note_admitted("endless/2", "endless", 0, PRECEDENCE_S)
    queue.enter("endless/3", "endless", "endless/3", PRECEDENCE_S)
    assert order(queue, PRECEDENCE_S) == ["alone", "endless/3"], "its time does not begin again"


def test_a_group_that_begins_while_jobs_are_admitted_continues_at_once() -> None:
    queue = waiting("g/1", "h/1", "g/2")
    admitted = []
    for job_id, _ in queue.in_order(0.0):
        queue.note_admitted(job_id, job_id.partition("/")[0], 0, 0.0)
        admitted.append(job_id)
    assert admitted == ["g/1", "g/2", "h/1"]
    assert len(queue) == 0


def test_a_repeated_request_keeps_the_jobs_place() -> None:
    queue = waiting("a", "b")
    queue.enter("a", "", "again", 9.0, has_left=True)
    assert list(queue.in_order(9.0)) == [("a", "again"), ("b", "b")]
    assert queue.find("a") == "again"
    assert queue.find("c") is None
    assert dict(queue.items()) == {"a": "again", "b": "b"}


def test_few_groups_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_queue, "GROUP_LIMIT", 2)
    queue = waiting("x", "a/2", "b/2", "c/2")
    for group in "abc":
        queue.note_admitted(f"{group}/1", group, 0, 0.0)
        queue.enter(f"{group}/3", group, f"{group}/3", 0.0)
    queue.enter("a/4", "a", "a/4", 0.0)
    assert order(queue).index("x") < order(queue).index("a/4")
    assert order(queue).index("b/3") < order(queue).index("x")


def test_jobs_that_come_and_go_behind_a_waiting_one_leave_nothing() -> None:
    queue = waiting("first")
    for number in range(10 * COMPACT_FROM):
        queue.enter(f"g/{number}", "g", "", 0.0)
        queue.withdraw(f"g/{number}")
    assert order(queue) == ["first"]
    assert len(queue._heap) <= COMPACT_FROM
    assert not queue._by_group


EVENTS = st.lists(
    st.tuples(st.integers(0, 20), st.sampled_from(["", "g", "h", "i"]), st.booleans(), st.integers(0, 3)), max_size=40
)


@given(events=EVENTS, places=st.integers(0, 3))
def test_the_order_is_that_of_a_sorted_list(events: list[tuple[int, str, bool, int]], places: int) -> None:
    """Jobs arrive, and after each arrival some places are free; the first of a sorted list must get them."""
    queue: AdmissionQueue[int] = AdmissionQueue()
    jobs: dict[str, tuple[int, str, bool]] = {}
    begun: dict[str, tuple[int, float]] = {}
    now = 0.0
    for arrival, (minutes, group, has_left, version) in enumerate(events):
        now += 60.0 * minutes
        job_id = f"job-{arrival}"
        queue.enter(job_id, group, arrival, now, has_left=has_left)
        jobs[job_id] = (arrival, group, has_left)

        def rank(job_id: str, now: float = now) -> tuple[int, int, int]:
            arrival, group, has_left = jobs[job_id]
            known, since = begun.get(group, (0, -PRECEDENCE_S))
            if has_left:
                return (0, known, arrival)
            return (1, known, arrival) if group in begun and now < since + PRECEDENCE_S else (2, 0, arrival)

        free = places
        for found, item in queue.in_order(now):
            assert found == min(jobs, key=rank)
            assert item == jobs[found][0]
            if not free:
                break
            free -= 1
            queue.note_admitted(found, jobs[found][1], version, now)
            if jobs[found][1]:
                begun.setdefault(jobs[found][1], (version, now))
            del jobs[found]
        assert len(queue) == len(jobs)


def test_a_job_that_holds_another_backend_comes_before_all_others_as_long_as_it_does() -> None:
    held = {"late"}
    queue: AdmissionQueue[str] = AdmissionQueue(held.__contains__)
    queue.enter("left", "", "", 0.0, has_left=True)
    queue.enter("fresh", "", "", 0.0)
    queue.enter("late", "", "", 0.0)
    assert order(queue) == ["late", "left", "fresh"]
    held.add("fresh")
    queue.rerank("fresh", 1.0)
    queue.rerank("unknown", 1.0)
    assert order(queue) == ["fresh", "late", "left"]
    held.clear()
    assert order(queue) == ["left", "fresh", "late"]
