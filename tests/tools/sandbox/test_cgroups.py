"""The kernel's limits on a sandbox as a whole."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from prorl_zmq.tools.containers import cgroups
from prorl_zmq.tools.containers.cgroups import SLACK, SLACK_BYTES, Cgroups, make_cgroups
from prorl_zmq.tools.containers.specification import Limits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FORKS = (
    "import os, signal, sys\n"
    "for each in sys.argv[1:]: os.write(int(each), b'0')\n"
    "children = []\n"
    "try:\n"
    "    while len(children) < 1000:\n"
    "        pid = os.fork()\n"
    "        if not pid:\n"
    "            signal.pause()\n"
    "        children.append(pid)\n"
    "except BlockingIOError:\n"
    "    pass\n"
    "print(len(children))\n"
    "for each in children:\n"
    "    os.kill(each, signal.SIGKILL)\n"
    "    os.waitpid(each, 0)\n"
)
HOARD = f"""
import os, socket, sys
for each in sys.argv[1:]: os.write(int(each), b"0")
ours, theirs = socket.socketpair()
for _ in range({(SLACK_BYTES + 200 * 2**20) >> 23}):
    file = os.memfd_create("x")
    os.write(file, bytes(2**23))
    socket.send_fds(ours, [b"x"], [file])
    os.close(file)
"""
LIMITS = Limits(processes=10, memory_bytes=100 * 2**20)


@pytest.fixture
def made() -> Iterator[Cgroups]:
    made = make_cgroups(1, LIMITS)
    if not made.limits >= {"pids", "memory"}:
        made.close()
        pytest.skip("this machine delegates no cgroups of pids and memory")
    yield made
    made.close()
    assert not any(folder.exists() for folder in made._folders)


def inside(made: Cgroups, code: str) -> subprocess.CompletedProcess[str]:
    descriptors = made.descriptors
    command = [sys.executable, "-c", code, *map(str, descriptors)]
    return subprocess.run(command, pass_fds=descriptors, capture_output=True, text=True, check=False)


def test_forks_beyond_the_limit_are_refused(made: Cgroups) -> None:
    assert int(inside(made, FORKS).stdout) == 10 + SLACK - 1


def test_memory_that_nobody_counts_is_limited(made: Cgroups) -> None:
    """Pages of a memory file that no process has open, but a message on its way does."""
    assert inside(made, HOARD).returncode == -signal.SIGKILL


def test_what_a_killed_server_left_is_removed(made: Cgroups) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    left = [folder.with_name(f"{cgroups.PREFIX}{ended.pid}-1") for folder in made._folders]
    for folder in left:
        folder.mkdir()
    make_cgroups(2, LIMITS).close()
    assert not any(folder.exists() for folder in left)
    assert all(folder.exists() for folder in made._folders)


def test_a_process_that_is_added_counts(made: Cgroups) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        made.add(process.pid)
        assert all((folder / "cgroup.procs").read_text() == f"{process.pid}\n" for folder in made._folders)
        process.send_signal(signal.SIGKILL)


def test_a_node_without_cgroups_does_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where nothing is mounted, a folder that looks like one could be made, and could not be removed."""
    monkeypatch.setattr(cgroups, "MOUNTS", tmp_path)
    for controller in cgroups.CONTROLLERS:
        (tmp_path / controller / cgroups._own_cgroup(controller or "").lstrip("/")).mkdir(parents=True, exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    made = make_cgroups(1, LIMITS)
    assert (made.limits, made.descriptors) == (set(), [])
    assert sorted(tmp_path.rglob("*")) == before
