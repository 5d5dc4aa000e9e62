"""All properties once more, with five times the examples of `make test`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 900
"""It takes two minutes on an idle core."""


@pytest.mark.proof
@pytest.mark.timeout(LIMIT_S)
def test_properties_hold_for_many_examples() -> None:
    pytest_of_it = (str(Path(sys.executable).with_name("pytest")), "-q", "-n0", "-p", "no:cacheprovider")
    chosen = ("--tier=unit", "-m", "hypothesis and not proof", "--hypothesis-profile=many", "tests")
    run = subprocess.run([*pytest_of_it, *chosen], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout.splitlines()[-1]
