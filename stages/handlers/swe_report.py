"""Parse the test results of a `swe` job with the official `swebench` package. Runs in a grader process.

Two gaps of swebench's report are closed: a FAIL_TO_PASS test that was skipped, or is in neither list, has not passed;
and a run that failed without a failed test has not passed. One remains: a patch's code can forge the tests' output.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from ...tasks.swe_formats import END, EXIT_CODE, START
from ..grading.cpu_limit import cpu_limit

if TYPE_CHECKING:
    from collections.abc import Callable

PRELOADED = ("swebench.harness.grading",)
FAILED_TESTS = 32
COVERAGE = "Required test coverage of"
"""The text by which pytest-cov fails a run whose tests have all passed."""
LINE_LIMIT = 2000
"""Most characters of a line that a parser reads: some take cubic time in its length."""
PARSE_S = 10.0
"""Most processor seconds of a parser; the longest stored output takes up to 7 s if it is all tests."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STATUS = re.compile(r"\s*(PASSED|FAILED|ERROR)\b")
_COUNT = re.compile(r"\bExecuted [1-9]\d* of \d+|\b[1-9]\d* specs?, \d+ failures?\b|\b[1-9]\d* passing\b")
"""The final test counts of Karma, Jasmine and Mocha."""


class Report(msgspec.Struct, frozen=True):
    resolved: bool
    ran: bool
    """Whether the output has the marks of a run and a test's status; if a run names only failures, the count."""
    fail_to_pass: int = 0
    """Number of FAIL_TO_PASS tests that passed."""
    pass_to_pass: int = 0
    failed: list[str] = []
    """Tests that should have passed and did not; the first ones."""
    problem: str = ""


def official_script(instance: dict[str, Any]) -> str:
    """Return swebench's own evaluation script of an instance (its columns as in the data set).

    swebench's whole test specification would include the script that builds the image, which queries GitHub.
    """
    from swebench.harness.constants import MAP_REPO_TO_EXT, MAP_REPO_VERSION_TO_SPECS
    from swebench.harness.test_spec.create_scripts import make_eval_script_list
    from swebench.harness.test_spec.test_spec import TestSpec

    repo, version = instance["repo"], instance["version"]
    specs = MAP_REPO_VERSION_TO_SPECS[repo][version]
    about = (instance, specs, "testbed", "/testbed", instance["base_commit"], instance["test_patch"])
    made = TestSpec(
        instance_id=instance["instance_id"],
        repo=repo,
        version=version,
        repo_script_list=[],
        eval_script_list=make_eval_script_list(*about),
        env_script_list=[],
        arch="x86_64",
        FAIL_TO_PASS=[],
        PASS_TO_PASS=[],
        language=MAP_REPO_TO_EXT[repo],
        docker_specs={},
        namespace=None,
    )
    return str(made.eval_script)


def report(instance: dict[str, Any], log: str) -> Report:
    from swebench.harness.constants import FAIL_ONLY_REPOS, FAIL_TO_PASS, PASS_TO_PASS, EvalType, ResolvedStatus
    from swebench.harness.grading import get_eval_tests_report, get_resolution_status

    statuses, problem = _statuses(instance, log)
    fails_only = instance["repo"] in FAIL_ONLY_REPOS  # their parsers list no passed test
    if not (problem or statuses or (fails_only and _COUNT.search(_between_marks(log)))):
        problem = "the output of the tests names no test"
    if problem:
        return Report(resolved=False, ran=False, problem=problem)
    gold = {FAIL_TO_PASS: instance["fail_to_pass"], PASS_TO_PASS: instance["pass_to_pass"]}
    kind = EvalType.FAIL_ONLY if fails_only else EvalType.PASS_AND_FAIL
    found = get_eval_tests_report(statuses, gold, eval_type=kind)
    passed = {each: set(found[each]["success"]) for each in gold}
    missing = sorted(set(gold[FAIL_TO_PASS]) - passed[FAIL_TO_PASS]) + sorted(set(found[PASS_TO_PASS]["failure"]))
    forged = _exit_code(log) not in (None, 0) and not {"FAILED", "ERROR"} & set(statuses.values())
    forged = forged and COVERAGE not in log
    return Report(
        resolved=get_resolution_status(found) == ResolvedStatus.FULL.value and not missing and not forged,
        ran=True,
        fail_to_pass=len(passed[FAIL_TO_PASS]),
        pass_to_pass=len(passed[PASS_TO_PASS]),
        failed=missing[:FAILED_TESTS],
        problem="the tests ended badly, and none of them says so" if forged else "",
    )


def r2e_report(expected: dict[str, str], log: str) -> Report:
    """Compare the output of R2E-Gym's tests with the expected one: the same tests, each with the same status."""
    between = _between_marks(log)
    statuses = r2e_statuses(between)
    wanted = _paired(expected)
    if not statuses:
        return Report(resolved=False, ran=False, problem="the output has no summary of tests")
    found = _paired(statuses)
    failed = sorted(name for name, status in wanted.items() if found.get(name) != status)
    extra = sorted(found.keys() - wanted.keys())
    right = len(wanted) - len(failed)
    return Report(
        resolved=not failed and not extra, ran=True, pass_to_pass=right, failed=(failed + extra)[:FAILED_TESTS]
    )


def r2e_statuses(log: str) -> dict[str, str]:
    """Parse pytest's short summary with R2E-Gym's test names: `Class.test`, without the file."""
    _, found, summary = log.partition("short test summary info")
    if not found:
        return {}
    statuses: dict[str, str] = {}
    for line in summary.strip().splitlines():
        status = _STATUS.match(_COLOUR.sub("", line))  # not the rest of an exception
        name = _COLOUR.sub("", ".".join(line.split("::")[1:])).strip()
        if status and name:
            statuses[name if status[1] == "PASSED" else _cut(name)] = status[1]
    return statuses


def _paired(statuses: dict[str, str]) -> dict[str, str]:
    """Return statuses by names that are cut at " - ", as R2E-Gym's own grader pairs them.

    A failure's reason begins there, and some test parameters contain it. Of the names that become the same, the last
    one counts, in the order of the whole names.
    """
    plain = {_COLOUR.sub("", name).strip(): status for name, status in statuses.items()}
    cut = {_cut(name): plain[name] for name in sorted(plain)}
    return {name: status for name, status in cut.items() if name}


def _cut(name: str) -> str:
    return name.partition(" - ")[0].strip()


def _statuses(instance: dict[str, Any], log: str) -> tuple[dict[str, str], str]:
    """Return the status by test, and why nothing could be parsed."""
    from swebench.harness.constants import APPLY_PATCH_FAIL, RESET_FAILED, TESTS_ERROR, TESTS_TIMEOUT

    for mark in (APPLY_PATCH_FAIL, RESET_FAILED, TESTS_ERROR, TESTS_TIMEOUT):
        if mark in log:
            return {}, f"the output says {mark!r}"
    if START not in log or END not in log:
        return {}, "the script did not come to the end of the tests"
    parse = _parser(instance)
    lines = (line[:LINE_LIMIT] for line in _between_marks(log).splitlines())
    statuses: dict[str, str] | None = None
    problem = "the output of the tests takes swebench's parser too long"
    with cpu_limit(PARSE_S):
        try:
            statuses = parse("\n".join(lines), SimpleNamespace(**instance))
        except Exception as error:  # noqa: BLE001 - from a line that a patch printed, which must not save it from 0
            problem = f"swebench's parser cannot read the output of the tests: {type(error).__name__}: {error}"
    return ({}, problem) if statuses is None else (statuses, "")


def _parser(instance: dict[str, Any]) -> Callable[[str, Any], dict[str, str]]:
    from swebench.harness import log_parsers
    from swebench.harness.log_parsers import python

    name = instance["log_parser"]
    if not name:
        if instance["repo"] not in log_parsers.MAP_REPO_TO_PARSER:
            raise ValueError(f"swebench has no log parser for {instance['repo']!r}: name one (log_parser)")
        parser: Callable[[str, Any], dict[str, str]] = log_parsers.MAP_REPO_TO_PARSER[instance["repo"]]
        return parser
    known = {one.__name__: one for one in log_parsers.MAP_REPO_TO_PARSER.values()} | vars(python)
    if not name.startswith("parse_log_") or name not in known:
        raise ValueError(f"swebench has no log parser {name!r}")
    return known[name]  # type: ignore[no-any-return]


def _between_marks(log: str) -> str:
    return log.partition(START)[2].partition(END)[0]


def _exit_code(log: str) -> int | None:
    """Return the exit code of the tests, which the script prints after the last mark."""
    found = re.search(rf"^{re.escape(EXIT_CODE)}:\s*(-?\d{{1,9}})\b", log.rpartition(END)[2], re.MULTILINE)
    return int(found[1]) if found else None
