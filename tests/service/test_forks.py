"""The processes of `prorl serve` are forks: which code they run, who owns them, and which modules are rejected."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from command_lines import line_of, words_of
from support.services import PROCESS, Service
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 60.0
PROGRAMS = [sys.executable, "-P", "-m", "prorl_zmq.cli"]
HANDLER = """
from prorl_zmq.stages.handler import AgentHandler
import msgspec
class Instance(msgspec.Struct):
    pass
class OwnHandler(AgentHandler):
    task = "own"
    instance_type = Instance
    async def run(self, phase): return {}
    async def eval(self, phase): return None
"""
THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, name='watcher', daemon=True).start()\n"


def install(folder: Path, version: str, more: str = "") -> None:
    """Install a package with a task."""
    info = folder / "own_tasks.dist-info"
    info.mkdir(exist_ok=True)
    (folder / "own_tasks.py").write_text(textwrap.dedent(HANDLER) + more)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: own-tasks\nVersion: {version}\n")
    (info / "RECORD").write_text(f"own_tasks.py,sha256={version},9\n")
    (info / "entry_points.txt").write_text("[prorl_zmq.handlers]\nown = own_tasks:OwnHandler\n")


@contextmanager
def serving() -> Iterator[Service]:
    """A service in a folder from which its processes can import."""
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as name:
        folder = Path(name)
        install(folder, "1")
        served = Service(folder, PROCESS, interpreter=True, PYTHONPATH=name)
        try:
            served.wait_ready()
            yield served
        finally:
            served.close()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def replaced(served: Service, words: str) -> int:
    """Kill a process; return the one that takes its place."""
    before = served.child(words)
    os.kill(before, signal.SIGKILL)
    until(lambda: [one for one in served.children() if words in line_of(one) and one.pid != before], f"another {words}")
    return served.child(words)


def test_processes_live_on_without_the_fork_server_and_restart_with_the_code_of_then() -> None:
    with serving() as served:
        stages = [served.child(f"stage_{role}.json") for role in ("init", "run", "eval")]
        others = [served.child(f"{each}.json") for each in ("rollout_broker", "backend_broker", "engine")]
        for pid in (*stages, *others):
            assert psutil.Process(pid).ppid() == served.process.pid
            assert os.getsid(pid) == pid
        server = served.child("fork_server_process")
        os.kill(server, signal.SIGKILL)
        assert replaced(served, "stage_eval.json") not in stages
        assert all(is_running(pid) for pid in (*stages[:2], *others))
        second = served.child("fork_server_process")
        assert second != server
        install(served.folder, "2")
        replaced(served, "stage_init.json")
        served.wait_line("own-tasks was upgraded from 1 to 2: processes that are started from now on run the new code")
        assert served.child("fork_server_process") != second
        assert not is_running(second)
        left = [one.pid for one in served.children()]
        served.process.kill()
        served.process.wait(LIMIT_S)
        until(lambda: not any(is_running(pid) for pid in left), "the end of all processes")


@pytest.mark.proof(quick=True)
def test_a_service_ends_while_its_fork_server_stands_still() -> None:
    with serving() as served:
        server = served.child("fork_server_process")
        os.kill(server, signal.SIGSTOP)
        os.kill(served.child("stage_eval.json"), signal.SIGKILL)
        served.wait_line("eval-0 was ended by a signal")
        processes = served.children()
        served.close()
        assert served.process.returncode == 0
        assert not any(is_running(one.pid) for one in processes)


@pytest.mark.proof(quick=True)
def test_a_module_that_starts_a_thread_is_refused_by_serve_and_taken_by_a_stage_process(tmp_path: Path) -> None:
    install(tmp_path, "1", THREAD)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run_dir = Path(tempfile.mkdtemp(prefix="prorl-t-"))
    try:
        command = [*PROGRAMS, "prorl", "serve", "--sandbox", "process", "--run-dir", str(run_dir)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        assert done.returncode == 2
        (line,) = [line for line in done.stderr.splitlines() if "own_tasks" in line]
        assert line.startswith("prorl: the task own (own_tasks:OwnHandler, of own-tasks): the module own_tasks starts")
        assert "a thread (watcher) when it is imported" in line
        assert "`__init__`" in line
        command = [*PROGRAMS, "prorl-stage", "--role", "init", "--sandbox", "process", "--run-dir", str(run_dir)]
        with subprocess.Popen([*command, "--task", "own"], env=environment, stderr=subprocess.PIPE, text=True) as stage:
            assert stage.stderr is not None
            assert "8 slots" in stage.stderr.readline()
            assert words_of(psutil.Process(stage.pid))[:2] == [sys.executable, "-P"]
            stage.terminate()
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
