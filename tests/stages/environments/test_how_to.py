"""The commands of the pages of NeMo Gym, OpenEnv and tau2, in their order, with servers of the same contracts."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from documents import NEMO_GYM_COMMANDS, OPENENV_COMMANDS, TAU2_COMMANDS
from gym_server import GymServer
from openenv_server import GUESS, OpenEnvServer
from support.commands import prorl
from support.loops import serving

if TYPE_CHECKING:
    from subprocess import CompletedProcess

TESTS = Path(__file__).parents[2]
BACKEND = """
import pathlib, zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    files = {path.name: path.read_text() for path in pathlib.Path().glob("*tau2*.py")}
    files["tau2-1.0.1.dist-info/METADATA"] = "Metadata-Version: 2.1\\nName: tau2\\nVersion: 1.0.1\\n"
    files["tau2-1.0.1.dist-info/WHEEL"] = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    files["tau2-1.0.1.dist-info/RECORD"] = "".join(f"{name},,\\n" for name in (*files, "tau2-1.0.1.dist-info/RECORD"))
    with zipfile.ZipFile(f"{folder}/tau2-1.0.1-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return "tau2-1.0.1-py3-none-any.whl"
"""


def done(line: str, folder: Path, **environment: str) -> CompletedProcess[str]:
    own = {**os.environ, "PRORL_ENVIRONMENTS": str(folder / "environments"), **environment}
    ended = prorl(*shlex.split(line)[1:], cwd=folder, environment=own)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def at(line: str, server: Any) -> dict[str, str]:
    """Return the variable that a line exports, with the address of a server."""
    variable, name, _ = line.removeprefix("export ").split("=")
    return {variable: f"{name}={server.url}"}


def test_nemo_gym(tmp_path: Path) -> None:
    rows = [{"responses_create_params": {"input": "Add 3."}, "initial_count": 3, "expected_count": 6}]
    (tmp_path / "example.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    export, trial, validate = NEMO_GYM_COMMANDS
    server = GymServer()
    with serving(server):
        said = done(trial, tmp_path, **at(export, server)).stdout
    assert "user: Add 3." in said
    assert "done" in said
    assert [path for path, _, _ in server.requests] == ["/seed_session", "/verify"]
    assert "nemo-gym" in done(validate, tmp_path).stdout


def test_openenv(tmp_path: Path) -> None:
    export, trial = OPENENV_COMMANDS
    server = OpenEnvServer(GUESS)
    with serving(server):
        said = done(trial, tmp_path, **at(export, server)).stdout
    assert said.endswith("rewards: {'main': 1.0}; done\n")


@pytest.mark.proof
def test_tau2(tmp_path: Path) -> None:
    clone = tmp_path / "tau2-bench"
    clone.mkdir()
    shutil.copy(TESTS / "tau2_contract.py", clone)
    start = "import sys, tau2_contract; sys.modules.update(tau2_contract.modules())\n__path__ = []\n"
    (clone / "tau2.py").write_text(start)
    (clone / "backend.py").write_text(BACKEND)
    build = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (clone / "pyproject.toml").write_text(build)
    _, install, trial = TAU2_COMMANDS
    assert done(install, tmp_path).stdout == f"{tmp_path}/environments/tau2/own\n"
    said = done(trial, tmp_path).stdout
    assert "--- user sees: system: <scenario>" in said
    assert "assistant: Hi! How can I help you today?" in said
    assert "tools: create_task, check_notifications" in said
