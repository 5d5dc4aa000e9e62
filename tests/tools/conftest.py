"""What the tests of the tools share: each kind of sandbox that this machine can make, and a look at the processes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from prorl_zmq.tools.sandbox.bubblewrap import bubblewrap_problem
from prorl_zmq.tools.sandbox.sandboxes import Sandboxes

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(params=["bubblewrap", "process"])
def kind(request: pytest.FixtureRequest) -> Any:
    """A kind of sandbox; skipped where this machine cannot make it."""
    if request.param == "bubblewrap" and (problem := bubblewrap_problem()):
        pytest.skip(problem)
    return request.param


@pytest.fixture
def sandboxes(kind: Any, tmp_path: Path) -> Sandboxes:
    return Sandboxes(kind, tmp_path / "sandboxes")


@pytest.fixture
def survivors() -> Callable[[str], list[str]]:
    """Give the command lines of processes with a mark in them, once they have had 5 s to go away."""

    def look(mark: str) -> list[str]:
        deadline = time.monotonic() + 5
        while found := running(mark):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return found

    return look


def running(mark: str) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if mark in line:
                found.append(line)
    return found
