"""A host reads the KV events of its engine, and its heartbeats say whose prompts are resident."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import zmq

from prorl_zmq.inference.engine import KvEventSource
from prorl_zmq.inference.hosting import kv_event_reader, prefix_index
from prorl_zmq.inference.hosting.host import EngineHost, HostOptions
from prorl_zmq.wire import codec
from prorl_zmq.wire.async_socket import AsyncSocket
from prorl_zmq.wire.messages.backends import AddBackend, BackendAlive
from prorl_zmq.wire.messages.base import ErrorInfo, Refused
from prorl_zmq.wire.messages.engines import AnyEngineReply, Generate, WeightUpdate
from prorl_zmq.wire.messages.jobs import Sampling
from prorl_zmq.wire.sockets import bind, open_socket

from .conftest import Raw

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import pytest

    InWorld = Callable[[Callable[[Any], Any]], None]

SIZE = 4
PROMPT = np.arange(1, 10, dtype=np.int32)
END = (-1).to_bytes(8, "big", signed=True)


def stored(*tokens: int) -> bytes:
    names = list(range(len(tokens) // SIZE))
    event = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": None, "token_ids": tokens}
    return msgspec.msgpack.encode([0.0, [event | {"block_size": SIZE}], 0])


class Publisher:
    """Publishes and repeats as vLLM does."""

    def __init__(self, world: Any) -> None:
        published, router = open_socket(world.context, zmq.PUB), open_socket(world.context, zmq.ROUTER)
        ends = [bind(socket, f"ipc://{world.folder}/{socket.type}") for socket in (published, router)]
        self.source = KvEventSource(ends[0], ends[1], SIZE)
        self.batches: list[bytes] = []
        self.asked: list[int] = []
        self.is_silent = False
        self._published = AsyncSocket(published, None)
        self._router = AsyncSocket(router, self._answer, copied=4)

    def publish(self, batch: bytes, *, lost: bool = False) -> None:
        if not lost:
            self._published.send([b"", len(self.batches).to_bytes(8, "big"), batch])
        self.batches.append(batch)

    def _answer(self, frames: list[Any]) -> None:
        caller, _, first = frames
        self.asked.append(int.from_bytes(first, "big"))
        if self.is_silent:
            return
        for number in range(self.asked[-1], len(self.batches)):
            self._router.send([caller, b"", b"", number.to_bytes(8, "big"), self.batches[number]])
        self._router.send([caller, b"", b"", END, b""])

    def close(self) -> None:
        self._published.close()
        self._router.close()


@asynccontextmanager
async def hosted(world: Any, publisher: Publisher) -> AsyncIterator[EngineHost]:
    """Run a second host in a world, whose engine has these events."""
    world.engine._description = replace(world.engine.description, kv_events=publisher.source)
    options = HostOptions(
        endpoint=f"ipc://{world.folder}/indexed",
        backend_broker=world.broker.endpoint,
        backend_id="indexed",
        heartbeat_s=0.05,
    )
    host, stop = EngineHost(world.context, world.engine, options), asyncio.Event()
    task = asyncio.create_task(host.run(stop))
    try:
        yield host
    finally:
        stop.set()
        await task
        publisher.close()


def beats(world: Any) -> list[BackendAlive]:
    return [one for one in world.broker.requests if isinstance(one, BackendAlive) and one.backend_id == "indexed"]


async def turn(world: Any, host: EngineHost, job: str) -> None:
    client = Raw(world.context, host.endpoint)
    request = Generate(f"of-{job}", job_id=job, sampling=Sampling(1.0, 2))
    client.send(b"", codec.encode(request), PROMPT.tobytes())
    await client.receive(AnyEngineReply)
    client.close()


def test_heartbeats_say_by_change_whose_prompts_are_resident(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        publisher = Publisher(world)
        publisher.publish(stored(*PROMPT[:8].tolist()), lost=True)
        async with hosted(world, publisher) as host:
            await world.broker.until(lambda: beats(world))
            assert beats(world)[0].resident == ()
            await turn(world, host, "a")
            await world.broker.until(lambda: beats(world)[-1].resident == ("a",))
            count = len(beats(world))
            await world.broker.until(lambda: len(beats(world)) > count + 3)
            assert all(one.resident is None for one in beats(world)[count:])
            publisher.publish(msgspec.msgpack.encode([0.0, [{"type": "AllBlocksCleared"}], 0]))
            await world.broker.until(lambda: any(one.resident == () for one in beats(world)[count:]))
            assert publisher.asked[0] == 0

    in_world(test)


def test_a_broker_that_forgot_the_host_gets_all_again(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        publisher = Publisher(world)
        publisher.publish(stored(*PROMPT[:8].tolist()))
        async with hosted(world, publisher) as host:
            await turn(world, host, "a")
            await world.broker.until(lambda: any(one.resident == ("a",) for one in beats(world)))
            plain, refusals = world.broker.answers, [beats(world)[-1].request_id]

            def forget_once(request: Any) -> Any:
                if isinstance(request, BackendAlive) and request.backend_id == "indexed" and refusals:
                    refusals.clear()
                    error = ErrorInfo("unknown_backend", "the backend is not registered", {})
                    return Refused(request.request_id, error)
                return plain(request)

            world.broker.answers = forget_once
            await world.broker.until(lambda: not refusals)
            begun = len(world.broker.requests)
            await world.broker.until(
                lambda: any(getattr(one, "resident", None) == ("a",) for one in world.broker.requests[begun:])
            )
            kinds = [type(one) for one in world.broker.requests[begun:]]
            assert AddBackend in kinds

    in_world(test)


def test_a_lost_batch_is_asked_for(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        publisher = Publisher(world)
        async with hosted(world, publisher) as host:
            await turn(world, host, "a")
            await world.broker.until(lambda: publisher.asked)
            publisher.publish(stored(*PROMPT[:8].tolist()), lost=True)
            # The first may come before the subscription; then the second says that it lacks.
            while not any(one.resident == ("a",) for one in beats(world)):
                publisher.publish(msgspec.msgpack.encode([0.0, [], 0]))
                count = len(beats(world))
                await world.broker.until(lambda count=count: len(beats(world)) > count + 1)
            assert len(publisher.asked) >= 2

    in_world(test)


def test_events_that_never_come_are_reported_and_cost_nothing(
    in_world: InWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_index, "LACKING_S", 0.2)
    monkeypatch.setattr(kv_event_reader, "ANSWER_S", 0.1)

    async def test(world: Any) -> None:
        publisher = Publisher(world)
        publisher.is_silent = True
        async with hosted(world, publisher) as host:
            await turn(world, host, "a")
            await world.broker.until(lambda: beats(world) and beats(world)[-1].load.lacks_events)
            assert {one.resident for one in beats(world)} <= {(), None}
            publisher.is_silent = False
            while beats(world)[-1].load.lacks_events:
                publisher.publish(stored(*PROMPT[:8].tolist()))
                count = len(beats(world))
                await world.broker.until(lambda count=count: len(beats(world)) > count)
            await world.broker.until(lambda: any(one.resident == ("a",) for one in beats(world)))

    in_world(test)


def test_new_weights_empty_the_index_at_once(in_world: InWorld) -> None:
    async def test(world: Any) -> None:
        publisher = Publisher(world)
        publisher.publish(stored(*PROMPT[:8].tolist()))
        async with hosted(world, publisher) as host:
            await turn(world, host, "a")
            await world.broker.until(lambda: any(one.resident == ("a",) for one in beats(world)))
            count = len(beats(world))
            host._serve([b"client"], WeightUpdate("set", weight_version=3, step="set"), [])
            await world.broker.until(lambda: any(one.resident == () for one in beats(world)[count:]))

    in_world(test)
