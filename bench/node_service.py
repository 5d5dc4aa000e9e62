"""A service with a folder for bench/nodes.py: its brokers alone, here or on a host; and its rollout broker's usage.

Keys are on, as always with a folder. All of its stage processes have the handlers of bench/handlers.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from handlers import HANDLERS

from prorl_zmq import RolloutClient
from prorl_zmq.service.service_folder import ServiceFolder
from prorl_zmq.system.processes import die_with_parent
from prorl_zmq.wire.messages.jobs import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

START_S = 120.0
BROKERS = "brokers"
"""Their name among the commands."""
PRORL = (sys.executable, "-P", "-m", "prorl_zmq.cli", "prorl")


class NodeService:
    """Runs for as long as its context.

    Args:
        folder: an empty one.
        topology: the text of its topology file.
        prefix: what to put before the command of its brokers, for another host.
        address: where they bind.
    """

    def __init__(self, folder: Path, topology: str, prefix: Sequence[str] = (), address: str = "127.0.0.1") -> None:
        self.path = folder / "service"
        self.logs = folder / "logs"
        self._offer = folder / "handlers"
        self._command = ("serve", "--service", str(self.path), "--brokers-only", "--address", address)
        self._prefix = prefix
        self.path.mkdir(mode=0o700)
        self.logs.mkdir()
        (self.path / "topology.toml").write_text(topology)
        info = self._offer / "bench_handlers-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-handlers\nVersion: 1\n")
        points = [f"{task} = handlers:{handler.__name__}\n" for task, handler in HANDLERS.items()]
        (info / "entry_points.txt").write_text(f"[prorl_zmq.handlers]\n{''.join(points)}")
        self.commands: dict[str, subprocess.Popen[bytes]] = {}
        """The brokers' and the nodes', by name."""

    def __enter__(self) -> Self:
        try:
            self.start(BROKERS, self._prefix, *self._command)
            until = time.monotonic() + START_S
            while not ServiceFolder.is_made(self.path):
                if time.monotonic() > until or self.commands[BROKERS].poll() is not None:
                    raise RuntimeError(f"the brokers did not start:\n{self.log('brokers')}")
                time.sleep(0.05)
            ServiceFolder.open(self.path).wait_for_brokers(START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        brokers = [process for name, process in self.commands.items() if name == BROKERS]
        nodes = [process for process in self.commands.values() if process not in brokers]
        for group in (nodes, brokers):  # a node waits some seconds for brokers that have ended
            for process in group:
                if process.poll() is None:
                    process.terminate()
            for process in group:
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def start(self, name: str, prefix: Sequence[str], *arguments: str) -> None:
        """Start a `prorl` command, which ends with the service."""
        environment = {**os.environ, "PYTHONPATH": f"{self._offer}:{Path(__file__).parent}"}
        with (self.logs / name).open("ab") as log:
            process = subprocess.Popen(
                [*prefix, *PRORL, *arguments],
                stdout=log,
                stderr=log,
                env=environment,
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),  # noqa: PLW1509 - no threads of ours
            )
        self.commands[name] = process

    def log(self, name: str) -> str:
        return (self.logs / name).read_text(errors="replace")

    def stage_events(self) -> str:
        return ServiceFolder.open(self.path).stage_events()["rollout-0"]

    def node_keys(self) -> str:
        return str(ServiceFolder.open(self.path).keys("node"))

    def client(self) -> RolloutClient:
        return RolloutClient(service=self.path, timeout_s=120)

    def broker(self) -> Usage:
        """Return what the rollout broker has used; it must be on this host."""
        announced = ServiceFolder.open(self.path).announcement("rollout-0")
        assert announced is not None
        return usage(announced.pid)

    def nodes(self) -> set[str]:
        """Return the nodes that are there with slots for all stages."""
        with self.client() as client:
            stages = client.status().stages
        there = [
            {one.node for one in stages if one.role == role and one.slots}
            for role in (Phase.INIT, Phase.RUN, Phase.EVAL)
        ]
        return set.intersection(*there)

    def wait_nodes(self, count: int) -> None:
        until = time.monotonic() + START_S
        while len(there := self.nodes()) < count:
            if time.monotonic() > until:
                raise TimeoutError(f"of {count} nodes there are {sorted(there)}")
            time.sleep(0.2)


@dataclass(frozen=True)
class Usage:
    """What a process has used until now."""

    pid: int
    main_s: float
    """CPU seconds of its first thread."""
    other_s: float
    """And of the others: libzmq's."""
    files: int
    """Descriptors that it has open now."""
    written_bytes: int


def usage(pid: int) -> Usage:
    threads = {int(path.name): int((path / "schedstat").read_text().split()[0]) for path in tasks(pid)}
    main = threads.pop(pid)
    written = next(line for line in Path(f"/proc/{pid}/io").read_text().splitlines() if line.startswith("wchar"))
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Usage(pid, main / 1e9, sum(threads.values()) / 1e9, files, int(written.split()[1]))


def tasks(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())
