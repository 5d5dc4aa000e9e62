"""The relay over TCP with keys: who may fetch weights from a trainer and from a host."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from key_folders import KeyFolders
from support.weight_versions import KINDS, assert_same, model, publish, read_copy

from prorl_zmq.errors import InvalidEndpoint, InvalidWeights
from prorl_zmq.inference.relay.chunk_server import ChunkServer
from prorl_zmq.inference.relay.publisher_relay import PublisherRelay
from prorl_zmq.inference.relay.weights_relay import WeightsRelay
from prorl_zmq.inference.weights.local_copy import LocalCopy
from prorl_zmq.inference.weights.published_weights import PublishedWeights
from prorl_zmq.inference.weights.version_chain import Content
from prorl_zmq.security.allow_list import AllowList
from prorl_zmq.security.keyring import CLIENT, WORKER, Keyring
from prorl_zmq.wire.messages.backends import KeyList, ListKeys
from prorl_zmq.wire.messages.base import KeyRole
from prorl_zmq.wire.messages.relay import WeightRelay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ANYWHERE = "tcp://127.0.0.1:*"


class World:
    """A service's list of keys, and a trainer with one version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folders = KeyFolders(folder / "keys")
        self.list = AllowList(Keyring.load(self.folders["service"], (KeyRole.SERVICE,)))
        with PublishedWeights(folder / "root", KINDS, threads=1) as published:
            self.written = publish(published, model(), 1)
        self.trainer = PublisherRelay(
            folder / "root", ANYWHERE, Keyring.load(self.folders["alice"], CLIENT), self.answer
        )
        self.relay = self.trainer.relay(self.written.path)

    def answer(self, request: ListKeys) -> KeyList:
        self.list.reread()
        return KeyList(request.request_id, self.list.list_state, self.list.listed())

    def fetch(self, keys: str | None, relay: WeightRelay | None = None, limit_s: float = 20.0) -> WeightsRelay:
        keyring = None if keys is None else Keyring.load(self.folders[keys], WORKER)
        copy = LocalCopy(self.folder / f"copy-{keys}", None)
        host = WeightsRelay(copy, None, "host", keyring)
        until = time.monotonic() + limit_s
        host.bring(Path("/elsewhere"), Content(1, self.written.weights), relay or self.relay, until)
        with copy.reading(Content(1)) as path:
            assert_same(read_copy(path), model())
        return host


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.trainer.close()


def test_a_node_fetches_from_a_trainer_and_from_another_node(world: World) -> None:
    assert [*world.fetch("gpu-7").state.fed_by] == ["trainer"]
    world.folders.make("gpu-8", KeyRole.STAGE)
    world.folders.service.allow(world.folders["gpu-8"] / "gpu-8.pub", KeyRole.STAGE)
    world.trainer.relay(world.written.path)  # the list is read with each version
    assert [*world.fetch("gpu-8").state.fed_by] == ["trainer"]
    keyring = Keyring.load(world.folders["gpu-8"], WORKER)
    allowed = AllowList(keyring)
    listed = world.list.listed()
    allowed.learn(listed, "1")
    server = ChunkServer(ANYWHERE, keyring, allow_list=allowed)
    copy = LocalCopy(world.folder / "other", None)
    between = WeightsRelay(copy, server, "between", keyring)
    try:
        until = time.monotonic() + 20
        between.bring(Path("/elsewhere"), Content(1, world.written.weights), world.relay, until)
        source = between.state.source
        assert source is not None
        assert source.curve_key
        way = WeightRelay(world.relay.index, (source, *world.relay.sources))
        (world.folder / "copy-gpu-7").rename(world.folder / "gone")
        assert [*world.fetch("gpu-7", way).state.fed_by] == ["between"]
    finally:
        between.close()


@pytest.mark.parametrize("stranger", [KeyRole.STAGE, KeyRole.TRAINER, None])
def test_others_get_nothing(world: World, stranger: KeyRole | None, caplog: pytest.LogCaptureFixture) -> None:
    name = None
    if stranger is not None:
        name = "mallory"
        world.folders.make(name, KeyRole.STAGE)  # it says so itself
        if stranger == KeyRole.TRAINER:
            world.folders.service.allow(world.folders[name] / f"{name}.pub", stranger)
        world.trainer.relay(world.written.path)
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(InvalidWeights, match="no source has the right weights; asked: trainer"),
    ):
        world.fetch(name)
    attempts = [one.getMessage() for one in caplog.records if one.name == "prorl.relay" and one.levelname == "INFO"]
    assert attempts
    assert all(re.search(r"refused the key|wants keys", attempt) for attempt in attempts)
    assert world.trainer.sent_bytes == 0


def test_plaintext_beyond_loopback_is_refused(tmp_path: Path) -> None:
    make: Callable[[str], PublisherRelay] = lambda where: PublisherRelay(tmp_path, where, None, lambda _: None)  # noqa: E731
    with pytest.raises(InvalidEndpoint, match="has no keys"):
        make("tcp://10.0.0.5:*")
    with pytest.raises(InvalidEndpoint):
        make("nonsense")
