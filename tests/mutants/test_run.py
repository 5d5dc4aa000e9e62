"""What the runner of mutants makes of pytest's words. `make mutants` runs it in full."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mutants.run import Verdict, read_verdict

RUN = Path(__file__).with_name("run.py")
FAILED = """..F
=========================== short test summary info ============================
FAILED tests/a.py::test_b[one - two] - assert 1 == 2
!!!!!!!!!!!!!!!!!!!!!!!!!! stopping after 1 failures !!!!!!!!!!!!!!!!!!!!!!!!!!!
1 failed, 2 passed in 0.10s
"""
BROKEN = """
=========================== short test summary info ============================
ERROR tests/a.py - ImportError: cannot import name 'b'
1 error in 0.10s
"""


@pytest.mark.parametrize(
    ("code", "words", "verdict"),
    [
        (1, FAILED, Verdict("killed", "tests/a.py::test_b[one - two]")),
        (1, FAILED.replace("[one - two]", ""), Verdict("killed", "tests/a.py::test_b")),
        (1, FAILED.replace("FAILED", "ERROR"), Verdict("killed", "tests/a.py::test_b[one - two]")),
        (0, "...\n3 passed in 0.10s\n", Verdict("SURVIVED")),
        (0, "s..\n2 passed, 1 skipped in 0.10s\n", Verdict("SURVIVED")),
        (0, "s..\n1 skipped, 2 passed in 0.10s\n", Verdict("SURVIVED")),
        (0, "s\n1 skipped in 0.10s\n", Verdict("not run", "the tests were skipped")),
        (5, "no tests ran in 0.10s\n", Verdict("not run", "no test is selected")),
        (4, "ERROR: file or directory not found: tests/a.py\n", None),
        (2, BROKEN, None),
    ],
)
def test_only_a_test_that_failed_kills(code: int, words: str, verdict: Verdict | None) -> None:
    found = read_verdict(code, words)
    if verdict is None:
        verdict = Verdict("not run", f"pytest ended with {code}: {words.strip()}")
    assert found == verdict
    assert found.is_good == (found.word == "killed")


def test_an_unknown_mutant_is_refused_with_those_that_there_are() -> None:
    done = subprocess.run([sys.executable, "-P", RUN, "no-such"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no mutant no-such; tests/mutants has: admission-" in done.stderr
