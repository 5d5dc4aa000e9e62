"""Bound sockets: what comes through from the network, and what does not."""

from __future__ import annotations

import socket as plain
import threading
from typing import TYPE_CHECKING

import pytest
import zmq
from key_folders import KeyFolders

from prorl_zmq.brokers.loop import Loop
from prorl_zmq.config import SERVICE_VARIABLE
from prorl_zmq.errors import InvalidEndpoint, MalformedMessage
from prorl_zmq.security.keyring import BROKER, CLIENT, Keyring, connect_to_peer, connect_to_service
from prorl_zmq.security.rights import ANYBODY, Listener
from prorl_zmq.security.zap_authenticator import ZapAuthenticator
from prorl_zmq.wire.messages.base import KeyRole
from prorl_zmq.wire.sockets import FRAME_LIMIT, open_socket, receive

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAIT_S = 20.0
QUIET_S = 1.0
"""Nothing arrives for so long: enough for what would arrive to arrive."""

Message = tuple[object, list[bytes]]


class Bound:
    """A socket behind a authenticator, served by a loop in a thread."""

    def __init__(self, keyring: Keyring | None, kind: int = zmq.PULL, limit_bytes: int = 2**20) -> None:
        self._loop = Loop()
        self._authenticator = ZapAuthenticator(self._loop.context, keyring)
        self._socket = open_socket(self._loop.context, kind, limit_bytes)
        self.endpoint = self._authenticator.bind(self._socket, "tcp://127.0.0.1:*", Listener.FRONT_DOOR)
        self.messages: list[Message] = []
        self.malformed: list[str] = []
        self._news = threading.Event()
        self._loop.register(self._socket, self._drain)
        self._authenticator.register(self._loop.register)
        self._thread = threading.Thread(target=self._loop.run, args=(lambda: 60.0, lambda: None))
        self._thread.start()

    def wait(self, what: str) -> None:
        assert self._news.wait(WAIT_S), f"waited {WAIT_S} s for {what}"

    def is_quiet(self) -> bool:
        return not self._news.wait(QUIET_S)

    def close(self) -> None:
        self._loop.stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self._loop.close()

    def _drain(self) -> None:
        try:
            sender, frames = self._authenticator.receive(self._socket)
        except MalformedMessage as error:
            self.malformed.append(error.message)
        else:
            self.messages.append((sender, [bytes(frame) for frame in frames]))  # type: ignore[arg-type]
        self._news.set()


@pytest.fixture
def folders(tmp_path: Path) -> KeyFolders:
    return KeyFolders(tmp_path)


class Sockets:
    """Opens sockets of one context, and closes them with it."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._opened: list[zmq.Socket[bytes]] = []

    def __call__(self, kind: int) -> zmq.Socket[bytes]:
        self._opened.append(open_socket(self.context, kind))
        return self._opened[-1]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    sockets = Sockets()
    yield sockets
    sockets.context.destroy(linger=0)


@pytest.fixture
def others() -> Iterator[Sockets]:
    """Those of another process, as it were: a context has one authenticator."""
    sockets = Sockets()
    yield sockets
    sockets.context.destroy(linger=0)


@pytest.fixture
def bound() -> Iterator[Bound]:
    """A PULL on loopback, without keys."""
    bound = Bound(None)
    yield bound
    bound.close()


@pytest.fixture
def locked(folders: KeyFolders) -> Iterator[Bound]:
    """A PULL on loopback, with keys."""
    bound = Bound(Keyring.load(folders.service.path, BROKER))
    yield bound
    bound.close()


def throw(endpoint: str, data: bytes) -> None:
    """Write bytes to a TCP socket, and keep it open until the other side has closed it or a while has passed."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with plain.create_connection((host, int(port)), timeout=5) as line:
        line.settimeout(QUIET_S)
        line.sendall(data)
        try:
            while line.recv(4096):
                pass
        except OSError:
            return


ZMTP_1 = b"\x01\x00" + b"\x06\x00hello"
GARBAGE = {
    "zmtp 1.0": ZMTP_1,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("160301020001000 1fc0303".replace(" ", "")) + b"\x00" * 64,
    "zeros": b"\x00" * 512,
}


def test_a_bare_socket_takes_garbage_for_messages(sockets: Sockets) -> None:
    """What the authenticator is against; if this fails libzmq has changed, and the authenticator may do less."""
    bare = sockets(zmq.PULL)
    port = bare.bind_to_random_port("tcp://127.0.0.1")
    throw(f"tcp://127.0.0.1:{port}", ZMTP_1)
    assert bare.poll(int(WAIT_S * 1000))
    assert bare.recv() == b"hello"


def test_garbage_is_no_message_on_loopback_without_keys(bound: Bound) -> None:
    for data in GARBAGE.values():
        throw(bound.endpoint, data)
    assert bound.is_quiet()
    assert bound.messages == []


def test_garbage_is_no_message_with_keys(locked: Bound) -> None:
    for data in GARBAGE.values():
        throw(locked.endpoint, data)
    assert locked.is_quiet()
    assert locked.messages == []


def test_without_keys_a_message_is_anybodys(bound: Bound, sockets: Sockets) -> None:
    sender = sockets(zmq.PUSH)
    connect_to_service(sender, bound.endpoint, None)
    sender.send_multipart([b"a", b"b"])
    bound.wait("a message")
    assert bound.messages == [(ANYBODY, [b"a", b"b"])]


def test_with_keys_a_message_says_whose_it_is(locked: Bound, folders: KeyFolders, sockets: Sockets) -> None:
    sender = sockets(zmq.PUSH)
    connect_to_service(sender, locked.endpoint, Keyring.load(folders["alice"], CLIENT))
    sender.send_multipart([b"a", b"b"])
    locked.wait("a message")
    ((who, frames),) = locked.messages
    assert (who.name, who.role, frames) == ("alice", KeyRole.TRAINER, [b"a", b"b"])  # type: ignore[attr-defined]


def test_a_stranger_and_a_client_without_keys_get_nothing_through(
    locked: Bound, folders: KeyFolders, sockets: Sockets, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = Keyring.load(folders.make("mallory", KeyRole.TRAINER), CLIENT)
    assert stranger is not None
    for keyring in (stranger, None):
        sender = sockets(zmq.PUSH)
        connect_to_service(sender, locked.endpoint, keyring)
        sender.send(b"hello", zmq.NOBLOCK)
    assert locked.is_quiet()
    assert f"to front_door: the key {stranger.own.public_key} is not allowed" in caplog.text


def test_refusals_do_not_fill_the_log(
    locked: Bound, folders: KeyFolders, sockets: Sockets, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = Keyring.load(folders.make("mallory", KeyRole.TRAINER), CLIENT)
    for _ in range(30):
        connect_to_service(sockets(zmq.PUSH), locked.endpoint, stranger)
    assert locked.is_quiet()
    assert 1 <= caplog.text.count("refused a connection") <= 4


def test_without_an_answer_nobody_comes_in(sockets: Sockets, others: Sockets) -> None:
    """A authenticator that was closed, or whose loop never ran, keeps everybody out."""
    authenticator, socket = ZapAuthenticator(sockets.context, None), sockets(zmq.PULL)
    endpoint = authenticator.bind(socket, "tcp://127.0.0.1:*", Listener.STAGE_INBOX)
    authenticator.close()
    authenticator.close()
    sender = others(zmq.PUSH)
    connect_to_service(sender, endpoint, None)
    sender.send(b"hello", zmq.NOBLOCK)
    assert not socket.poll(int(QUIET_S * 1000))


def test_a_frame_over_the_limit_is_not_taken(bound: Bound, sockets: Sockets) -> None:
    sender = sockets(zmq.PUSH)
    connect_to_service(sender, bound.endpoint, None)
    sender.send(bytes(2**20 + 1))
    assert bound.is_quiet()
    sender.send(bytes(2**20))  # on a new connection
    bound.wait("a message within the limit")
    assert [len(frames[0]) for _, frames in bound.messages] == [2**20]


def test_of_a_message_of_too_many_frames_none_is_kept(bound: Bound, sockets: Sockets) -> None:
    sender = sockets(zmq.PUSH)
    connect_to_service(sender, bound.endpoint, None)
    sender.send_multipart([b""] * 200_000)
    bound.wait("the message")
    assert bound.malformed == [f"a message of 200000 frames is over the limit of {FRAME_LIMIT}"]
    assert not bound.messages
    bound._news.clear()
    sender.send_multipart([b"x"] * FRAME_LIMIT)
    bound.wait("a message within the limit")
    assert len(bound.messages[0][1]) == FRAME_LIMIT


def test_ipc_needs_no_keys(folders: KeyFolders, sockets: Sockets, tmp_path: Path) -> None:
    authenticator = ZapAuthenticator(sockets.context, Keyring.load(folders.service.path, BROKER))
    pull = sockets(zmq.PULL)
    endpoint = authenticator.bind(pull, f"ipc://{tmp_path}/run/socket", Listener.STAGE_EVENTS)
    assert authenticator.curve_key(endpoint) == ""
    push = sockets(zmq.PUSH)
    connect_to_service(push, endpoint, Keyring.load(folders["gpu-7"], (KeyRole.STAGE,)))
    push.send(b"hello")
    assert pull.poll(int(WAIT_S * 1000))
    assert authenticator.receive(pull) == (ANYBODY, [b"hello"])


def test_tcp_beyond_loopback_needs_keys_and_says_how_to_make_them(
    folders: KeyFolders, sockets: Sockets, others: Sockets
) -> None:
    socket = sockets(zmq.PULL)
    authenticator = ZapAuthenticator(sockets.context, None)
    with pytest.raises(InvalidEndpoint, match=r"`prorl keys new service --role service`.*--keys.*--insecure"):
        authenticator.bind(socket, "tcp://0.0.0.0:*", Listener.FRONT_DOOR)
    with pytest.raises(InvalidEndpoint, match=r"`prorl keys new NAME --role stage`"):
        authenticator.bind(socket, "tcp://0.0.0.0:*", Listener.STAGE_INBOX)
    authenticator.close()
    authenticator = ZapAuthenticator(others.context, Keyring.load(folders.service.path, BROKER))
    assert authenticator.bind(others(zmq.PULL), "tcp://0.0.0.0:*", Listener.FRONT_DOOR).startswith("tcp://0.0.0.0:")
    authenticator.close()


@pytest.mark.parametrize(("supervised", "times"), [(False, 1), (True, 0)])
def test_plaintext_to_other_machines_is_warned_of_once(
    sockets: Sockets, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, supervised: bool, times: int
) -> None:
    monkeypatch.delenv(SERVICE_VARIABLE, raising=False)
    if supervised:
        monkeypatch.setenv(SERVICE_VARIABLE, "serve has said it")
    authenticator = ZapAuthenticator(sockets.context, None, insecure=True)
    authenticator.bind(sockets(zmq.PULL), "tcp://127.0.0.1:*", Listener.FRONT_DOOR)
    assert "plaintext" not in caplog.text
    for listener in (Listener.FRONT_DOOR, Listener.STAGE_EVENTS):
        authenticator.bind(sockets(zmq.PULL), "tcp://0.0.0.0:*", listener)
    assert caplog.text.count("plaintext to and from other machines: tcp://0.0.0.0:* has no keys") == times
    authenticator.close()


def test_a_peer_is_not_met_where_only_one_side_has_keys(folders: KeyFolders, sockets: Sockets) -> None:
    keyring = Keyring.load(folders["gpu-7"], (KeyRole.STAGE,))
    assert keyring is not None
    socket = sockets(zmq.DEALER)
    with pytest.raises(InvalidEndpoint, match="wants keys, and this process has none"):
        connect_to_peer(socket, "tcp://127.0.0.1:5555", keyring.own.public_key, None)
    with pytest.raises(InvalidEndpoint, match="is on another machine and announced no key"):
        connect_to_peer(socket, "tcp://192.0.2.1:5555", "", keyring)


def test_a_message_that_was_dropped_leaves_the_next_one_whole(sockets: Sockets) -> None:
    pull, push = sockets(zmq.PULL), sockets(zmq.PUSH)
    pull.bind("inproc://pipe")
    push.connect("inproc://pipe")
    push.send_multipart([b"x"] * (FRAME_LIMIT + 1))
    push.send_multipart([b"next", b"one"])
    with pytest.raises(MalformedMessage, match="over the limit"):
        receive(pull, copied=1)
    assert [bytes(frame) for frame in receive(pull, copied=2)] == [b"next", b"one"]  # type: ignore[arg-type]
