"""Full reports and changes, against what a broker knows after them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from prorl_zmq.wire.change_reports import FULL_EVERY, ChangeReports
from prorl_zmq.wire.messages.nodes import NodeFacts

FACTS = NodeFacts(host="h", memory_free_bytes=50, memory_total_bytes=100)
HELD = st.dictionaries(st.sampled_from(["init-1", "run-1"]), st.dictionaries(st.sampled_from("abc"), st.integers(1, 3)))


@given(st.lists(st.tuples(HELD, st.booleans())))
def test_the_broker_hears_of_each_phase_that_began(steps: list[tuple[dict[str, dict[str, int]], bool]]) -> None:
    reports = ChangeReports("node-1")
    reports.answered()
    reports.is_full({}, {}, FACTS)
    heard: set[tuple[str, str, int]] = set()
    for held, lost in steps:
        if lost:
            reports.want_full()
        there = {(stage_id, job_id, attempt) for stage_id, jobs in held.items() for job_id, attempt in jobs.items()}
        before = reports.number
        if reports.is_full(held, {}, FACTS):
            assert lost
            assert reports.number == before
            heard = there
        else:
            alive = reports.changes(held, {}, FACTS)
            assert alive.number == reports.number == before + 1
            began = {(stage_id, *item) for stage_id, jobs in alive.began.items() for item in jobs.items()}
            assert began == there - heard
            heard = (heard & there) | began


def test_a_backend_is_told_once_and_with_its_attempt() -> None:
    reports = ChangeReports("run-1")
    reports.answered()
    reports.is_full({}, {}, FACTS)
    held = {"run-1": {"a": 2}}
    assert reports.changes(held, {"a": "engine-0"}, FACTS).backends == {"a": (2, "engine-0")}
    assert reports.changes(held, {"a": "engine-0"}, FACTS).backends == {}
    assert reports.changes(held, {"a": "engine-1"}, FACTS).backends == {"a": (2, "engine-1")}


def test_an_address_is_told_once_and_with_its_attempt() -> None:
    reports = ChangeReports("run-1")
    reports.answered()
    reports.is_full({}, {}, FACTS)
    held, address = {"run-1": {"a": 2}}, "http://127.0.0.1:1/rollouts/a"
    assert reports.changes(held, {}, FACTS, {"a": address}).addresses == {"a": (2, address)}
    assert reports.changes(held, {}, FACTS, {"a": address}).addresses == {}
    assert reports.changes(held, {}, FACTS, {"gone": address}).addresses == {}


def test_everything_is_said_until_the_broker_answers_and_now_and_then() -> None:
    reports = ChangeReports("run-1")
    assert all(reports.is_full({}, {}, FACTS) for _ in range(5))
    reports.answered()
    said = [reports.is_full({}, {}, FACTS) for _ in range(2 * (FULL_EVERY + 1))]
    assert [index for index, full in enumerate(said) if full] == [0, FULL_EVERY + 1]


def test_the_machine_is_told_with_full_reports_and_then_only_if_it_has_changed() -> None:
    reports = ChangeReports("run-1")
    reports.answered()
    reports.is_full({}, {}, FACTS)
    little, much = (replace(FACTS, memory_free_bytes=free) for free in (52, 40))
    told = [reports.changes({}, {}, facts).facts for facts in (FACTS, little, much, much, little, FACTS)]
    assert told == [None, None, much, None, little, None]
    reports.want_full()
    assert reports.is_full({}, {}, much)
    assert reports.changes({}, {}, much).facts is None
