"""Hostile messages to every socket of a live service under load: is a job disturbed, does a process grow?

Front door, stage events, backend broker, an engine host and a stage process's own PULL are on TCP of loopback without
keys, as on a machine with untrusted users; each gets the messages of hostile_messages.py, over raw sockets that are
closed, reset or left open, and over ZeroMQ sockets. Meanwhile jobs run that use the engine. A job is disturbed if it
does not complete at its first attempt. Memory is resident memory at the end, less that before, under the same load; so
is the number of open files.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import zmq
from harness import Row, command, report
from hostile_messages import HEADERS, HEAVY, RAW, SHAPES, frames_of
from service import BenchService

from prorl_zmq import Job, RolloutClient
from prorl_zmq.wire.messages.jobs import Sampling
from prorl_zmq.wire.sockets import open_socket

if TYPE_CHECKING:
    import argparse

MESSAGES, QUICK_MESSAGES = 10_000, 1_000
STAGES = [("init", 16), ("run", 16), ("eval", 16)]
IN_FLIGHT = 16
WARM_S = 5.0
COOL_S = 3.0
"""For what was sent to be read, and connections to be closed."""
LEFT_OPEN = 100
"""Connections that say nothing more, at a time."""
GROWTH_BYTES = 20 * 2**20
MIB = 2**20


class Load(threading.Thread):
    """Jobs, so many at a time, until it is stopped."""

    def __init__(self, front_door: str) -> None:
        super().__init__(name="load")
        self._front_door = front_door
        self._ending = threading.Event()
        self.completed = 0
        self.disturbed: list[str] = []
        self.failed = 0
        self.error: Exception | None = None

    def run(self) -> None:
        """Submit and collect."""
        try:
            with RolloutClient(self._front_door) as client:
                going = 0
                while going or not self._ending.is_set():
                    if not self._ending.is_set() and going < IN_FLIGHT:
                        count = IN_FLIGHT - going
                        going += len(client.submit(self._job() for _ in range(count)))
                    for trajectory in client.collect(wait_s=30.0):
                        going -= 1
                        result = trajectory.result
                        if trajectory.reward == 1.0 and result.attempt == 1:
                            self.completed += 1
                        else:
                            self.failed += trajectory.reward != 1.0
                            self.disturbed.append(f"{result.outcome} at attempt {result.attempt}: {result.error}")
        except Exception as error:  # noqa: BLE001 - raised where the thread is joined
            self.error = error

    def stop(self) -> None:
        """End in good order.

        Raises:
            Exception: what went wrong.
        """
        self._ending.set()
        self.join(120)
        if self.error is not None:
            raise self.error

    def _job(self) -> Job:
        return Job(task="converse", instance={}, sampling=Sampling(max_tokens=8))


class Attacker:
    """Sends to one endpoint.

    Args:
        port: of the endpoint.
        router: it is a ROUTER; else a PULL.
        seed: of all that is drawn.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], port: int, seed: int, *, router: bool) -> None:
        self._address = ("127.0.0.1", port)
        self._router = router
        self._draw = random.Random(seed)
        self._context = context
        self._zmq = self._open()
        self._left_open: list[socket.socket] = []
        kinds = [*RAW, *HEADERS, *SHAPES]
        self._kinds = [kind for kind in kinds for _ in range(1 if kind in HEAVY else 10)]

    def send(self) -> str:
        """Send one message; give its kind."""
        kind = self._draw.choice(self._kinds)
        if kind in RAW:
            self._send_raw(RAW[kind](self._draw))
            return kind
        with suppress(zmq.Again):
            self._zmq.send_multipart(frames_of(kind, self._draw, envelope=self._router), zmq.NOBLOCK, copy=True)
        if self._draw.random() < 0.01:
            self._zmq.close(linger=500)
            self._zmq = self._open()
        return kind

    def close(self) -> None:
        """Close all connections."""
        self._zmq.close(linger=2000)
        for each in self._left_open:
            each.close()

    def _open(self) -> zmq.Socket[bytes]:
        opened = open_socket(self._context, zmq.DEALER if self._router else zmq.PUSH)
        opened.connect("tcp://{}:{}".format(*self._address))
        return opened

    def _send_raw(self, data: bytes) -> None:
        line = socket.create_connection(self._address, timeout=5.0)
        with suppress(OSError):
            line.sendall(data)
        way = self._draw.random()
        if way < 0.2:
            self._left_open.append(line)
            if len(self._left_open) > LEFT_OPEN:
                self._left_open.pop(0).close()
            return
        if way < 0.5:  # a reset instead of an end
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        line.close()


def listening(pid: int) -> list[int]:
    """Give the TCP ports that a process listens on."""
    connections = psutil.Process(pid).net_connections("tcp")
    return [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]


def targets(service: BenchService) -> dict[str, tuple[int, bool]]:
    """Give the port of each endpoint, and whether it is a ROUTER."""
    pids = service.pids()
    (run,) = [name for name in pids if name.startswith("run-")]
    return {
        "front door": (_port(service.front_door), True),
        "stage events": (_port(service.stage_events), False),
        "backend broker": (_port(service.backend_broker), True),
        "engine host": (listening(pids["engine"])[0], True),
        "stage process": (listening(pids[run])[0], False),
    }


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def weigh(pids: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Give the resident bytes and the open files of each process."""
    found = {}
    for name, pid in pids.items():
        process = psutil.Process(pid)
        found[name] = process.memory_info().rss, len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return found


def measure(arguments: argparse.Namespace) -> list[Row]:
    total = QUICK_MESSAGES if arguments.quick else arguments.messages
    sent: dict[str, int] = {}
    with BenchService(STAGES, loopback=True) as service:
        service.start_engine()
        pids = service.pids()
        load = Load(service.front_door)
        load.start()
        time.sleep(WARM_S)
        before = weigh(pids)
        began = time.monotonic()
        with zmq.Context() as context:
            attackers = {
                name: Attacker(context, port, arguments.seed + number, router=router)
                for number, (name, (port, router)) in enumerate(targets(service).items())
            }
            for _ in range(total // len(attackers)):
                for attacker in attackers.values():
                    kind = attacker.send()
                    sent[kind] = sent.get(kind, 0) + 1
            for attacker in attackers.values():
                attacker.close()
        seconds = time.monotonic() - began
        time.sleep(COOL_S)
        after = weigh(pids)
        load.stop()
        dead = [name for name, pid in pids.items() if not psutil.Process(pid).is_running()]
    for kind, count in sent.items():
        print(f"{count:6} {kind}")
    for words in load.disturbed:
        print(f"disturbed: {words}")
    count = sum(sent.values())
    rows = [
        Row("hostile messages", count, f"of {len(sent)} kinds"),
        Row("sent in", seconds, "s"),
        Row("jobs meanwhile", load.completed, "completed"),
        Row("jobs disturbed", len(load.disturbed), "jobs", target="0", holds=not load.disturbed),
        Row("jobs failed", load.failed, "of those disturbed", target="0", holds=not load.failed),
        Row("processes that died", len(dead), "processes", target="0", holds=not dead),
    ]
    for name, (memory, files) in after.items():
        grown = max(0, memory - before[name][0])
        target = f"under {GROWTH_BYTES / MIB:g} MiB"
        rows.append(Row(f"{name}: growth", grown / MIB, "MiB", target=target, holds=grown < GROWTH_BYTES))
        rows.append(Row(f"{name}: more open files", max(0, files - before[name][1]), "files"))
    return rows


def main() -> None:
    about = "hostile messages to every socket of a service under load"
    parser = command("hostile", about)
    parser.add_argument("--messages", type=int, default=MESSAGES)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    report("hostile", about, arguments, partial(measure, arguments))


if __name__ == "__main__":
    main()
