"""The rows of `weights.py` about the relay: one version on its way from a trainer to eight engine hosts.

The hosts are processes, each with a copy of its own; the trainer serves from this process. The tree is the one that the
backend broker makes. In a star every host asks the trainer. What the trainer sends is counted in payloads.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from harness import Row

from prorl_zmq.brokers.backends.relay_tree import relay_for
from prorl_zmq.inference.checkpoint import TensorKind
from prorl_zmq.inference.relay.chunk_server import ChunkServer
from prorl_zmq.inference.relay.offered_copy import offered_copy
from prorl_zmq.inference.relay.publisher_relay import PublisherRelay
from prorl_zmq.inference.relay.weights_relay import WeightsRelay
from prorl_zmq.inference.weights.local_copy import LocalCopy
from prorl_zmq.inference.weights.published_weights import PublishedWeights
from prorl_zmq.inference.weights.version_chain import Content
from prorl_zmq.wire.messages.engines import WeightUpdate
from prorl_zmq.wire.messages.relay import CopyState, WeightSource

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

HOSTS = [f"h{number}" for number in range(8)]
LIMIT_S = 300.0
TREE_LIMIT = 2.2


def host(folder: Path, name: str, request: WeightUpdate, ready: Barrier, done: Barrier) -> None:
    """Be an engine host that fetches one version, and serves until all others have it."""
    copy = LocalCopy(folder / name, None, threads=1)
    server = ChunkServer(f"ipc://{folder}/{name}.w", None, find_copy=partial(offered_copy, copy))
    relay = WeightsRelay(copy, server, name, None)
    ready.wait(LIMIT_S)
    assert request.relay is not None
    content = Content(request.weight_version, request.digest)
    relay.bring(Path(request.path), content, request.relay, time.monotonic() + LIMIT_S)
    done.wait(LIMIT_S)
    relay.close()


def transfer(folder: Path, size_bytes: int, *, tree: bool) -> tuple[float, float, float]:
    """Give eight hosts one version; return the payloads and CPU seconds of the trainer, and the seconds that passed."""
    kinds = {"w": TensorKind("U8", (size_bytes,))}
    with PublishedWeights(folder / "root", kinds) as published:
        published.add("w", np.random.default_rng(0).integers(0, 256, size_bytes, np.uint8))
        written = published.write(1)
    trainer = PublisherRelay(folder / "root", f"ipc://{folder}/t.w", None, lambda _: None)
    relay = trainer.relay(written.path)
    request = WeightUpdate("r", "load", 1, "/elsewhere", digest=written.weights, relay=relay)
    copies = {one: CopyState(one, "/copy", WeightSource(one, f"ipc://{folder}/{one}.w")) for one in HOSTS}
    spawn = multiprocessing.get_context("spawn")
    ready, done = spawn.Barrier(len(HOSTS) + 1), spawn.Barrier(len(HOSTS) + 1)
    processes = []
    for name in HOSTS:
        own = relay_for(request, name, copies) if tree else relay
        message = WeightUpdate("r", "load", 1, "/elsewhere", digest=written.weights, relay=own)
        processes.append(spawn.Process(target=host, args=(folder, name, message, ready, done)))
    for process in processes:
        process.start()
    ready.wait(LIMIT_S)
    began, cpu = time.perf_counter(), time.process_time()
    done.wait(LIMIT_S)
    passed, cpu = time.perf_counter() - began, time.process_time() - cpu
    for process in processes:
        process.join()
    trainer.close()
    return trainer.sent_bytes / size_bytes, cpu, passed


def relay(*, quick: bool) -> list[Row]:
    """Measure a tree against a star."""
    size_bytes = (16 if quick else 200) * 2**20
    sent = {}
    for shape in ("star", "tree"):
        with tempfile.TemporaryDirectory(prefix="prorl-b-") as name:
            sent[shape] = transfer(Path(name), size_bytes, tree=shape == "tree")
    (star, star_cpu, _), (tree, tree_cpu, passed) = sent["star"], sent["tree"]
    promise, holds = f"at most {TREE_LIMIT:g}", tree <= TREE_LIMIT
    return [
        Row("relay to 8 hosts: the trainer sends", tree, "payloads", "a star", tree / star, promise, holds),
        Row("relay to 8 hosts: CPU of the trainer", tree_cpu, "s", "a star", tree_cpu / star_cpu),
        Row("relay to 8 hosts: all have it after", passed, "s"),
    ]
