from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from sandbox_kind import register
from support.commands import prorl

from prorl_zmq.errors import ConfigError
from prorl_zmq.tools.containers.container import Container
from prorl_zmq.tools.containers.kinds import container_class, known_kinds
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

if TYPE_CHECKING:
    from pathlib import Path


def serve(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `prorl serve`, which starts a process before it refuses a kind, in one of its own."""
    command = [sys.executable, "-P", "-m", "prorl_zmq.cli", "prorl", "serve", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


MAKE = """
import json, sys
from prorl_zmq.errors import ConfigError
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

problems = {}
for kind in sys.argv[1:]:
    try:
        Sandboxes(kind, "root").check()
    except ConfigError as error:
        problems[kind] = error.message
print(json.dumps(problems))
"""


def problems_with(*kinds: str, cwd: Path) -> dict[str, str]:
    """Make sandboxes of each kind in a process that sees the packages of `register`; return the errors."""
    command = [sys.executable, "-P", "-c", MAKE, *kinds]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    problems: dict[str, str] = json.loads(done.stdout)
    return problems


def test_the_built_in_kinds_are_registered() -> None:
    assert known_kinds() == ["apptainer", "bubblewrap", "process"]
    for kind in known_kinds():
        assert issubclass(container_class(kind), Container)
        assert container_class(kind).kind == kind


def test_an_unknown_kind_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'none' is not a kind of sandbox; installed are: apptainer, bubb") as caught:
        Sandboxes("none", tmp_path)
    assert caught.value.fields["key"] == "sandbox.kind"
    (tmp_path / "topology.toml").write_text("[sandbox]\nkind = 'none'\n")
    done = serve("--config", "topology.toml", "--run-dir", str(tmp_path / "run"), cwd=tmp_path)
    assert done.returncode == 2
    assert "'none' is not a kind of sandbox" in done.stderr


def test_a_kind_of_another_package_is_known_to_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"marked": "MarkedContainer", "broken": "Broken", "crashing": "Crashing"}
    targets = {name: f"my_sandbox:{target}" for name, target in kinds.items()}
    register(tmp_path, monkeypatch, **targets, gone="my_none:X")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_sandbox", raising=False)
    seen = " ".join(prorl("doctor", cwd=tmp_path).stdout.split())
    assert "sandboxes: marked │ ok │ one of my own" in seen
    assert "sandboxes: broken │ optional │ the machine lacks a wheel; mount one" in seen
    assert "sandboxes: crashing │ optional │ RuntimeError: no wheel" in seen
    assert "the sandbox kind gone (my_none:X, of my-sandbox) cannot be imported: ModuleNotFound" in seen
    assert prorl("init", cwd=tmp_path).returncode == 0
    assert (
        "one of apptainer, broken, bubblewrap, crashing, gone, marked, process"
        in (tmp_path / "topology.toml").read_text()
    )
    for command in ("serve", "eval"):
        given = (command, *(["tasks.jsonl"] if command == "eval" else []))
        assert "not one of 'apptainer', 'broken', " in prorl(*given, "--sandbox", "none", cwd=tmp_path).stderr
    done = serve("--sandbox", "broken", "--run-dir", str(tmp_path / "run"), cwd=tmp_path)
    assert done.returncode == 2
    assert "the machine lacks a wheel; mount one" in done.stderr
    assert problems_with("marked", cwd=tmp_path) == {}


NO_KINDS = {
    "wrong-class": ("my_sandbox:NoKind", "(my_sandbox:NoKind, of my-sandbox) is not a subclass of Container"),
    "own": ("my_sandbox:MarkedContainer", "has kind = 'marked'; write 'own'"),
    "function": ("json:loads", "(json:loads, of my-sandbox) is not a subclass of Container"),
    "no-attribute": ("my_sandbox:Missing", "has no attribute 'Missing'"),
    "no-module": ("my_none:X", "No module named 'my_none'"),
}


def test_an_entry_point_that_is_no_kind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path, monkeypatch, **{name: target for name, (target, _) in NO_KINDS.items()})
    problems = problems_with(*NO_KINDS, cwd=tmp_path)
    assert problems.keys() == NO_KINDS.keys()
    for name, (target, said) in NO_KINDS.items():
        assert said in problems[name]
        assert target in problems[name]
