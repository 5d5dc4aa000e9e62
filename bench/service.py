"""A service for benchmarks: both brokers and any number of stage processes, with their own run folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from prorl_zmq import RolloutClient
from prorl_zmq.system.processes import die_with_parent
from prorl_zmq.system.run_folder import own_run_dir

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_zmq.wire.messages.jobs import SandboxKind

START_S = 45.0


class BenchService:
    """Runs for as long as its context.

    Args:
        stages: (role, slots) per stage process.
        tcp: put the front door on a free TCP port of loopback instead of ipc.
        loopback: put everything there.
        in_memory: keep the rollout broker's journal in memory instead of on disk.
        sandbox: the kind of sandboxes, and the image that they start from.
    """

    def __init__(
        self,
        stages: Sequence[tuple[str, int]],
        *,
        tcp: bool = False,
        loopback: bool = False,
        in_memory: bool = False,
        sandbox: tuple[SandboxKind, str] = ("process", ""),
    ) -> None:
        self._stages = stages
        self._in_memory = in_memory
        self._sandbox = sandbox
        self._folder = tempfile.TemporaryDirectory(prefix="prorl-bench-")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.folder = own_run_dir(Path(self._folder.name))
        """Where the sockets and the log are."""
        self.front_door = self._endpoint("front_door", tcp=tcp or loopback)
        self.stage_events = self._endpoint("stage_events", tcp=loopback)
        self.backend_broker = self._endpoint("backend_broker", tcp=loopback)

    def __enter__(self) -> Self:
        try:
            self._start_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            process.wait(20)
        self._folder.cleanup()

    def kill_stage(self, role: str) -> None:
        """Kill one stage process of a role (SIGKILL); it is not started again."""
        next(process for name, process in self._processes.items() if name.startswith(f"{role}-")).kill()

    def pids(self) -> dict[str, int]:
        """Give the processes by what they are, such as `backend broker`, `rollout broker` and `init-0`."""
        return {name: process.pid for name, process in self._processes.items()}

    def start_engine(self, *command: str) -> None:
        """Start an engine, and wait until it is registered.

        Args:
            command: a script and its arguments; none: an embedded engine.
        """
        flags = ["--connect", self.backend_broker, "--name", "engine", "--run-dir", str(self.folder)]
        self._start("engine", *(command or ("-P", "-m", "prorl_zmq.cli", "prorl-engine", *flags)))
        until = time.monotonic() + START_S
        with RolloutClient(self.front_door, timeout_s=START_S) as client:
            while not client.backends.list():
                self._check(until)
                client.collect(1, wait_s=0.05)

    def _endpoint(self, name: str, *, tcp: bool) -> str:
        return f"tcp://127.0.0.1:{free_port()}" if tcp else f"ipc://{self.folder}/{name}"

    def _start_all(self) -> None:
        topology = self.folder / "topology.toml"
        topology.write_text(
            f'[rollout_broker]\nfront_door = "{self.front_door}"\nstage_events = "{self.stage_events}"\n'
            + ('journal = ""\n' if self._in_memory else "")
            + f'[backend_broker]\nendpoint = "{self.backend_broker}"\n'
        )
        for broker in ("backend", "rollout"):
            flags = ["--config", str(topology), "--run-dir", str(self.folder)]
            self._start(f"{broker} broker", "-P", "-m", "prorl_zmq.cli", "prorl", "broker", broker, *flags)
        script = str(Path(__file__).with_name("stage.py"))
        for number, (role, slots) in enumerate(self._stages):
            place = (self.stage_events, str(self.folder))
            self._start(f"{role}-{number}", script, role, str(slots), *place, *self._sandbox)
        until = time.monotonic() + START_S
        while self._log().count(": ready: ") < 2:
            self._check(until)
            time.sleep(0.05)
        with RolloutClient(self.front_door, timeout_s=START_S) as client:
            while len(client.status().stages) < len(self._stages):
                self._check(until)
                client.collect(1, wait_s=0.05)

    def _log(self) -> str:
        return (self.folder / "log").read_text()

    def _check(self, until: float) -> None:
        if time.monotonic() > until or any(process.poll() is not None for process in self._processes.values()):
            raise RuntimeError(f"the service did not start:\n{self._log()}")

    def _start(self, name: str, *arguments: str) -> None:
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=log,
                stderr=log,
                preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - no threads of ours yet
            )
        self._processes[name] = process


def free_port() -> int:
    """Give a TCP port of loopback that was free a moment ago, another one each time."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in _given:
            _given.add(port)
            return port


_given: set[int] = set()
