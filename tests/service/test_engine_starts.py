"""Which engines are starting, ready or failed: the table of `engine_starts`, row by row."""

from __future__ import annotations

import pytest

from prorl_zmq.service.engine_starts import MAX_STARTS, EngineStarts

LEASE_S = 10.0


def begun() -> EngineStarts:
    starts = EngineStarts({"engine-0": "policy"}, LEASE_S)
    starts.started("engine-0", 0.0)
    return starts


def ready() -> EngineStarts:
    starts = begun()
    starts.listed([], 1.0)
    starts.listed(["engine-0"], 2.0)
    assert starts.report() == ()
    return starts


def states(starts: EngineStarts) -> list[tuple[str, str]]:
    return [(one.state, one.problem) for one in starts.report()]


def test_an_engine_that_is_planned_is_starting_before_its_process_is_there() -> None:
    starts = EngineStarts({"engine-0": "policy", "engine-1": "user"}, LEASE_S)
    assert [one.backend_id for one in starts.report()] == ["engine-0", "engine-1"]
    assert states(starts) == [("starting", "")] * 2
    starts.listed(["engine-0"], 0.0)
    assert states(starts) == [("starting", "")] * 2, "another service's, listed still"


def test_an_engine_that_was_never_ready_fails_after_its_last_start() -> None:
    starts = begun()
    for number in range(1, MAX_STARTS):
        assert starts.ended("engine-0", f"problem {number}")
        assert states(starts) == [("starting", f"problem {number}")]
        assert not starts.all_failed()
        starts.started("engine-0", float(number))
    assert not starts.ended("engine-0", "the last problem")
    assert states(starts) == [("failed", "the last problem")]
    assert starts.failed() == {"engine-0": "the last problem"}
    assert starts.all_failed()


def test_an_engine_that_fails_and_then_works_is_ready() -> None:
    starts = begun()
    starts.ended("engine-0", "no memory")
    starts.started("engine-0", 1.0)
    starts.listed([], 1.5)
    starts.listed(["engine-0"], 2.0)
    assert starts.is_ready("engine-0")
    assert starts.report() == ()
    assert not starts.failed()


def test_an_engine_that_was_ready_is_always_restarted_and_reported_as_failed_in_the_meantime() -> None:
    starts = ready()
    for number in range(10):
        assert starts.ended("engine-0", "it crashed")
        assert states(starts) == [("failed" if number >= MAX_STARTS else "starting", "it crashed")]
        starts.started("engine-0", 10.0 + number)
        starts.listed([], 10.5 + number)
    starts.listed(["engine-0"], 30.0)
    assert starts.report() == ()


@pytest.mark.parametrize(
    ("missing", "now", "expected"), [(False, 24.0, False), (False, 31.0, True), (True, 22.0, True)]
)
def test_a_listing_of_the_process_before_does_not_count(missing: bool, now: float, expected: bool) -> None:
    starts = ready()
    starts.ended("engine-0", "it was killed")
    starts.started("engine-0", 20.0)
    if missing:
        starts.listed([], 21.0)
    starts.listed(["engine-0"], now)
    assert starts.is_ready("engine-0") == expected


def test_a_reason_that_is_too_long_for_the_wire_is_cut() -> None:
    starts = begun()
    starts.ended("engine-0", "x" * 5000)
    assert len(starts.report()[0].problem) < 1000
