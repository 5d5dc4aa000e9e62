"""`prorl k8s`: what it prints, and what it refuses."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.commands import prorl

if TYPE_CHECKING:
    from pathlib import Path

RENDER = ("render", "--image", "registry.example/prorl:0.1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("render",), "Missing option '--image'"),
        ((*RENDER, "--nodes", "3", "--daemon-set"), "exclude each other: give one of them"),
        ((*RENDER, "--nodes", "-1"), "'--nodes'"),
        ((*RENDER, "--cpu", "many"), "--cpu 'many': write it as in --cpu 16"),
        ((*RENDER, "--config", "none.toml"), "none.toml: No such file"),
    ],
)
def test_wrong_flags(arguments: tuple[str, ...], said: str) -> None:
    done = prorl("k8s", *arguments)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert said in line


def test_keys_are_made_once_and_not_shown_to_a_terminal(tmp_path: Path) -> None:
    first, second = (prorl("k8s", "keys", "--service", tmp_path / "service") for _ in range(2))
    names = [item["metadata"]["name"] for item in json.loads(first.stdout)["items"]]
    assert names == [f"prorl-keys-{part}" for part in ("service", "node", "client", "operator")]
    assert first.stdout == second.stdout
    control, terminal = pty.openpty()
    command = [sys.executable, "-P", "-m", "prorl_zmq.cli", "prorl", "k8s", "keys", "--service", f"{tmp_path}/service"]
    done = subprocess.run(command, stdout=terminal, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    os.close(terminal)
    os.close(control)
    assert done.returncode == 2
    assert "| kubectl apply -f -" in done.stderr
