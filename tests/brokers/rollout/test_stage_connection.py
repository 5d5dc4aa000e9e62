"""What a line to a stage process says of the process, over real sockets and with a real process at the other end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq

from prorl_zmq.brokers.rollout.stage_connection import StageConnection
from prorl_zmq.brokers.rollout.stage_connections import StageConnections
from prorl_zmq.brokers.rollout.stage_pool import StagePool
from prorl_zmq.errors import MalformedMessage
from prorl_zmq.wire.messages.base import PROTOCOL_VERSION
from prorl_zmq.wire.messages.jobs import Phase
from prorl_zmq.wire.messages.stages import StageReport, StageWelcome, Task

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        self.endpoint = self.process.stdout.readline().strip()
        self.line = StageConnection(self.context, report(self.endpoint), "", None, 0.0)
        assert self.line.send([b"hello"])
        assert self.process.stdout.readline() == "received\n"
        assert not self.line.is_refused()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.line.close()
        self.context.destroy(linger=0)


def report(endpoint: str) -> StageReport:
    return StageReport(
        protocol=PROTOCOL_VERSION,
        stage_id="run-1",
        role=Phase.RUN,
        node="local",
        slots=1,
        endpoint=endpoint,
        tasks=(Task("math"),),
    )


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


@pytest.fixture(params=["ipc", "tcp"])
def peer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(f"ipc://{tmp_path}/p" if request.param == "ipc" else "tcp://127.0.0.1:*")
    yield peer
    peer.close()


def test_a_process_that_was_killed_refuses_another_connection(peer: Peer) -> None:
    peer.process.kill()
    peer.process.wait(10)
    deadline = time.monotonic() + WAIT_S
    while not peer.line.is_refused():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_process_that_was_stopped_does_not(peer: Peer) -> None:
    """Its connection ends with libzmq's pings, which once passed for its death."""
    peer.process.send_signal(signal.SIGSTOP)
    assert not any(peer.line.is_refused() for _ in range(100))


def test_a_place_that_does_not_answer_does_not(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # the system answers nobody beyond its queue
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        line = StageConnection(context, report(f"tcp://127.0.0.1:{listener.getsockname()[1]}"), "", None, 0.0)
        opened.callback(line.close)
        assert not any(line.is_refused() for _ in range(100))


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_connection_takes_two_descriptors(peer: Peer) -> None:
    """With the connection of a node to the broker, three."""
    before = open_files()
    others = [StageConnection(peer.context, report(peer.endpoint), "", None, 0.0) for _ in range(20)]
    try:
        assert all(one.send([b"hello"]) for one in others)
        for _ in others:
            assert peer.process.stdout is not None
            assert peer.process.stdout.readline() == "received\n"
        assert open_files() - before == 2 * len(others)
    finally:
        for one in others:
            one.close()


def test_who_was_quiet_and_is_heard_again_takes_no_more(peer: Peer) -> None:
    """The connection that asked a process whether it lives goes with the question."""
    connections = StageConnections(peer.context, None, StageWelcome(backend_broker="ipc:///none", heartbeat_s=1.0))
    try:
        connections.reported(report(peer.endpoint), "", 0.0, StagePool(10.0, 1.0))
        assert peer.process.stdout is not None
        assert peer.process.stdout.readline() == "received\n"
        before = open_files()
        assert connections.refusing(["run-1"]) == []
        assert open_files() == before + 1
        assert connections.refusing([]) == []
        assert open_files() == before
    finally:
        connections.close()


def test_a_process_that_another_member_speaks_for_is_that_members(peer: Peer) -> None:
    """The end of the one that spoke for it before concerns it no more."""
    connections = StageConnections(peer.context, None, StageWelcome(backend_broker="ipc:///none", heartbeat_s=1.0))
    pool = StagePool(10.0, 1.0)
    for stage_id, member in (("run-1", "one"), ("run-2", "one"), ("run-1", "two")):
        of_member = msgspec.structs.replace(report(peer.endpoint), stage_id=stage_id, member=member)
        connections.reported(of_member, "", 0.0, pool)
    assert (connections.member_of("run-1"), connections.member_of("run-2")) == ("two", "one")
    connections.left("run-2")
    assert "run-1" in connections
    connections.close()
    assert "run-1" not in connections


def test_a_name_is_not_looked_up(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with pytest.raises(MalformedMessage, match="announced with a name"):
        StageConnection(context, report("tcp://host.invalid:5555"), "", None, 0.0)
