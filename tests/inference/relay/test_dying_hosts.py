"""Eight hosts fetch a version in a tree, and an inner one dies on the way: all others end with the right bytes."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support import forks

from prorl_zmq.brokers.backends.relay_tree import relay_for
from prorl_zmq.inference.checkpoint import TensorKind
from prorl_zmq.inference.relay import offered_folder
from prorl_zmq.inference.relay.publisher_relay import PublisherRelay
from prorl_zmq.inference.weights import version_folder
from prorl_zmq.inference.weights.local_copy import LocalCopy
from prorl_zmq.inference.weights.published_weights import PublishedWeights
from prorl_zmq.inference.weights.version_chain import Content
from prorl_zmq.inference.weights.version_folder import read_version
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.engines import WeightUpdate
from prorl_zmq.wire.messages.relay import CopyState, WeightSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HERE = Path(__file__).parent
HOSTS = [f"h{number}" for number in range(8)]
INNER = ("h0", "h1", "h2")
CHUNK_BYTES = 32 * 1024
CHUNKS = 200


class Transfer:
    """One version of `CHUNKS` chunks, its trainer, and the hosts' processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = np.random.default_rng(7).integers(0, 256, CHUNKS * CHUNK_BYTES - 4096, np.uint8)
        with PublishedWeights(folder / "root", {"w": TensorKind("U8", self.data.shape)}) as published:
            published.add("w", self.data)
            self.written = published.write(1)
        self.trainer = PublisherRelay(folder / "root", f"ipc://{folder}/t.w", None, lambda _: None)
        self.request = WeightUpdate(
            "r", "load", 1, "/elsewhere", digest=self.written.weights, relay=self.trainer.relay(self.written.path)
        )
        self.copies = {one: CopyState(one, "/copy", WeightSource(one, f"ipc://{folder}/{one}.w")) for one in HOSTS}

    def start(self, name: str, dies_at: int = 0) -> subprocess.Popen[str]:
        relay = relay_for(self.request, name, self.copies)
        message = WeightUpdate("r", "load", 1, "/elsewhere", digest=self.written.weights, relay=relay)
        about = [str(HERE / "fetching_host.py"), str(self.folder), name, codec.encode(message).hex(), str(dies_at)]
        return forks.start(*about, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def check(self, name: str) -> None:
        copy = LocalCopy(self.folder / name, None)
        with copy.reading(Content(1, self.written.weights)) as path:
            place = read_version(path).tensors["w"]
            content = (path / place.file).read_bytes()[place.at : place.at + place.length]
        assert content == self.data.tobytes()

    @property
    def sent(self) -> float:
        """How many times the trainer has sent the payload."""
        return self.trainer.sent_bytes / len(self.data)


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Transfer]:
    for module in (version_folder, offered_folder):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK_BYTES)
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as folder:
        transfer = Transfer(Path(folder))
        yield transfer
        transfer.trainer.close()


def begin(processes: Iterable[subprocess.Popen[str]]) -> None:
    """Have the hosts fetch, once all of them serve."""
    there = list(processes)
    for process in there:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in there:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def fed(process: subprocess.Popen[str]) -> dict[str, int]:
    assert process.stdout is not None
    return dict(json.loads(process.stdout.readline()))


@pytest.mark.proof
@pytest.mark.timeout(120)
def test_a_tree_sends_twice_from_its_root(transfer: Transfer) -> None:
    processes = {name: transfer.start(name) for name in HOSTS}
    try:
        begin(processes.values())
        givers = {name: fed(process) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.communicate()
    assert transfer.sent <= 2.2
    assert {name: [*giver] for name, giver in givers.items()} == {
        "h0": ["trainer"],
        "h1": ["trainer"],
        "h2": ["h0"],
        "h3": ["h0"],
        "h4": ["h1"],
        "h5": ["h1"],
        "h6": ["h2"],
        "h7": ["h2"],
    }
    for name in HOSTS:
        transfer.check(name)


@pytest.mark.proof
@pytest.mark.timeout(120)
@pytest.mark.parametrize("tenth", range(1, 10))
@pytest.mark.parametrize("victim", INNER)
def test_an_inner_host_dies(transfer: Transfer, victim: str, tenth: int) -> None:
    processes = {name: transfer.start(name, CHUNKS * tenth // 10 if name == victim else 0) for name in HOSTS}
    try:
        begin(processes.values())
        dead = processes.pop(victim)
        givers = {name: fed(process) for name, process in processes.items()}
        assert dead.wait(60) == -signal.SIGKILL
    finally:
        for process in (dead, *processes.values()):
            process.communicate()
    for name, giver in givers.items():
        transfer.check(name)
        assert sum(giver.values()) < 1.1 * len(transfer.data)  # nothing came twice
    assert transfer.sent < 4.1


@pytest.mark.proof
@pytest.mark.timeout(120)
def test_an_inner_host_stands_still(transfer: Transfer) -> None:
    stopped = transfer.start("h0", 0)
    others: dict[str, subprocess.Popen[str]] = {}
    try:
        begin([stopped])
        fed(stopped)
        stopped.send_signal(signal.SIGSTOP)
        others = {name: transfer.start(name) for name in ("h2", "h3", "h6")}
        begin(others.values())
        assert all("h0" not in fed(process) for process in others.values())
    finally:
        stopped.kill()
        for process in (stopped, *others.values()):
            process.communicate()
    for name in others:
        transfer.check(name)
