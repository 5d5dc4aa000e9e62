"""`prorl harness`, as a person uses it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tiny_harness
from needed import usable
from support.commands import prorl

if TYPE_CHECKING:
    from subprocess import CompletedProcess

PRORL = str(Path(sys.executable).with_name("prorl"))


def run(*arguments: str, cwd: Path, **environment: str) -> CompletedProcess[str]:
    """Run the command as a process of its own if a package is on its PYTHONPATH: one in this process has no other."""
    variables = {**os.environ, "COLUMNS": "100", **environment}
    if "PYTHONPATH" not in environment:
        return prorl("harness", *arguments, cwd=cwd, environment=variables)
    line = [PRORL, "harness", *arguments]
    return subprocess.run(line, cwd=cwd, env=variables, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.proof
def test_install_list_test_remove(tmp_path: Path) -> None:
    usable("bubblewrap")
    offered = tiny_harness.offer(tmp_path / "offered")
    installed = run("install", "tiny==2.0", cwd=tmp_path, **offered)
    assert installed.returncode == 0, installed.stderr
    assert installed.stderr == "installing tiny 2.0 from PyPI\n"
    assert installed.stdout == f"{offered['PRORL_HARNESSES']}/tiny/2.0\n"
    listed = next(line for line in run("list", cwd=tmp_path, **offered).stdout.splitlines() if "tiny" in line)
    assert "2.0" in listed
    assert "tiny-harness" in listed
    tested = run("test", "tiny", "--sandbox", "bubblewrap", cwd=tmp_path, **offered)
    assert tested.stdout.startswith("tiny 2.0 in bubblewrap followed the instructions: 2 calls of the model"), (
        tested.stderr
    )
    failed = run("test", "tiny", "--sandbox", "process", cwd=tmp_path, **offered, TINY_MOOD="silent")
    assert failed.returncode == 1
    assert "tiny 2.0 in process did not follow the instructions: the harness tiny made no model call" in failed.stderr
    assert "it has nothing to say" in failed.stderr
    assert run("remove", "tiny==2.0", cwd=tmp_path, **offered).returncode == 0
    missing = run("test", "tiny", cwd=tmp_path, **offered)
    assert missing.returncode == 2
    assert "run: prorl harness install tiny" in missing.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("install", "nothing"), "'nothing' is not a kind of harness"),
        (("install", "codex==a b"), "'a b' is not a version"),
        (("test", "command"), "nothing is installed for it"),
        (("test", "codex", "--sandbox", "nothing"), "'nothing' is not one of"),
        (("remove", "codex"), "codex is not installed in"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = run(*arguments, "--into", "harnesses", cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
