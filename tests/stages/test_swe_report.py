"""Reports of tests by swebench's own parsers and rules."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prorl_zmq.stages.handlers import swe_report
from prorl_zmq.stages.handlers.swe import _columns
from prorl_zmq.stages.handlers.swe_report import official_script, report
from prorl_zmq.tasks.swe_formats import END, EXIT_CODE, ROW_FORMATS, START

sys.path.append(str(Path(__file__).parents[1] / "tasks"))
from swe_rows import SWE_BENCH

ABOUT: dict[str, Any] = {
    "instance_id": "one__one-1",
    "version": "1",
    "repo": "",
    "log_parser": "parse_log_pytest",
    "fail_to_pass": ["t.py::a"],
    "pass_to_pass": ["t.py::b"],
}


def log(*lines: str, code: int = 0) -> str:
    return "\n".join((f"+ : '{START}'", *lines, f"+ : '{END}'", f"{EXIT_CODE}: {code}", ""))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("lines", "resolved"),
    [
        (("PASSED t.py::a", "PASSED t.py::b"), True),
        (("PASSED t.py::a", "XFAIL t.py::b"), True),
        (("PASSED t.py::a", "FAILED t.py::b - assert 0"), False),
        (("FAILED t.py::a - assert 0", "PASSED t.py::b"), False),
        (("PASSED t.py::b",), False),
        (("SKIPPED t.py::a", "PASSED t.py::b"), False),
        (("ERROR t.py::a", "PASSED t.py::b"), False),
    ],
    ids=["all pass", "expected failure", "one broke", "not mended", "missing", "skipped", "error"],
)
def test_resolved_is_all_of_both_lists(lines: tuple[str, ...], resolved: bool) -> None:
    code = int(any(line.startswith(("FAILED", "ERROR")) for line in lines))
    found = report(ABOUT, log(*lines, code=code))
    assert (found.resolved, found.ran) == (resolved, True)
    assert bool(found.failed) is not resolved


GREEN = {
    "chartjs/Chart.js": "\x1b[32mChrome 124.0.0.0 (Linux x86_64): Executed 8 of 9 (skipped 1) SUCCESS (2.1 secs)",
    "markedjs/marked": "Started\n........\n\n\n8 specs, 0 failures\nFinished in 0.9 seconds",
    "processing/p5.js": "  color\n    ✓ is read\n\n  8 passing (2s)",
}
FAILED = {
    "chartjs/Chart.js": "Chrome 124.0.0.0 (Linux x86_64) {} FAILED",
    "markedjs/marked": "Failures:\n1) {}\n  Message: Expected 1 to be 2.",
    "processing/p5.js": "  1) {}:\n     AssertionError: expected 1 to equal 2",
}


@pytest.mark.parametrize("repo", GREEN)
def test_parser_that_names_only_what_fails_takes_a_count_for_the_rest(repo: str) -> None:
    """Chart.js, marked and p5.js, of SWE-bench Multimodal: of a run without a failure swebench reads nothing."""
    red, blue = (f"{name} " if "chart" in repo else name for name in ("is red", "is blue"))  # as swebench reads them
    about = {**ABOUT, "repo": repo, "log_parser": "", "fail_to_pass": [red], "pass_to_pass": [blue]}
    green = report(about, log(GREEN[repo]))
    assert (green.resolved, green.ran, green.fail_to_pass, green.pass_to_pass) == (True, True, 1, 1)
    for test in (red, blue):
        found = report(about, log(FAILED[repo].format(test.strip()), GREEN[repo], code=1))
        assert (found.resolved, found.failed) == (False, [test])
    for dead in ("Error: Cannot find module 'jasmine'", "Executed 0 of 0 ERROR", "0 specs, 0 failures", "  0 passing"):
        crashed = report(about, log(dead))
        assert (crashed.resolved, crashed.ran) == (False, False)


def test_log_that_a_patch_printed_itself_resolves_nothing() -> None:
    """It ended badly (a crash, an exit of its own), and yet no test failed."""
    assert report(ABOUT, log("PASSED t.py::a", "PASSED t.py::b", code=3)).resolved is False


@pytest.mark.parametrize(
    "text",
    ["", "PASSED t.py::a\nPASSED t.py::b", log(), f"+ : '{START}'\nPASSED t.py::a\n", log(">>>>> Patch Apply Failed")],
    ids=["nothing", "no marks", "no tests", "no end", "patch failed"],
)
def test_run_that_did_not_happen_says_so(text: str) -> None:
    found = report(ABOUT, text)
    assert (found.resolved, found.ran) == (False, False)
    assert found.problem


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("parser", "line"),
    [
        ("parse_log_django", "FAIL:"),
        ("parse_log_seaborn", "PASSED"),
        ("parse_log_pytest_options", "PASSED " + "[" * 100_000),
        ("parse_log_pytest", f"{EXIT_CODE}: " + "9" * 5000),
    ],
    ids=["raises", "raises too", "takes long", "no number"],
)
def test_line_that_a_parser_chokes_on_spares_nobody_a_verdict(
    parser: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swe_report, "PARSE_S", 1.0)
    hostile = log(line) + f"\n{EXIT_CODE}: " + "9" * 5000
    found = report({**ABOUT, "log_parser": parser}, hostile)
    assert (found.resolved, found.fail_to_pass) == (False, 0)
    assert found.problem or found.failed == ["t.py::a", "t.py::b"]


@pytest.mark.parametrize("repo", ["immutable-js/immutable-js", "jekyll/jekyll"])
def test_parser_is_told_the_instance(repo: str) -> None:
    found = report({**ABOUT, "repo": repo, "log_parser": "", "instance_id": f"{repo.replace('/', '__')}-1"}, log("ok"))
    assert "AttributeError" not in found.problem


def test_parser_is_the_repositorys_or_the_named_one() -> None:
    django = {**ABOUT, "repo": "django/django", "log_parser": "", "fail_to_pass": ["a (t.T)"], "pass_to_pass": []}
    assert report(django, log("a (t.T) ... ok")).resolved
    for wrong in ({"log_parser": "os"}, {"log_parser": "parse_log_nothing"}, {"repo": "no/such", "log_parser": ""}):
        with pytest.raises(ValueError, match="log parser"):
            report({**ABOUT, **wrong}, log("PASSED t.py::a"))


def test_official_script_is_made_from_the_row() -> None:
    script = official_script(SWE_BENCH)
    assert START in script
    assert "pytest" in script
    assert SWE_BENCH["base_commit"] in script
    with pytest.raises(KeyError):
        official_script({**SWE_BENCH, "version": "99"})


def test_official_script_of_every_repository_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    from swebench.harness.constants import MAP_REPO_VERSION_TO_SPECS
    from swebench.harness.test_spec.test_spec import make_test_spec

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError(f"asked for {arguments}")

    monkeypatch.setattr("requests.sessions.Session.request", refuse)
    made = 0
    (instance,) = (form.convert(SWE_BENCH) for form in ROW_FORMATS if form.name == "swe-bench")
    for repo, versions in MAP_REPO_VERSION_TO_SPECS.items():
        for version in (version for version, specs in versions.items() if "test_cmd" in specs):
            row = {**SWE_BENCH, "repo": repo, "version": version}
            script = official_script(_columns(msgspec.structs.replace(instance, repo=repo, version=version)))
            assert START in script
            with suppress(AssertionError):  # those for which it would ask GitHub
                assert make_test_spec(row).eval_script == script
                made += 1
    assert made > 100
