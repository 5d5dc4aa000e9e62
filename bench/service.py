"""A service for benchmarks: both brokers and any number of stage processes, in a run folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from prorl_zmq import RolloutClient
from prorl_zmq.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Sequence

START_S = 30.0


class BenchService:
    """Runs for as long as its context.

    Args:
        stages: (role, slots) per stage process.
        topology: content of the brokers' topology file.
    """

    def __init__(self, stages: Sequence[tuple[str, int]], topology: str = "") -> None:
        self._stages = stages
        self._topology = topology
        self._folder = tempfile.TemporaryDirectory(prefix="prorl-bench-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self.front_door = f"ipc://{self._folder.name}/front_door"
        self.backend_broker = f"ipc://{self._folder.name}/backend_broker"

    def __enter__(self) -> Self:
        folder = Path(self._folder.name)
        (folder / "topology.toml").write_text(self._topology)
        for broker in ("backend", "rollout"):
            flags = ["--config", str(folder / "topology.toml"), "--run-dir", str(folder)]
            self._start("-m", "prorl_zmq.cli", "prorl", "broker", broker, *flags)
        script = str(Path(__file__).with_name("stage.py"))
        for role, slots in self._stages:
            self._start(script, role, str(slots), f"ipc://{folder}/stage_events", str(folder))
        until = time.monotonic() + START_S
        with RolloutClient(self.front_door, timeout_s=START_S) as client:
            while len(client.status().stages) < len(self._stages):
                if time.monotonic() > until:
                    raise RuntimeError(f"the service did not start; see {folder}/log")
                client.collect(1, wait_s=0.05)
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            process.wait(20)
        self._folder.cleanup()

    def _start(self, *arguments: str) -> None:
        with (Path(self._folder.name) / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=log,
                stderr=log,
                preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - no threads here
            )
        self._processes.append(process)
