from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zmq

from prorl_zmq.errors import EndpointInUse, InvalidEndpoint, MalformedMessage
from prorl_zmq.wire.sockets import (
    COPY_LIMIT_BYTES,
    IPC_PATH_LIMIT,
    bind,
    check_endpoint,
    connect,
    free_ipc_paths,
    open_socket,
    receive,
    send,
    split_envelope,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Opened = Callable[[int], zmq.Socket[bytes]]

WAIT_MS = 5_000
HOLDER = """
import sys, zmq
from prorl_zmq.wire.sockets import bind, open_socket
socket = open_socket(zmq.Context(), zmq.ROUTER)
print(bind(socket, sys.argv[1]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Opens sockets, and closes them after the test."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = []

    def opened(kind: int) -> zmq.Socket[bytes]:
        sockets.append(open_socket(context, kind))
        return sockets[-1]

    yield opened
    context.destroy(linger=0)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="prorl-") as name:
        yield Path(name)


@pytest.fixture
def router(opened: Opened) -> zmq.Socket[bytes]:
    return opened(zmq.ROUTER)


@pytest.fixture
def other(opened: Opened) -> zmq.Socket[bytes]:
    return opened(zmq.ROUTER)


# Endpoints ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoint", ["ipc:///tmp/x", "ipc://relative", "tcp://127.0.0.1:*", "tcp://host:1", "tcp://[::1]:65535"]
)
def test_a_good_endpoint_is_given_back(endpoint: str) -> None:
    assert check_endpoint(endpoint) == endpoint


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "ipc",
        "ipc://",
        "ipc:///tmp/a\0b",
        "/tmp/x",
        "tcp://",
        "tcp://host",
        "tcp://host:",
        "tcp://:5555",
        "tcp://host:port",
        "tcp://host:-1",
        "tcp://host:65536",
        "tcp://host:²",
        "tcp://host:" + "1" * 5000,
        "inproc://x",
        "udp://host:1",
        "http://host:1",
    ],
)
def test_a_malformed_endpoint_is_refused(endpoint: str, router: zmq.Socket[bytes]) -> None:
    for use in (lambda: check_endpoint(endpoint), lambda: bind(router, endpoint), lambda: connect(router, endpoint)):
        with pytest.raises(InvalidEndpoint) as caught:
            use()
        assert caught.value.endpoint == endpoint


def test_an_ipc_path_too_long_for_the_system_is_refused_by_its_length(folder: Path) -> None:
    longest = f"{folder}/".ljust(IPC_PATH_LIMIT, "x")
    assert check_endpoint(f"ipc://{longest}")
    with pytest.raises(InvalidEndpoint, match=f"has {IPC_PATH_LIMIT + 1} bytes; the system allows {IPC_PATH_LIMIT}"):
        check_endpoint(f"ipc://{longest}x")
    with pytest.raises(InvalidEndpoint):
        check_endpoint("ipc:///" + "ä" * 54)  # 109 bytes in 55 characters


def test_the_longest_ipc_path_works(folder: Path, router: zmq.Socket[bytes], opened: Opened) -> None:
    endpoint = "ipc://" + f"{folder}/".ljust(IPC_PATH_LIMIT, "x")
    assert bind(router, endpoint) == endpoint
    dealer = opened(zmq.DEALER)
    connect(dealer, endpoint)
    dealer.send(b"hello")
    assert router.poll(WAIT_MS)


def test_a_folder_of_sockets_is_private(folder: Path, router: zmq.Socket[bytes]) -> None:
    before = os.umask(0)
    try:
        bind(router, f"ipc://{folder}/run/door")
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "run").stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "run" / "door.lock").stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_made_is_named(folder: Path, router: zmq.Socket[bytes]) -> None:
    (folder / "file").touch()
    with pytest.raises(InvalidEndpoint, match="cannot be used"):
        bind(router, f"ipc://{folder}/file/door")


def test_a_free_tcp_port_is_taken_and_told(router: zmq.Socket[bytes], other: zmq.Socket[bytes]) -> None:
    endpoint = bind(router, "tcp://127.0.0.1:*")
    assert check_endpoint(endpoint) == endpoint
    assert not endpoint.endswith("*")
    with pytest.raises(EndpointInUse) as caught:
        bind(other, endpoint)
    assert caught.value.endpoint == endpoint


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "192.0.2.1", "example.org"])
def test_tcp_beyond_loopback_has_to_be_asked_for(host: str, router: zmq.Socket[bytes]) -> None:
    with pytest.raises(InvalidEndpoint, match="--insecure"):
        bind(router, f"tcp://{host}:*")


def test_tcp_beyond_loopback_works_where_the_network_is_trusted(router: zmq.Socket[bytes]) -> None:
    assert bind(router, "tcp://0.0.0.0:*", insecure=True).startswith("tcp://0.0.0.0:")


def test_an_address_of_another_machine_cannot_be_bound(router: zmq.Socket[bytes]) -> None:
    with pytest.raises(InvalidEndpoint, match="cannot be bound"):
        bind(router, "tcp://192.0.2.1:5555", insecure=True)


# Two processes on one endpoint ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_second_process_on_a_live_endpoint_is_refused(
    transport: str, folder: Path, opened: Opened, router: zmq.Socket[bytes], other: zmq.Socket[bytes]
) -> None:
    wanted = f"ipc://{folder}/door" if transport == "ipc" else "tcp://127.0.0.1:*"
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLDER, wanted], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        try:
            assert holder.stdout is not None
            endpoint = holder.stdout.readline().decode().strip()
            with pytest.raises(EndpointInUse) as caught:
                bind(router, endpoint)
            assert caught.value.endpoint == endpoint
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            assert bind(other, endpoint) == endpoint
        finally:
            holder.kill()
    dealer = opened(zmq.DEALER)
    connect(dealer, endpoint)
    dealer.send(b"hello")
    assert other.poll(WAIT_MS)


def test_a_process_may_bind_again_what_it_has_closed(folder: Path, opened: Opened) -> None:
    for _ in range(3):
        socket = opened(zmq.ROUTER)
        bind(socket, f"ipc://{folder}/door")
        socket.close()


def test_the_paths_of_a_folder_are_freed_and_others_are_not(folder: Path, opened: Opened) -> None:
    (folder / "kept").mkdir()
    for place in (folder, folder / "kept"):
        socket = opened(zmq.ROUTER)
        bind(socket, f"ipc://{place}/door")
        socket.close()
    free_ipc_paths(folder)
    assert not is_locked(folder / "door.lock")
    assert is_locked(folder / "kept" / "door.lock")


def is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


# Frames ---------------------------------------------------------------------------------------------------------------


def test_frames_arrive_as_sent_and_large_ones_uncopied(opened: Opened, folder: Path) -> None:
    receiver, sender = opened(zmq.PULL), opened(zmq.PUSH)
    endpoint = bind(receiver, f"ipc://{folder}/pipe")
    connect(sender, endpoint)
    large = os.urandom(4 * COPY_LIMIT_BYTES)
    send(sender, [b"header", b"", memoryview(large), zmq.Frame(b"frame")])
    assert receiver.poll(WAIT_MS)
    header, empty, block, frame = receive(receiver, copied=2)
    assert (header, empty) == (b"header", b"")
    assert isinstance(block, zmq.Frame)
    assert block.buffer == large
    assert isinstance(frame, zmq.Frame)
    assert frame.bytes == b"frame"
    with pytest.raises(zmq.Again):
        receive(receiver, copied=2)


def test_a_full_socket_says_so(opened: Opened) -> None:
    sender = opened(zmq.PUSH)  # connected to nobody
    with pytest.raises(zmq.Again):
        send(sender, [b"header"], zmq.NOBLOCK)


@pytest.mark.parametrize(
    ("frames", "envelope"),
    [
        ([b"client", b"", b"header"], 2),
        ([b"client", b"correlation", b"", b"header", b"", b"block"], 3),
        ([b"", b"", b"header"], 2),
    ],
)
def test_the_envelope_ends_with_the_first_empty_frame_behind_the_identity(frames: list[bytes], envelope: int) -> None:
    assert split_envelope(frames) == (frames[:envelope], frames[envelope:])


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], "no empty frame"),
        ([b"client"], "no empty frame"),
        ([b"client", b"header"], "no empty frame"),
        ([b"client", b"1", b"2", b"3", b"", b"header"], "no empty frame"),
        ([b"client", b""], "no header frame"),
    ],
)
def test_a_message_without_an_envelope_is_malformed(frames: list[bytes], message: str) -> None:
    with pytest.raises(MalformedMessage, match=message):
        split_envelope(frames)
