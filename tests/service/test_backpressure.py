"""Readers that are fast, slow and dead, before a rollout broker in a process of its own, with large trajectories."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import zmq
from support.waiting import until

from prorl_zmq import Job, RolloutClient
from prorl_zmq.data.trajectory import Role
from prorl_zmq.data.trajectory_builder import TrajectoryBuilder
from prorl_zmq.errors import Busy
from prorl_zmq.system.processes import die_with_parent
from prorl_zmq.system.run_folder import own_run_dir
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.base import PROTOCOL_VERSION
from prorl_zmq.wire.messages.jobs import Phase
from prorl_zmq.wire.messages.stages import PhaseDone, StageCommand, StageReport, StartPhase, Task
from prorl_zmq.wire.sockets import bind, connect, open_socket

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S = 60.0
TOKENS = 20_000
SLOTS = READY = 4
HELD_BYTES = 2**24
TOPOLOGY = f"""
[rollout_broker]
heartbeat_s = 0.2
max_jobs = 1000
max_held_bytes = {HELD_BYTES}
keep_collected_bytes = 0
ready_limit = {READY}
"""
DEAD_READER = """
import os, signal, sys
from prorl_zmq import Job, RolloutClient

with RolloutClient(sys.argv[1], session="dead") as client:
    client.submit(Job(task="large", instance={}) for _ in range(100))
    got = len(client.collect(1))
    os.kill(os.getpid(), signal.SIGSTOP)
    got += len(list(client.stream(timeout_s=60)))
sys.exit(got != 100)
"""


class Pipeline:
    """Stage processes of all roles, in one thread of the test, that end each phase at once."""

    def __init__(self, run_dir: Path) -> None:
        builder = TrajectoryBuilder()
        builder.begin_turn(Role.USER)
        builder.add_context(np.zeros(TOKENS, np.int32))
        self._block = builder.block()
        self._run_dir = run_dir
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _work(self) -> None:
        with zmq.Context() as context:
            inboxes, poller = {}, zmq.Poller()
            events = open_socket(context, zmq.PUSH)
            connect(events, f"ipc://{self._run_dir}/stage_events")
            for role in Phase:
                inbox = open_socket(context, zmq.PULL)
                inboxes[inbox] = (role, bind(inbox, f"ipc://{self._run_dir}/{role}"))
                poller.register(inbox, zmq.POLLIN)
            running: dict[Phase, dict[str, int]] = {role: {} for role in Phase}
            while not self._stopped.is_set():
                for role, endpoint in inboxes.values():
                    self._report(events, role, endpoint, running[role])
                for _ in range(10):
                    for inbox, _ in poller.poll(50):
                        command = codec.decode(inbox.recv_multipart()[0], StageCommand)
                        if isinstance(command, StartPhase):
                            self._done(events, command)
            for socket in (events, *inboxes):
                socket.close()

    def _report(self, events: zmq.Socket[bytes], role: Phase, endpoint: str, running: dict[str, int]) -> None:
        report = StageReport(
            protocol=PROTOCOL_VERSION,
            stage_id=f"{role}-1",
            role=role,
            node="local",
            slots=SLOTS,
            endpoint=endpoint,
            tasks=(Task("large"),),
            welcomed=True,
            running=running,
        )
        events.send(codec.encode(report))

    def _done(self, events: zmq.Socket[bytes], start: StartPhase) -> None:
        more: dict[str, Any] = {}
        if start.phase == Phase.RUN:
            more = {"tokens": TOKENS, "turns": 1}
        elif start.phase == Phase.EVAL:
            more = {"reward": 1.0}
        done = PhaseDone(
            stage_id=f"{start.phase}-1", job_id=start.job_id, attempt=start.attempt, phase=start.phase, **more
        )
        events.send_multipart([codec.encode(done), *([self._block.data] if more.get("tokens") else [])])


class Broker:
    """The rollout broker's process, and the stages behind it."""

    def __init__(self, folder: Path) -> None:
        config = own_run_dir(folder) / "topology.toml"
        config.write_text(TOPOLOGY)
        self.front_door = f"ipc://{folder}/front_door"
        self._process = self.start(
            "-P", "-m", "prorl_zmq.cli", "prorl", "broker", "rollout", "--config", str(config), "--run-dir", str(folder)
        )
        self._pipeline = Pipeline(folder)
        self._memory = psutil.Process(self._process.pid).memory_info

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, *arguments], preexec_fn=partial(die_with_parent, os.getpid()))

    def client(self, session: str) -> RolloutClient:
        return RolloutClient(self.front_door, session=session, timeout_s=START_S)

    def memory_bytes(self) -> int:
        return int(self._memory().rss)

    def close(self) -> None:
        self._pipeline.close()
        self._process.terminate()
        assert self._process.wait(20) == 0


@pytest.fixture
def broker() -> Iterator[Broker]:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        broker = Broker(Path(folder))
        try:
            yield broker
        finally:
            broker.close()


def jobs(count: int) -> list[Job]:
    return [Job(task="large", instance={}) for _ in range(count)]


def test_a_dead_reader_fills_its_own_quota_while_slow_and_fast_ones_are_served(broker: Broker) -> None:
    with broker.client("fast") as fast, broker.client("slow") as slow:
        fast.submit(jobs(40))
        assert len(list(fast.stream(timeout_s=START_S))) == 40
        before = broker.memory_bytes()

        dead = broker.start("-P", "-c", DEAD_READER, broker.front_door)
        try:
            until(lambda: psutil.Process(dead.pid).status() == psutil.STATUS_STOPPED, "the dead reader", START_S)
            slow.submit(jobs(12))
            fast.submit(jobs(200))
            seen: Counter[str] = Counter()
            for number, one in enumerate(fast.stream(timeout_s=START_S)):
                seen[one.job_id] += 1
                if number % 20 == 0:
                    seen.update(found.job_id for found in slow.collect(1, wait_s=0.0))
            seen.update(found.job_id for found in slow.stream(timeout_s=START_S))
            assert (len(seen), set(seen.values())) == (212, {1})

            share = HELD_BYTES // 2 // (13 * TOKENS)
            status = fast.status()
            assert share <= status.uncollected <= share + READY + 3 * SLOTS + 1
            assert status.uncollected + status.queued[Phase.INIT] == 100
            with pytest.raises(Busy, match="the session holds") as refused, broker.client("dead") as other:
                other.submit(jobs(1), timeout_s=0.5)
            assert refused.value.retry_after_s > 0
            assert broker.memory_bytes() - before < 2**25
            dead.send_signal(signal.SIGCONT)
            assert dead.wait(START_S) == 0, "it has them all"
            assert fast.status().uncollected == 0
        finally:
            dead.kill()
            dead.wait()


def test_a_client_that_submits_and_never_asks_is_told_that_it_is_busy(broker: Broker) -> None:
    with broker.client("greedy") as greedy, broker.client("other") as other:
        assert len(greedy.submit(jobs(500))) == 500
        with pytest.raises(Busy, match=r"the session holds \d+ .*and may hold"):
            greedy.submit(jobs(1), timeout_s=0.5)
        other.submit(jobs(5))
        assert len(list(other.stream(timeout_s=START_S))) == 5
