"""Verifies an instance by running all tests in a fresh sandbox: twice with the bug, twice with the gold patch.

What does not give the same answer both times is left out of the instance's tests, as is what does not pass with the
gold patch. An instance is dropped if too little is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import SandboxLimitExceeded
from .environment import TESTBED
from .search import GIT_LIMIT_S, apply
from .suite import run_suite

if TYPE_CHECKING:
    from ..tools.sandbox.sandbox import Sandbox
    from .baseline import Baseline
    from .search import Found
    from .suite import SuiteRun

REPEATS = 2
LEAST_KEPT = 0.9
"""Share of the reliable tests that must give the same answer each time; below that the instance is dropped."""


@dataclass(frozen=True)
class Verified:
    found: Found
    fail_to_pass: tuple[str, ...]
    """Node ids, sorted."""
    pass_to_pass: tuple[str, ...]
    """Node ids, sorted."""
    flaky: int
    """Tests that were left out."""


async def verify(
    found: Found,
    baseline: Baseline,
    command: str,
    sandbox: Sandbox,
    *,
    most_failing: int,
    limit_s: float,
) -> Verified | str:
    try:
        await apply(sandbox, found.bug_patch)
        bugged = [await run_suite(sandbox, command, limit_s) for _ in range(REPEATS)]
        await apply(sandbox, found.gold_patch)
        clean = await sandbox.exec(["git", "diff", "--quiet", "HEAD"], GIT_LIMIT_S, directory=TESTBED)
        fixed = [await run_suite(sandbox, command, limit_s) for _ in range(REPEATS)]
    except SandboxLimitExceeded:
        return "uses too much memory or too many processes"
    if clean.exit_code:
        return "the gold patch does not restore what was there"
    return judge(found, baseline, bugged, fixed, most_failing)


def judge(
    found: Found, baseline: Baseline, bugged: list[SuiteRun], fixed: list[SuiteRun], most_failing: int
) -> Verified | str:
    """Tell from all runs which tests the bug breaks and which it leaves alone, or why the instance is dropped."""
    if any(run.timed_out for run in (*bugged, *fixed)):
        return "hangs"
    tests = baseline.tests
    good = tests.intersection(*(run.passed for run in fixed))
    fail_to_pass = good.intersection(*(run.failing(tests) for run in bugged))
    pass_to_pass = good.intersection(*(run.passed for run in bugged))
    flaky = len(tests) - len(fail_to_pass) - len(pass_to_pass)
    if not fail_to_pass:
        return "no test fails each time"
    if not found.failing & fail_to_pass:
        return "other tests fail than those that the statement shows"
    if len(fail_to_pass) > most_failing:
        return "too many tests fail"
    if len(fail_to_pass) + len(pass_to_pass) < LEAST_KEPT * len(tests):
        return "too many tests are flaky"
    return Verified(found, tuple(sorted(fail_to_pass)), tuple(sorted(pass_to_pass)), flaky)
