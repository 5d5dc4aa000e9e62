"""A service for bench/explain.py: real brokers, the processes of `explain_process.py`, and the submission of jobs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import msgspec

from prorl_zmq import AsyncRolloutClient, RolloutClient
from prorl_zmq.brokers.backends.backend_broker import BackendBroker
from prorl_zmq.brokers.journal.journal import Journal
from prorl_zmq.brokers.rollout.rollout_broker import RolloutBroker
from prorl_zmq.client.submission import Submission
from prorl_zmq.client.trace_log import TraceLog
from prorl_zmq.config import BackendBrokerSettings, RolloutBrokerSettings, ServiceSettings, Topology
from prorl_zmq.system.processes import die_with_parent
from prorl_zmq.system.run_folder import own_run_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prorl_zmq import Job, Trajectory

START_S = 20.0
SETTINGS = RolloutBrokerSettings(heartbeat_s=0.2, lease_s=1.0)
SCRIPT = Path(__file__).with_name("explain_process.py")


class StagedService:
    """Runs for as long as its context.

    Args:
        processes: what there is of them (see `explain_process`).
        schedule: what limits the jobs of a backend.
    """

    def __init__(self, processes: Sequence[str], schedule: Literal["kv", "slots"] = "kv") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="prorl-x-")
        self.folder = own_run_dir(Path(self._folder.name))
        topology = Topology(
            service=ServiceSettings(run_dir=str(self.folder)),
            rollout_broker=SETTINGS,
            backend_broker=BackendBrokerSettings(schedule=schedule),
        )
        self.front_door = topology.endpoint(SETTINGS.front_door)
        self._brokers = [BackendBroker(topology, None), RolloutBroker(topology, Journal())]
        self._threads = [threading.Thread(target=broker.run) for broker in self._brokers]
        self._places = (topology.endpoint(SETTINGS.stage_events), topology.endpoint(topology.backend_broker.endpoint))
        self._processes = tuple(processes)
        self._child: subprocess.Popen[str] | None = None
        self._pids: dict[str, int] = {}
        self._renewing: threading.Thread | None = None
        self._ending = threading.Event()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        if self._renewing is not None:
            self._renewing.join(20)
        if self._child is not None:
            self._child.terminate()
            self._child.wait(20)
            if self._child.stdout is not None:
                self._child.stdout.close()
        for broker, thread in zip(self._brokers, self._threads, strict=True):
            broker.stop()
            thread.join(10)
        self._folder.cleanup()

    def kill(self, process: str) -> None:
        """Kill one of the processes; it is not started again."""
        os.kill(self._pids[process], signal.SIGKILL)

    def drain_engines(self) -> None:
        """Have the engines take no more jobs."""
        with RolloutClient(self.front_door) as client:
            for status in client.backends.list():
                client.backends.drain(status.backend.backend_id)

    def add_engines(self) -> None:
        """Have them take jobs again."""
        with RolloutClient(self.front_door) as client:
            for status in client.backends.list():
                client.backends.add(status.backend)

    def renew_weights(self, every_s: float) -> None:
        """Have the engines take new weights every so often, until the service ends."""

        def renew() -> None:
            with RolloutClient(self.front_door) as client:
                for version in count(1):
                    if self._ending.wait(every_s):
                        return
                    client.set_weight_version(version)

        self._renewing = threading.Thread(target=renew)
        self._renewing.start()

    def run(
        self,
        jobs: Sequence[Job],
        feed: Feed,
        out: Path,
        after_s: float = 0.0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Take jobs through the service, and leave a folder as `prorl submit --out` does, without arrays.

        After `after_s`, `meanwhile` is called.
        """
        out.mkdir(parents=True, exist_ok=True)
        asyncio.run(self._run(jobs, feed, out, after_s, meanwhile))

    async def _run(
        self, jobs: Sequence[Job], feed: Feed, out: Path, after_s: float, meanwhile: Callable[[], None]
    ) -> None:
        async with AsyncRolloutClient(self.front_door) as client, TraceLog(client, out) as traces:
            with (out / "results.jsonl").open("ab") as file:

                def take(trajectory: Trajectory) -> None:
                    file.write(msgspec.json.encode(trajectory.result) + b"\n")
                    traces.note(trajectory.job_id)
                    feed.ended()

                asyncio.get_running_loop().call_later(after_s, meanwhile)
                await feed.run(client, jobs, take)

    def _start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, str(SCRIPT), *self._places, str(self.folder), *self._processes],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),  # noqa: PLW1509 - it only asks the kernel
            )
        assert self._child.stdout is not None
        self._pids = dict(zip(self._processes, map(int, self._child.stdout.readline().split()), strict=True))
        until = time.monotonic() + START_S
        stages = sum(not name.startswith("engine:") for name in self._processes)
        with RolloutClient(self.front_door, timeout_s=START_S) as client:
            while len(client.status().stages) < stages or len(client.backends.list()) < len(self._processes) - stages:
                if time.monotonic() > until or self._child.poll() is not None:
                    raise RuntimeError(f"the service did not start:\n{(self.folder / 'log').read_text()}")
                client.collect(1, wait_s=0.05)


class Feed:
    """Submits all jobs at once."""

    async def run(self, client: AsyncRolloutClient, jobs: Sequence[Job], take: Callable[[Trajectory], None]) -> None:
        """Take jobs through a service."""
        await Submission(client, jobs, take).run()

    def ended(self) -> None:
        """A result has come."""


class Drip(Feed):
    """Submits a job every so often."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s

    async def run(self, client: AsyncRolloutClient, jobs: Sequence[Job], take: Callable[[Trajectory], None]) -> None:
        """Take jobs through a service."""
        sending = asyncio.create_task(self._send(client, jobs))
        left = len(jobs)
        while left:
            for trajectory in await client.collect(wait_s=1.0):
                take(trajectory)
                left -= 1
        await sending

    async def _send(self, client: AsyncRolloutClient, jobs: Sequence[Job]) -> None:
        for job in jobs:
            await client.submit(job)
            await asyncio.sleep(self._every_s)


class Window(Drip):
    """Has only so many jobs in flight."""

    def __init__(self, jobs: int) -> None:
        super().__init__(0.0)
        self._room = asyncio.Semaphore(jobs)

    def ended(self) -> None:
        """A result has come."""
        self._room.release()

    async def _send(self, client: AsyncRolloutClient, jobs: Sequence[Job]) -> None:
        for job in jobs:
            await self._room.acquire()
            await client.submit(job)
