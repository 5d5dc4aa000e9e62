from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_zmq.inference.hosting.parking import CALM, FULL, PARK_S, SILENT_S, Parking
from prorl_zmq.inference.hosting.room import KvReport

CAPACITY = 1_000
TIGHT = KvReport(CAPACITY, FULL + 0.05, waiting=1)
BUSY = KvReport(CAPACITY, (FULL + CALM) / 2)
IDLE = KvReport(CAPACITY, 0.0)


def full(tokens: int = 400, rollouts: int = 6, report: KvReport = TIGHT) -> Parking[str]:
    """An engine whose rollouts a, b, … have had a turn, the oldest first, and whose cache is full."""
    parking = Parking[str]()
    for number in range(rollouts):
        assert not parking.hold(f"{number}-first", "abcdefgh"[number], float(number), tokens, 100.0)
        parking.ended("abcdefgh"[number], 100.0)
    assert parking.update(report, rollouts, 100.0) == []
    return parking


def arrivals(parking: Parking[str], jobs: str, now: float = 100.0, tokens: int = 400) -> str:
    """Let the next turns of jobs arrive; return those that are parked."""
    return "".join(job for job in jobs if parking.hold(job, job, float("abcdefgh".index(job)), tokens, now))


def test_the_newest_groups_whose_contexts_do_not_fit_are_parked() -> None:
    assert arrivals(full(), "fabcde") == "fcd", "two fit, and at most half are parked"
    assert arrivals(full(), "ab") == ""


@pytest.mark.parametrize(
    ("report", "parked"),
    [
        (TIGHT, "c"),
        (replace(TIGHT, waiting=0), ""),
        (replace(TIGHT, used=FULL), ""),
        (replace(BUSY, preempted=1), "c"),
        (replace(IDLE, preempted=1), "c"),
        (BUSY, ""),
    ],
)
def test_turns_are_parked_while_requests_wait_for_a_full_cache_or_were_preempted(report: KvReport, parked: str) -> None:
    assert arrivals(full(report=report), "c") == parked


def test_it_stays_tight_until_use_is_low() -> None:
    parking = full()
    assert parking.update(BUSY, 6, 101.0) == []
    assert arrivals(parking, "f") == "f"
    parking = full()
    assert parking.update(replace(BUSY, used=CALM - 0.01), 6, 101.0) == []
    assert arrivals(parking, "f") == ""


def test_parked_turns_go_on_in_the_order_of_their_groups_as_far_as_they_fit() -> None:
    parking = full()
    assert arrivals(parking, "fed", tokens=300) == "fed"
    assert parking.update(BUSY, 6, 101.0) == []
    assert parking.update(IDLE, 6, 102.0) == ["d", "e"], "750 of 1000 tokens may be in use"
    assert parking.update(IDLE, 6, 103.0) == ["f"]
    assert len(parking) == 0


def test_no_newer_turn_passes_a_parked_one() -> None:
    parking = full()
    assert arrivals(parking, "de") == "de"
    assert parking.update(replace(IDLE, used=CALM - 0.45), 6, 102.0) == ["d"]
    assert arrivals(parking, "f") == "f", "e waits, and is older"
    assert arrivals(parking, "d") == "", "it is older than what waits"


def test_a_groups_rollouts_are_one_group_though_their_ages_were_measured_at_other_times() -> None:
    parking = Parking[str]()
    for job, began, tokens in (("a", 0.0, 400), ("b", 0.02, 400), ("c", 5.0, 200), ("d", 5.04, 400)):
        assert not parking.hold(f"{job}-first", job, began, tokens, 100.0)
        parking.ended(job, 100.0)
    assert parking.update(TIGHT, 4, 100.0) == []
    assert parking.hold("c", "c", 5.01, 200, 100.0), "it fits alone, and its group does not"
    assert parking.update(replace(IDLE, used=CALM - 0.1), 4, 101.0) == [], "it is not tight, and 100 tokens are free"
    assert not parking.hold("d", "d", 5.04, 400, 101.0), "no older group waits"
    assert not parking.hold("b", "b", 6.2, 400, 101.0), "a late measure makes its group no newer"


def test_a_turn_is_parked_for_a_limited_time() -> None:
    parking = full()
    assert arrivals(parking, "f") == "f"
    assert arrivals(parking, "e", now=110.0) == "e"
    assert parking.update(TIGHT, 6, 100.0 + PARK_S - 0.1) == []
    assert parking.update(TIGHT, 6, 100.0 + PARK_S) == ["f"]
    assert parking.update(TIGHT, 6, 110.0 + PARK_S) == ["e"]


def test_an_engine_that_falls_silent_holds_no_turn_back() -> None:
    parking = full()
    assert arrivals(parking, "f") == "f"
    assert parking.update(None, 6, 100.0 + SILENT_S - 0.1) == []
    assert parking.update(replace(TIGHT, used=math.nan), 6, 100.0 + SILENT_S) == ["f"]
    assert arrivals(parking, "f", now=120.0) == ""


def test_a_parked_turn_goes_on_once_older_rollouts_have_ended() -> None:
    parking = full()
    assert arrivals(parking, "fe", now=104.0) == "fe"
    assert parking.update(TIGHT, 3, 105.0) == ["e"], "d, e and f are left, and two fit"
    assert parking.update(TIGHT, 3, 106.0) == []


def test_a_turn_that_is_withdrawn_does_not_come_back() -> None:
    parking = full()
    assert arrivals(parking, "ef") == "ef"
    parking.withdraw("f")
    parking.withdraw("never parked")
    assert parking.update(IDLE, 6, 101.0) == ["e"]


def test_half_of_its_capacity_is_enough_to_park_the_newest() -> None:
    parking = full(tokens=150, report=BUSY)
    assert arrivals(parking, "abcdef", tokens=150) == ""
    assert parking.update(KvReport(CAPACITY / 2, 1.0, preempted=2), 6, 101.0) == []
    assert arrivals(parking, "abcdef", tokens=150) == "def", "three of 150 tokens fit into 500"


def test_rollouts_that_ended_no_longer_count() -> None:
    parking = full()
    assert parking.update(TIGHT, 2, 102.9) == []
    assert arrivals(parking, "f") == "f", "the broker may not have counted them yet"
    parking.withdraw("f")
    parking.ended("f", 102.9)
    assert parking.update(TIGHT, 2, 106.0) == [], "e and f had the latest turns"
    assert arrivals(parking, "ef", now=106.0) == "", "800 tokens fit"


def test_rollouts_with_a_long_or_a_parked_turn_are_not_forgotten() -> None:
    parking = Parking[str]()
    for number, job in enumerate("abcd"):
        assert not parking.hold(job, job, float(number), 250, 100.0), "they fill the cache"
    for short in "ijklmn":
        assert not parking.hold(short, short, 10.0, 5, 100.0)
    assert parking.update(TIGHT, 10, 100.0) == []
    assert arrivals(parking, "efgh", now=101.0, tokens=250) == "efgh"
    for short in "ijklmn":
        parking.ended(short, 105.0)
    assert parking.update(TIGHT, 8, 109.0) == [], "the short ones are gone, and the others still fill the cache"
    parking.ended("a", 110.0)
    assert parking.update(TIGHT, 7, 114.0) == ["e"]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("turn"), st.integers(0, 9), st.integers(1, 900)),
            st.tuples(st.just("report"), st.sampled_from([TIGHT, BUSY, IDLE, None]), st.integers(0, 10)),
            st.tuples(st.just("end"), st.integers(0, 60), st.just(0)),
        ),
        max_size=60,
    )
)
def test_every_turn_goes_on_once_and_in_time_and_at_most_half_wait(steps: list[tuple[str, object, int]]) -> None:
    parking = Parking[int]()
    waiting: dict[int, tuple[float, int]] = {}
    under_way: dict[int, int] = {}
    jobs: set[int] = set()
    for number, (what, which, amount) in enumerate(steps):
        now = 10.0 * number
        if what == "turn":
            assert isinstance(which, int)
            jobs.add(which)
            under_way[number] = which
            if parking.hold(number, which, float(which), amount, now):
                waiting[number] = (now, which)
                assert len(waiting) <= (len(jobs) + 1) // 2
        elif what == "end":
            waiting.pop(which, None)  # type: ignore[call-overload]
            parking.withdraw(which)  # type: ignore[arg-type]
            if which in under_way:
                parking.ended(under_way.pop(which), now)  # type: ignore[call-overload]
        else:
            going = parking.update(which, amount, now)  # type: ignore[arg-type]
            assert [waiting[turn][1] for turn in going] == sorted(waiting.pop(turn)[1] for turn in going)
            assert all(now < since + PARK_S for since, _ in waiting.values())
        assert len(parking) == len(waiting)
        assert parking._rollouts.keys() >= set(under_way.values())
        for began in range(-1, 11):
            tokens = sum(one.tokens for one in parking._rollouts.values() if one.began <= began)
            assert parking._fits(float(began)) == (tokens <= parking._capacity)


def test_thousands_of_parked_turns_cost_little() -> None:
    parking, began = Parking[int](), time.process_time()
    for number in range(8_000):
        if number == 4_000:
            parking.update(TIGHT, 8_000, 0.0)
        parking.hold(number, number, float(number), 400, 0.0)
    assert len(parking) == 4_000
    for now in range(5):
        assert parking.update(TIGHT, 8_000, float(now)) == []
    assert time.process_time() - began < 1.0, "each turn was compared with all rollouts"
