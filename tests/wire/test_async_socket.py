"""`AsyncSocket` on asyncio and on uvloop, over real sockets. Every wait here is on an event, and has a limit."""

from __future__ import annotations

import asyncio
import os
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import uvloop
import zmq

from prorl_zmq.errors import Busy, Closed
from prorl_zmq.wire import async_socket as aio
from prorl_zmq.wire.async_socket import AsyncSocket
from prorl_zmq.wire.sockets import COPY_LIMIT_BYTES, bind, connect, open_socket

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

WAIT_S = 20.0
MESSAGES = 10_000


class Wires:
    """Opens sockets that meet at one endpoint, and closes them."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []

    def bound(self, kind: int) -> zmq.Socket[bytes]:
        self.sockets.append(open_socket(self.context, kind))
        bind(self.sockets[-1], self.endpoint)
        return self.sockets[-1]

    def connected(self, kind: int) -> zmq.Socket[bytes]:
        self.sockets.append(open_socket(self.context, kind))
        connect(self.sockets[-1], self.endpoint)
        return self.sockets[-1]


@pytest.fixture
def wires() -> Iterator[Wires]:
    with tempfile.TemporaryDirectory(prefix="prorl-") as folder:
        wires = Wires(f"ipc://{folder}/wire")
        yield wires
        wires.context.destroy(linger=0)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    def run(coroutine: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(coroutine, WAIT_S))

    return run


class Inbox:
    """Keeps what arrives, and lets a test wait for so many messages."""

    def __init__(self) -> None:
        self.messages: list[list[bytes | zmq.Frame]] = []
        self._event = asyncio.Event()

    def __call__(self, frames: list[bytes | zmq.Frame]) -> None:
        self.messages.append(frames)
        self._event.set()

    async def wait(self, count: int) -> None:
        while len(self.messages) < count:
            self._event.clear()
            await self._event.wait()


def test_all_messages_arrive_each_way_in_order(run: Any, wires: Wires) -> None:
    """An edge-triggered descriptor loses the stream if one event is taken for one message."""

    async def main() -> None:
        replies = Inbox()

        def echo(frames: list[bytes | zmq.Frame]) -> None:
            server.send(frames)  # type: ignore[arg-type]

        server = AsyncSocket(wires.bound(zmq.ROUTER), echo, copied=2)
        client = AsyncSocket(wires.connected(zmq.DEALER), replies)
        for number in range(MESSAGES):
            client.send([number.to_bytes(4, "big")])
            if number % 100 == 0:
                await asyncio.sleep(0)
        await replies.wait(MESSAGES)
        assert [int.from_bytes(frame, "big") for (frame,) in replies.messages] == list(range(MESSAGES))  # type: ignore[arg-type]
        client.close()
        server.close()

    run(main())


def test_what_came_before_the_loop_looked_is_received(run: Any, wires: Wires) -> None:
    async def main() -> None:
        receiver = wires.bound(zmq.PULL)
        sender = wires.connected(zmq.PUSH)
        for number in range(3 * aio.BATCH):
            sender.send(number.to_bytes(4, "big"))
        assert receiver.poll(5_000)
        inbox = Inbox()
        socket = AsyncSocket(receiver, inbox)
        await inbox.wait(3 * aio.BATCH)
        socket.close()

    run(main())


def test_large_frames_are_views_of_what_was_received(run: Any, wires: Wires) -> None:
    async def main() -> None:
        inbox = Inbox()
        receiver = AsyncSocket(wires.bound(zmq.PULL), inbox)
        sender = AsyncSocket(wires.connected(zmq.PUSH), None)
        block = os.urandom(4 * COPY_LIMIT_BYTES)
        sender.send([b"header", memoryview(block)])
        await inbox.wait(1)
        ((header, frame),) = inbox.messages
        assert header == b"header"
        assert isinstance(frame, zmq.Frame)
        assert frame.buffer == block
        # Two views of one frame lie at one address: nothing was copied since it came.
        first, second = (np.frombuffer(frame.buffer, np.uint8) for _ in range(2))
        assert np.shares_memory(first, second)
        receiver.close()
        sender.close()

    run(main())


def test_messages_wait_for_a_peer_and_leave_in_order(run: Any, wires: Wires) -> None:
    async def main() -> None:
        sender = AsyncSocket(wires.bound(zmq.PUSH), None)
        for number in range(1000):
            sender.send([number.to_bytes(4, "big")])  # nobody is connected
        inbox = Inbox()
        receiver = AsyncSocket(wires.connected(zmq.PULL), inbox)
        await inbox.wait(1000)
        assert [int.from_bytes(frame, "big") for (frame,) in inbox.messages] == list(range(1000))  # type: ignore[arg-type]
        receiver.close()
        sender.close()

    run(main())


def test_a_peer_that_takes_nothing_makes_the_sender_busy(
    run: Any, wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio, "BACKLOG_LIMIT", 3)

    async def main() -> None:
        sender = AsyncSocket(wires.bound(zmq.PUSH), None)
        for _ in range(3):
            sender.send([b"kept"])
        with pytest.raises(Busy) as caught:
            sender.send([b"one too many"])
        assert caught.value.retry_after_s > 0
        sender.close()

    run(main())


def test_a_closed_socket_says_so_and_may_be_closed_again(run: Any, wires: Wires) -> None:
    async def main() -> None:
        socket = AsyncSocket(wires.bound(zmq.PULL), lambda _: None)
        socket.close()
        socket.close()
        with pytest.raises(Closed):
            socket.send([b"late"])
        await asyncio.sleep(0)  # the drain that was scheduled finds it closed

    run(main())


def test_a_socket_may_be_closed_by_what_it_receives(run: Any, wires: Wires) -> None:
    async def main() -> None:
        closed = asyncio.Event()
        received = []

        def close(frames: list[bytes | zmq.Frame]) -> None:
            received.append(frames)
            receiver.close()
            closed.set()

        receiver = AsyncSocket(wires.bound(zmq.PULL), close)
        sender = AsyncSocket(wires.connected(zmq.PUSH), None)
        sender.send([b"first"])
        sender.send([b"second"])
        await closed.wait()
        await asyncio.sleep(0)
        assert len(received) == 1
        sender.close()

    run(main())


def test_what_was_sent_leaves_before_a_close_that_lingers(run: Any, wires: Wires) -> None:
    async def main() -> None:
        inbox = Inbox()
        receiver = AsyncSocket(wires.bound(zmq.PULL), inbox)
        sender = AsyncSocket(wires.connected(zmq.PUSH), None)
        sender.send([b"last words"])
        sender.close(linger_ms=5_000)
        await inbox.wait(1)
        receiver.close()

    run(main())


def test_an_error_in_the_callback_does_not_stop_the_stream(run: Any, wires: Wires) -> None:
    async def main() -> None:
        inbox = Inbox()
        errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

        def fail_once(frames: list[bytes | zmq.Frame]) -> None:
            inbox(frames)
            if len(inbox.messages) == 1:
                raise ValueError("a fault in the callback")

        receiving = wires.bound(zmq.PULL)
        sending = wires.connected(zmq.PUSH)
        for _ in range(100):
            sending.send(b"message")
        assert receiving.poll(5_000)
        receiver = AsyncSocket(receiving, fail_once)
        await inbox.wait(100)
        assert [str(error["exception"]) for error in errors] == ["a fault in the callback"]
        receiver.close()

    run(main())
