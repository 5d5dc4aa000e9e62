"""What a client sends while no reply comes, and to whom."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from threading import Event, Thread
from typing import TYPE_CHECKING

import pytest
import zmq

from prorl_zmq import AsyncRolloutClient, RolloutClient
from prorl_zmq.client.blocking import connection as blocking
from prorl_zmq.client.blocking.transport import RequestConnection
from prorl_zmq.client.requests import read_reply
from prorl_zmq.errors import Closed, InvalidEndpoint, RequestTimeout
from prorl_zmq.security.request_connection import AsyncRequestConnection
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.front_door import Status, Welcome
from prorl_zmq.wire.requester import RESEND_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Broker:
    """Receives requests in a thread, and answers some."""

    def __init__(self, endpoint: str, answer: Callable[[int, object], object | None]) -> None:
        self.endpoint = endpoint
        self.received: list[bytes] = []
        self._answer = answer
        self._over = Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(endpoint)
        self._thread = Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._over.is_set():
            if not self._socket.poll(20):
                continue
            frames = self._socket.recv_multipart()
            self.received.append(frames[-1])
            reply = self._answer(len(self.received), codec.unpack(frames[-1]))
            if reply is not None:
                self._socket.send_multipart([*frames[:-1], codec.encode(reply)])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    brokers: list[Broker] = []

    def begin(answer: Callable[[int, object], object | None] = lambda _number, _request: None) -> Broker:
        brokers.append(Broker(f"ipc://{tmp_path}/{len(brokers)}", answer))
        return brokers[-1]

    yield begin
    for broker in brokers:
        broker.close()


def welcome(request_id: str, backend_broker: str = "ipc://b") -> Welcome:
    return Welcome(request_id, protocol=1, version="1", backend_broker=backend_broker, job_limit_bytes=1024)


def ask(kind: str, endpoint: str, wait_s: float, resend_s: float = RESEND_S) -> object:
    """Ask once with a connection of a kind, and return the reply."""
    request = Status("r")
    with zmq.Context() as context:
        if kind == "blocking":
            plain = RequestConnection(context, endpoint, None, resend_s=resend_s)
            try:
                return read_reply(plain.ask_frames(request, time.monotonic() + wait_s))
            finally:
                plain.close()

        async def concurrently() -> object:
            connection = AsyncRequestConnection(context, endpoint, None, resend_s=resend_s)
            try:
                return read_reply(await connection.ask_frames(request, time.monotonic() + wait_s))
            finally:
                connection.close()

        return asyncio.run(concurrently())


kinds = pytest.mark.parametrize("kind", ["blocking", "asynchronous"])


@kinds
def test_a_request_without_a_reply_is_sent_once_until_it_is_due_again(kind: str, start: Callable[..., Broker]) -> None:
    """A wait that is not a whole number of milliseconds does not end in a busy loop of resends."""
    broker = start()
    for number in range(5):
        with pytest.raises(RequestTimeout):
            ask(kind, broker.endpoint, 0.1 + 0.0009)
        time.sleep(0.1)
        assert len(broker.received) == number + 1


@kinds
def test_a_request_without_a_reply_is_resent(kind: str, start: Callable[..., Broker]) -> None:
    broker = start(lambda number, _request: welcome("r") if number == 3 else None)
    assert isinstance(ask(kind, broker.endpoint, 30.0, resend_s=0.2), Welcome)
    assert len(broker.received) == 3
    assert len(set(broker.received)) == 1


def test_a_client_that_waits_for_a_service_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blocking, "RequestConnection", partial(RequestConnection, resend_s=0.1))
    door = f"ipc://{tmp_path}/none"
    with RolloutClient(door, timeout_s=1.0) as client, pytest.raises(RequestTimeout):
        client.status()
    (said,) = caplog.messages
    assert said.startswith(f"no reply from {door} yet; waiting for up to ")
    assert said.endswith(" s more: is the service running? (`prorl serve`)")


@kinds
def test_a_reply_to_another_request_is_not_taken(kind: str, start: Callable[..., Broker]) -> None:
    broker = start(lambda _number, _request: welcome("another"))
    with pytest.raises(RequestTimeout, match="is the service running"):
        ask(kind, broker.endpoint, 0.3)


def test_hello_is_said_once_and_names_the_backend_broker(start: Callable[..., Broker]) -> None:
    def answer(_number: int, request: dict[str, object]) -> object:
        return welcome(str(request["request_id"]), "ipc://nowhere")

    broker = start(answer)
    service = blocking.ServiceConnection(broker.endpoint, None, 5.0)
    try:
        assert service.hello(service.until()).backend_broker == "ipc://nowhere"
        assert service.hello(service.until()).backend_broker == "ipc://nowhere"
        assert len(broker.received) == 1
        with pytest.raises(RequestTimeout, match="ipc://nowhere"):
            service.ask_backend_broker(Status("r"), service.until(0.2))
    finally:
        service.close()
    with pytest.raises(Closed):
        service.ask(Status("r"), service.until())


def test_many_requests_share_one_asyncio_socket(start: Callable[..., Broker]) -> None:
    broker = start(lambda _number, request: welcome(str(request["request_id"])))

    async def ask_all(context: zmq.Context[zmq.Socket[bytes]]) -> list[str]:
        connection = AsyncRequestConnection(context, broker.endpoint, None)
        until = time.monotonic() + 30.0
        replies = await asyncio.gather(*(connection.ask_frames(Status(f"r{index}"), until) for index in range(50)))
        connection.close()
        return [read_reply(reply).request_id for reply in replies]

    with zmq.Context() as context:
        assert asyncio.run(ask_all(context)) == [f"r{index}" for index in range(50)]


@pytest.mark.parametrize("kind", [RolloutClient, AsyncRolloutClient])
def test_a_malformed_endpoint_is_refused_at_once(kind: type) -> None:
    with pytest.raises(InvalidEndpoint):
        kind("http://127.0.0.1:1")


def test_a_client_may_change_how_long_it_waits(start: Callable[..., Broker]) -> None:
    broker = start()
    with RolloutClient(broker.endpoint) as client:
        client.timeout_s = 0.1
        with pytest.raises(RequestTimeout, match=r"within 0\.\d s"):
            client.status()
        with pytest.raises(RequestTimeout, match=r"within 0\.\d s"):
            client.backends.list()
