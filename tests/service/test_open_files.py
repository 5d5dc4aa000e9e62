"""Connections that do nothing: once libzmq aborted a broker that had no descriptor left, and again after each start."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import zmq
from support.waiting import until

from prorl_zmq import RolloutClient
from prorl_zmq.errors import Busy, ProrlError
from prorl_zmq.system.open_files import raise_open_files
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.base import PROTOCOL_VERSION
from prorl_zmq.wire.messages.jobs import Phase
from prorl_zmq.wire.messages.stages import StageReport

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 1024
"""Soft and hard; nothing can raise it."""
FLOOD_LIMIT = 4096
"""The guard is a thread: half of this must come while a loaded machine does not run it."""


@pytest.fixture(params=["rollout", "backend"])
def broker(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    limit = FLOOD_LIMIT if request.function is test_idle_connections_end_no_broker else LIMIT
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        path = Path(folder) / ("front_door" if request.param == "rollout" else "backend_broker")
        process = subprocess.Popen(
            [sys.executable, "-m", "prorl_zmq.cli", "prorl", "broker", request.param, "--run-dir", folder],
            cwd="/",
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
        )
        try:
            until(path.exists, "the broker")
            yield process, path
        finally:
            process.terminate()
            process.wait(20)


@contextmanager
def connected(path: Path, count: int) -> Iterator[None]:
    raise_open_files()
    with ExitStack() as opened:
        for _ in range(count):
            opened.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
        yield


@pytest.mark.proof
def test_idle_connections_end_no_broker(broker: tuple[subprocess.Popen[bytes], Path]) -> None:
    process, path = broker
    for _ in range(3):
        with connected(path, 2 * FLOOD_LIMIT):
            time.sleep(0.3)
            assert process.poll() is None
            assert psutil.Process(process.pid).num_fds() < 0.9 * FLOOD_LIMIT
    until(lambda: psutil.Process(process.pid).num_fds() < 0.5 * FLOOD_LIMIT, "it to close them")
    if path.name == "front_door":
        with RolloutClient(f"ipc://{path}") as client:
            client.status()


@pytest.mark.parametrize("broker", ["rollout"], indirect=True)
def test_newcomers_are_told_that_there_are_too_many(broker: tuple[subprocess.Popen[bytes], Path]) -> None:
    process, path = broker
    with RolloutClient(f"ipc://{path}", timeout_s=5) as early:
        early.status()
        with connected(path, int(0.43 * LIMIT) - psutil.Process(process.pid).num_fds()):
            until(lambda: psutil.Process(process.pid).num_fds() > 0.42 * LIMIT, "them to be in")
            early.status()
            late = RolloutClient(f"ipc://{path}", timeout_s=5)
            with late, pytest.raises(Busy, match=f"may have {LIMIT}: close"):
                late.status()
            with connected(path, LIMIT):
                early.status()

        def let_in() -> bool:
            with RolloutClient(f"ipc://{path}", timeout_s=5) as late:
                try:
                    late.status()
                except ProrlError:
                    return False
                return True

        until(let_in, "room for another")
    assert process.poll() is None


def test_a_service_raises_its_limit() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096));"
        "from prorl_zmq.system.open_files import raise_open_files; raise_open_files();"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(4096, 4096)\n"


def test_a_broker_without_descriptors_says_so_once(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder, (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "prorl_zmq.cli", "prorl", "broker", "rollout", "--run-dir", folder],
            cwd="/",
            stderr=log,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT)),
        )
        try:
            until(Path(folder, "stage_events").exists, "the broker")
            with zmq.Context() as context, context.socket(zmq.PUSH) as events:
                events.connect(f"ipc://{folder}/stage_events")
                for number in range(LIMIT):
                    report = StageReport(
                        protocol=PROTOCOL_VERSION,
                        stage_id=f"run-{number}",
                        role=Phase.RUN,
                        node=f"n{number}",
                        slots=1,
                        endpoint=f"ipc://{folder}/{number}",
                        tasks=(),
                    )
                    events.send(codec.encode(report))
                until(lambda: "too many open files" in Path(log.name).read_text(), "it to be said")
        finally:
            process.terminate()
            assert process.wait(20) == 0
        said = Path(log.name).read_text()
    assert said.count("too many open files") == 1
    assert f"may have {LIMIT}, and the system lets it have {LIMIT}; raise that limit" in said
    assert "malformed" not in said


def test_programs_of_agents_keep_the_limit_that_they_would_have_without_us() -> None:
    code = (
        "import asyncio, pathlib, resource, sys, tempfile\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 4096))\n"
        "from prorl_zmq.system.open_files import raise_open_files\n"
        "from prorl_zmq.tools.sandbox.sandboxes import Sandboxes\n"
        "from prorl_zmq.stages.grading.grader_pool import GraderPool\n"
        "async def main(folder):\n"
        "    raise_open_files()\n"
        "    sandboxes = Sandboxes('process', pathlib.Path(folder, 's'))\n"
        "    sandbox = await sandboxes.create('one')\n"
        "    done = await sandbox.exec(('sh', '-c', 'ulimit -Sn'), 20)\n"
        "    await sandbox.close(); sandboxes.close()\n"
        "    async with GraderPool(1) as graders:\n"
        "        limits = await graders.call(resource.getrlimit, resource.RLIMIT_NOFILE, returns=list)\n"
        "    print(done.stdout.decode().strip(), limits, resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "with tempfile.TemporaryDirectory(prefix='prorl-t-') as folder: asyncio.run(main(folder))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd="/"
    )
    assert done.stdout == "200 [200, 4096] (4096, 4096)\n"


def test_a_child_begins_with_the_limit_that_its_parent_began_with() -> None:
    code = (
        "import os, resource, subprocess, sys; from functools import partial\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 4096))\n"
        "from prorl_zmq.system.open_files import raise_open_files; raise_open_files()\n"
        "from prorl_zmq.system.processes import begin_session\n"
        "subprocess.run(['sh', '-c', 'ulimit -Sn'], preexec_fn=partial(begin_session, os.getpid()), check=True)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "200\n"
