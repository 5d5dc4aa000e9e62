"""A real backend broker and engine hosts that are played by the test: requests about weights, over sockets."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from key_folders import KeyFolders

from prorl_zmq.brokers.backends.backend_broker import BackendBroker
from prorl_zmq.brokers.backends.backend_journal import BackendJournal
from prorl_zmq.config import BackendBrokerSettings, SecuritySettings, ServiceSettings, Topology
from prorl_zmq.security.keyring import WORKER, Keyring
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.backends import AddBackend, AnyBackendReply, Backend, ListBackends
from prorl_zmq.wire.messages.base import PROTOCOL_VERSION, Done, KeyRole, Refused
from prorl_zmq.wire.messages.engines import AnyEngineRequest, EngineReady, WeightsServed, WeightUpdate
from prorl_zmq.wire.sockets import connect, open_socket

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_MS = 30_000


class World:
    """A backend broker in a thread, and sockets of a client and of engine hosts."""

    def __init__(self, folder: Path, keys: Path | None = None) -> None:
        self.folder = folder
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._topology = Topology(
            service=ServiceSettings(run_dir=str(folder)),
            security=SecuritySettings(str(keys) if keys is not None else ""),
            backend_broker=BackendBrokerSettings(endpoint=f"ipc://{folder}/broker"),
        )
        self.start()

    def open(self, kind: int) -> zmq.Socket[bytes]:
        self._sockets.append(open_socket(self.context, kind))
        return self._sockets[-1]

    def start(self) -> None:
        self._broker = BackendBroker(self._topology)
        self._thread = threading.Thread(target=self._broker.run)
        self._thread.start()

    def stop(self) -> None:
        self._broker.stop()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def client(self) -> zmq.Socket[bytes]:
        socket = self.open(zmq.DEALER)
        connect(socket, f"ipc://{self.folder}/broker")
        return socket

    def ask(self, request: Any) -> AnyBackendReply:
        client = self.client()
        try:
            return reply_to(client, request)
        finally:
            client.close()

    def host(self, name: str, endpoint: str, keyring: Keyring | None = None) -> tuple[zmq.Socket[bytes], str]:
        """Bind and register an engine host."""
        socket = self.open(zmq.ROUTER)
        if keyring is not None:
            keyring.serve(socket)
        socket.bind(endpoint)
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        key = keyring.own.public_key if keyring is not None else ""
        added = self.ask(AddBackend("add", Backend(backend_id=name, endpoint=bound, curve_key=key)))
        assert added == Done("add")
        return socket, bound

    def close(self) -> None:
        self.stop()
        for socket in self._sockets:
            socket.close()
        self.context.destroy(linger=0)


def send(client: zmq.Socket[bytes], request: Any) -> None:
    client.send_multipart([b"", codec.encode(request)])


def reply_to(client: zmq.Socket[bytes], request: Any | None = None) -> AnyBackendReply:
    if request is not None:
        send(client, request)
    assert client.poll(LIMIT_MS)
    return codec.decode(client.recv_multipart()[1], AnyBackendReply)  # type: ignore[no-any-return]


def asked(host: zmq.Socket[bytes]) -> tuple[list[bytes], Any]:
    assert host.poll(LIMIT_MS)
    *envelope, frame = host.recv_multipart()
    return envelope, codec.decode(frame, AnyEngineRequest)


def answer(host: zmq.Socket[bytes]) -> Any:
    envelope, request = asked(host)
    host.send_multipart([*envelope, codec.encode(EngineReady(request.request_id, request.weight_version))])
    return request


@pytest.fixture
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        world = World(Path(folder))
        try:
            yield world
        finally:
            world.close()


def test_a_host_that_does_not_answer_is_named_and_the_others_go_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prorl_zmq.brokers.backends.weight_requests.TAKE_BACK_S", 0.3)
    mute, _ = world.host("mute", f"ipc://{world.folder}/mute")
    well, _ = world.host("well", f"ipc://{world.folder}/well")
    client = world.client()
    send(client, WeightUpdate("r", "begin", 1, limit_s=60.0, timeout_s=0.5))
    answer(well)
    assert answer(well).step == "cancel"
    asked(mute)
    assert asked(mute)[1].step == "cancel"
    reply = reply_to(client)
    assert isinstance(reply, Refused)
    assert (reply.error.code, reply.error.fields["backend"]) == ("request_timeout", "mute")
    assert "backend mute: its engine host did not answer in time" in reply.error.message


def test_a_client_that_reconnects_and_asks_again_gets_the_reply_of_the_load_under_way(world: World) -> None:
    host, _ = world.host("x", f"ipc://{world.folder}/x")
    load = WeightUpdate("r", "load", 1, "/weights")
    first = world.client()
    send(first, load)
    envelope, request = asked(host)
    first.close()
    second = world.client()
    send(second, load)
    assert isinstance(world.ask(WeightUpdate("other", "begin", 2, limit_s=60.0)), Refused)
    assert request.step == "fetch"
    host.send_multipart([*envelope, codec.encode(EngineReady(request.request_id, 0))])
    assert answer(host).step == "load"
    assert reply_to(second) == WeightsServed("r", {})
    assert not host.poll(300), "it was asked once"


def test_a_broker_that_was_restarted_runs_the_request_that_comes_again(world: World) -> None:
    host, endpoint = world.host("x", f"ipc://{world.folder}/x")
    client = world.client()
    send(client, WeightUpdate("r", "load", 1, "/weights"))
    asked(host)
    world.stop()
    world.start()
    world.ask(AddBackend("add", Backend(backend_id="x", endpoint=endpoint)))
    client.close()
    client = world.client()
    send(client, WeightUpdate("r", "load", 1, "/weights"))
    assert [answer(host).step for _ in range(2)] == ["fetch", "load"]
    assert reply_to(client) == WeightsServed("r", {})


def test_a_host_that_is_restarted_meanwhile_is_asked_again(world: World) -> None:
    host, endpoint = world.host("x", f"ipc://{world.folder}/x")
    client = world.client()
    send(client, WeightUpdate("r", "cancel", 1, timeout_s=30.0))
    asked(host)
    host.close()
    time.sleep(0.3)
    host = world.open(zmq.ROUTER)
    host.bind(endpoint)
    answer(host)
    assert reply_to(client) == Done("r")


def test_a_host_that_was_restarted_under_another_key_is_reached_with_that() -> None:
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        keys = KeyFolders(Path(folder) / "keys")
        keys.make("gpu-8", KeyRole.STAGE)
        world = World(Path(folder), keys.service.path)
        try:
            old, new = (Keyring.load(keys[name], WORKER) for name in ("gpu-7", "gpu-8"))
            host, endpoint = world.host("x", "tcp://127.0.0.1:*", old)
            client = world.client()
            send(client, WeightUpdate("r", "cancel", 1))
            answer(host)
            assert reply_to(client) == Done("r")
            send(client, WeightUpdate("r2", "cancel", 1))
            asked(host)
            host.close()
            time.sleep(0.3)
            host, _ = world.host("x", endpoint, new)
            answer(host)
            assert reply_to(client) == Done("r2")
        finally:
            world.close()


def test_an_engine_host_of_another_version_is_refused_with_both_numbers(world: World) -> None:
    theirs = PROTOCOL_VERSION + 1
    reply = world.ask(AddBackend("r", Backend(backend_id="x", endpoint="ipc:///x"), protocol=theirs))
    assert isinstance(reply, Refused)
    assert (reply.error.code, reply.error.fields) == ("version_mismatch", {"ours": PROTOCOL_VERSION, "theirs": theirs})
    assert world.ask(ListBackends("l")).backends == ()  # type: ignore[union-attr]


def test_the_removal_of_the_only_adapter_is_written_to_the_journal(world: World) -> None:
    world.stop()
    topology = Topology(
        service=ServiceSettings(run_dir=str(world.folder)),
        backend_broker=BackendBrokerSettings(endpoint=f"ipc://{world.folder}/second"),
    )
    with BackendJournal(world.folder / "journal") as journal:
        broker = BackendBroker(topology, journal)
        handler, envelope = broker._handler, [b"client", b""]
        handler.handle(envelope, AddBackend("add", Backend(backend_id="x", endpoint="ipc://x", adapter_slots=2)), 0.0)
        written: list[list[tuple[str, int]]] = []
        for step, version, path in (("load", 7, "/a"), ("remove", 0, "")):
            handler.handle(envelope, WeightUpdate(step, step, version, path, model="a"), 0.0)
            for call in handler.weights.take_calls():
                handler.engine_answered(call.request.request_id, None, 0.0)
            broker._note(tick=False)
            written.append([(one.model, one.wanted) for one in journal.load_weights()])
        broker._close()
    world.start()
    assert written == [[("a", 7)], []]
