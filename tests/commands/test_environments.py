"""`prorl env`, as the documents use it, and what it says about wrong options."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

import pytest
from documents import ENVIRONMENT_COMMANDS, PAGES, ROOT, blocks
from support.commands import complaint, prorl

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PRORL_ENVIRONMENTS": str(tmp_path / "environments")}


def test_a_class_of_ones_own_as_the_documents_have_it(tmp_path: Path, environment: dict[str, str]) -> None:
    assert PAGES[ROOT / "docs" / "environments.md"]
    (example,) = [block for block in blocks("python") if "class GuessTheNumber" in block]
    (tmp_path / "guess.py").write_text(example)
    said = []
    for line in ENVIRONMENT_COMMANDS:
        done = prorl(*shlex.split(line)[1:], cwd=tmp_path, environment=environment)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == f"{tmp_path}/environments/guess/own\n"
    assert said[1].count("says: ") in {1, 2, 3}
    assert said[1].endswith("rewards: {'main': 1.0}; done\n")
    assert "guess" in said[2]
    assert "gem-llm" in said[2]
    assert "guess" not in prorl("env", "list", environment=environment).stdout


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (("test", "guess"), "environment guess own is not installed in", 1),
        (("test", "gem", "--args", "{"), "--args must be a JSON object", 2),
        (("install", "gme"), "'gme' is not a known environment (gem, ", 2),
        (("remove", "gem"), "gem is not installed in", 2),
    ],
)
def test_what_is_wrong(arguments: tuple[str, ...], said: str, code: int, environment: dict[str, str]) -> None:
    assert said in complaint(prorl("env", *arguments, environment=environment), code)
