"""What runs with the bug and with the gold patch say of an instance."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from prorl_zmq.make_swe.search import Found, Verified, judge
from prorl_zmq.make_swe.suite import Baseline, Report, SuiteRun

if TYPE_CHECKING:
    from prorl_zmq.make_swe.candidates import Candidate

TESTS = [f"tests/a.py::t{number}" for number in range(20)]
BASELINE = Baseline(frozenset(TESTS), ("tests",), Report([], {}, {}, {}), 1.0, 0)
FOUND = Found(cast("Candidate", None), "", "", frozenset(TESTS[:2]), "")


def run(*failing: str, timed_out: bool = False, without: str = "") -> SuiteRun:
    statuses = {name: "FAILED" if name in failing else "PASSED" for name in TESTS if name != without}
    return SuiteRun(statuses, frozenset(), 1, timed_out, 1.0, "")


BUGGED, FIXED = run(*TESTS[:2]), run()


def test_what_fails_with_the_bug_and_passes_without_it() -> None:
    verified = judge(FOUND, BASELINE, [BUGGED, BUGGED], [FIXED, FIXED], 4)
    assert isinstance(verified, Verified)
    assert verified.fail_to_pass == tuple(sorted(TESTS[:2]))
    assert set(verified.pass_to_pass) == set(TESTS[2:])
    assert verified.flaky == 0


def test_a_test_that_differs_between_two_runs_is_left_out() -> None:
    verified = judge(FOUND, BASELINE, [BUGGED, run(TESTS[0])], [FIXED, run(TESTS[5])], 4)
    assert isinstance(verified, Verified)
    assert verified.fail_to_pass == (TESTS[0],)
    assert not {TESTS[1], TESTS[5]} & set(verified.pass_to_pass)
    assert verified.flaky == 2


@pytest.mark.parametrize(
    ("bugged", "fixed", "reason"),
    [
        (FIXED, FIXED, "no test fails each time"),
        (BUGGED, BUGGED, "no test fails each time"),
        (run(*TESTS[:5]), FIXED, "too many tests fail"),
        (run(TESTS[7]), FIXED, "other tests fail"),
        (BUGGED, run(timed_out=True), "hangs"),
        (BUGGED, run(*TESTS[10:14]), "flaky"),
        (run(without=TESTS[0]), FIXED, "no test fails each time"),
    ],
    ids=["harmless", "not-fixed", "many", "others", "hangs", "flaky", "missing"],
)
def test_an_instance_that_is_no_good_is_dropped_with_the_reason(bugged: SuiteRun, fixed: SuiteRun, reason: str) -> None:
    result = judge(FOUND, BASELINE, [bugged, bugged], [fixed, fixed], 4)
    assert isinstance(result, str)
    assert reason in result
