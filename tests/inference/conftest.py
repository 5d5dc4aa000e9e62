"""A small untrained policy, and an engine host with what is at the other ends of its sockets."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zmq

from prorl_zmq.errors import InvalidWeights
from prorl_zmq.inference.adapters import WEIGHTS
from prorl_zmq.inference.client import EngineClient
from prorl_zmq.inference.embedded.embedded_engine import EmbeddedEngine
from prorl_zmq.inference.hosting.host import EngineHost, HostOptions
from prorl_zmq.inference.policy import Policy, PolicyShape
from prorl_zmq.wire import codec
from prorl_zmq.wire.async_socket import AsyncSocket
from prorl_zmq.wire.messages.backends import AnyBackendRequest, Backend
from prorl_zmq.wire.messages.base import Done, Refused
from prorl_zmq.wire.sockets import bind, connect, open_socket, split_envelope

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from prorl_zmq.inference.kv_figures import KvFigures

WAIT_S = 10.0


def random_policy(seed: int = 0, vocabulary: int = 50) -> Policy:
    """An untrained policy whose distributions are far from uniform."""
    policy = Policy.initial(PolicyShape(vocabulary, window=8, embedding=4, hidden=16), seed)
    other = Policy.initial(PolicyShape(16, window=1, embedding=1, hidden=vocabulary), seed + 1)
    policy.parameters["output_weight"] += 3 * other.parameters["embedding"] * other.parameters["hidden_weight"][0]
    return policy


def rounding(policy: Policy, token_ids: Any) -> float:
    """How far two log-probs may lie apart whose logits were summed in another order: some float32 steps of a logit."""
    return 4 * float(np.spacing(np.abs(policy.logits(policy.contexts(token_ids))).max()))


class Broker:
    """The backend broker's end: a ROUTER that notes each request, and answers with what `answers` says."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.requests: list[AnyBackendRequest] = []
        self.answers: Callable[[AnyBackendRequest], Done | Refused | None] = lambda r: Done(r.request_id)
        self._arrived = asyncio.Event()
        router = open_socket(context, zmq.ROUTER)
        self.endpoint = bind(router, endpoint)
        self._socket = AsyncSocket(router, self._receive, copied=4)

    def _receive(self, frames: list[Any]) -> None:
        envelope, message = split_envelope(frames)
        request = codec.decode(message[0], AnyBackendRequest)
        self.requests.append(request)
        self._arrived.set()
        answer = self.answers(request)
        if answer is not None:
            self._socket.send([*envelope, codec.encode(answer)])

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._arrived.clear()
                await self._arrived.wait()

    def close(self) -> None:
        self._socket.close()


class Raw:
    """A DEALER that sends frames as they are, and gives what comes back."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._received: asyncio.Queue[list[bytes]] = asyncio.Queue()
        socket = open_socket(context, zmq.DEALER)
        connect(socket, endpoint)
        self._socket = AsyncSocket(socket, self._received.put_nowait, copied=8)

    def send(self, *frames: bytes) -> None:
        self._socket.send(frames)

    async def receive(self, kind: Any, wait_s: float = WAIT_S) -> Any:
        async with asyncio.timeout(wait_s):
            frames = await self._received.get()
        return codec.decode(frames[1], kind)

    def close(self) -> None:
        self._socket.close()


class AdapterEngine(EmbeddedEngine):
    """Takes adapters, and generates with the policy for all of them; notes what it is told. May have figures."""

    def __init__(self, policy: Policy, figures: KvFigures | None = None) -> None:
        super().__init__(policy)
        self._description = replace(self._description, adapter_slots=2, kv=figures is not None)
        self.figures = figures
        self.loaded: dict[tuple[str, int], Path] = {}
        self.removed: list[tuple[str, int]] = []

    def kv_figures(self, _now: float) -> KvFigures | None:
        return self.figures

    async def load_adapter(self, model: str, version: int, path: Path) -> None:
        if (path / WEIGHTS).read_bytes() == b"wrong":
            raise InvalidWeights(f"{path} is wrong", path=str(path))
        self.loaded[model, version] = path

    async def remove_adapter(self, model: str, version: int) -> None:
        self.removed.append((model, version))
        assert self.loaded.pop((model, version)).is_dir()


class World:
    """An engine host, its backend broker, and a client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.policy = random_policy()
        self.broker = Broker(self.context, f"ipc://{folder}/broker")
        self.client = EngineClient(self.context, reconnect_s=0.5)
        self.stop = asyncio.Event()
        self._raws: list[Raw] = []
        self.start_host()

    def start_host(self, figures: KvFigures | None = None) -> None:
        self.engine = AdapterEngine(self.policy, figures)
        self.host = EngineHost(
            self.context,
            self.engine,
            HostOptions(
                endpoint=f"ipc://{self.folder}/engine",
                backend_broker=self.broker.endpoint,
                backend_id="engine-0",
                heartbeat_s=0.1,
                adapters=self.folder / "adapters" / "service",
            ),
        )
        self.backend = Backend(backend_id="engine-0", endpoint=self.host.endpoint)
        self.running = asyncio.create_task(self.host.run(self.stop))

    def raw(self) -> Raw:
        self._raws.append(Raw(self.context, self.host.endpoint))
        return self._raws[-1]

    async def close(self) -> None:
        self.stop.set()
        with suppress(asyncio.CancelledError):
            async with asyncio.timeout(WAIT_S):
                await self.running
        self.client.close()
        self.broker.close()
        for raw in self._raws:
            raw.close()
        self.context.destroy(linger=0)


@pytest.fixture
def policy() -> Policy:
    return random_policy()


@pytest.fixture
def make_policy() -> Callable[..., Policy]:
    return random_policy


@pytest.fixture
def in_world(tmp_path: Path) -> Callable[[Callable[[World], Any]], None]:
    """Runs a coroutine function with a `World`, closes it, and checks that no task is left."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[World]:
        world = World(tmp_path)
        try:
            yield world
        finally:
            await world.close()

    def run(test: Callable[[World], Any]) -> None:
        async def main() -> None:
            async with opened() as world:
                await test(world)
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == {asyncio.current_task()}

        asyncio.run(main())

    return run
