"""What a line to a stage process says of the process, over real sockets and with a real process at the other end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import zmq

from prorl_zmq.brokers.rollout.stage_connection import StageConnection
from prorl_zmq.errors import MalformedMessage
from prorl_zmq.wire.messages.jobs import Phase
from prorl_zmq.wire.messages.stages import StageReport, Task

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAIT_S = 20.0
PEER = """\
import sys, zmq
from prorl_zmq.wire.sockets import bind, open_socket
inbox = open_socket(zmq.Context(), zmq.PULL)
print(bind(inbox, sys.argv[1]), flush=True)
while True:
    inbox.recv()
    print("received", flush=True)
"""


class Peer:
    """A process that listens, and our line to it."""

    def __init__(self, endpoint: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-P", "-c", PEER, endpoint], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.line = StageConnection(self.context, report(self.process.stdout.readline().strip()), "", None, 0.0)
        assert self.line.send([b"hello"])
        assert self.process.stdout.readline() == "received\n"
        assert not self.line.has_died()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.line.close()
        self.context.destroy(linger=0)


def report(endpoint: str) -> StageReport:
    return StageReport(
        stage_id="run-1", role=Phase.RUN, node="local", slots=1, endpoint=endpoint, tasks=(Task("math"),)
    )


@pytest.fixture(params=["ipc", "tcp"])
def peer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(f"ipc://{tmp_path}/p" if request.param == "ipc" else "tcp://127.0.0.1:*")
    yield peer
    peer.close()


def test_a_process_that_was_killed_has_died(peer: Peer) -> None:
    peer.process.kill()
    deadline = time.monotonic() + WAIT_S
    while not peer.line.has_died():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not peer.line.has_died(), "it is said once"


def test_a_process_that_was_stopped_has_not_died(peer: Peer) -> None:
    """Its connection ends with libzmq's heartbeats, which once passed for its death."""
    peer.process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 4.0  # its heartbeats end it after 2 s
    while time.monotonic() < deadline:
        assert not peer.line.has_died()
        time.sleep(0.05)


def test_a_name_is_not_looked_up() -> None:
    with zmq.Context() as context, pytest.raises(MalformedMessage, match="announced with a name"):
        StageConnection(context, report("tcp://host.invalid:5555"), "", None, 0.0)
