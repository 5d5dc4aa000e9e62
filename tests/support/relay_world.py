"""A trainer that serves its versions, engine hosts that fetch them, and a source that lies."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from prorl_zmq.inference.relay.chunk_server import ChunkServer
from prorl_zmq.inference.relay.offered_copy import offered_copy
from prorl_zmq.inference.relay.publisher_relay import PublisherRelay
from prorl_zmq.inference.relay.weights_relay import WeightsRelay
from prorl_zmq.inference.weights.local_copy import LocalCopy
from prorl_zmq.inference.weights.published_weights import PublishedWeights
from prorl_zmq.inference.weights.version_chain import Content
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.relay import ChunkAsk, WeightRelay, WeightSource

from .weight_versions import KINDS, assert_same, model, publish, read_copy, step

if TYPE_CHECKING:
    from threading import Event

    from prorl_zmq.inference.weights.published_weights import Written

    from .weight_versions import Model

ELSEWHERE = Path("/not/on/this/host/weight_v000001")
CHUNK = 1000
"""Bytes of a chunk, with the fixture `world`."""


class Host:
    def __init__(self, folder: Path, name: str) -> None:
        self.copy = LocalCopy(folder / name, None, threads=2)
        self.server = ChunkServer(f"ipc://{folder}/{name}.w", None, find_copy=partial(offered_copy, self.copy))
        self.relay = WeightsRelay(self.copy, self.server, name, None)

    @property
    def source(self) -> WeightSource:
        source = self.relay.state.source
        assert source is not None
        return source


class World:
    """A trainer that serves its folder, and hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "published"
        self.published = PublishedWeights(self.root, KINDS, threads=2)
        self.trainer = PublisherRelay(self.root, f"ipc://{folder}/trainer.w", None, lambda _: None)
        self.models: dict[int, Model] = {}
        self.written: dict[int, Written] = {}
        self.relays: dict[int, WeightRelay] = {}
        self.hosts: list[Host] = []

    def publish(self, weights: Model | None = None) -> int:
        version = len(self.models) + 1
        if weights is None:
            weights = step(self.models[version - 1], version, 0.02) if version > 1 else model()
        self.models[version] = weights
        self.written[version] = publish(self.published, weights, version)
        self.relays[version] = self.trainer.relay(self.written[version].path)
        return version

    def host(self) -> Host:
        self.hosts.append(Host(self.folder, f"h{len(self.hosts)}"))
        return self.hosts[-1]

    def bring(
        self, host: Host, version: int, *sources: WeightSource, limit_s: float = 20.0, ended: Event | None = None
    ) -> dict[str, int]:
        """Bring a host to a version; return which source gave how much."""
        relay = self.relays[version]
        relay = WeightRelay(relay.index, (*sources, *relay.sources))
        content = Content(version, self.written[version].weights)
        host.relay.bring(ELSEWHERE, content, relay, time.monotonic() + limit_s, ended)
        with host.copy.reading(content) as folder:
            assert_same(read_copy(folder), self.models[version])
        assert (host.relay.state.version, host.relay.state.weights) == content
        return host.relay.state.fed_by

    def close(self) -> None:
        for host in self.hosts:
            host.relay.close()
        self.trainer.close()
        self.published.close()


class Liar:
    """A source that answers each ask as `answer` says."""

    def __init__(self, endpoint: str, answer: object) -> None:
        self.source = WeightSource("liar", endpoint)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(endpoint)
        self._answer = answer
        self._pool = ThreadPoolExecutor(1)
        self._done = False
        self._running = self._pool.submit(self._run)

    def _run(self) -> None:
        while not self._done:
            if self._socket.poll(20):
                identity, _, content = self._socket.recv_multipart()
                assert callable(self._answer)
                answer = self._answer(codec.decode(content, ChunkAsk), content)
                if answer is not None:
                    self._socket.send_multipart([identity, b"", *answer])

    def close(self) -> None:
        self._done = True
        self._running.result()
        self._pool.shutdown()
        self._context.destroy(linger=0)
