"""Weights that come from other processes: by which way, who is not believed, and what is given up."""

from __future__ import annotations

import json
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from threading import Event
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zmq
from support.ports import free_port
from support.relay_world import CHUNK, ELSEWHERE, Liar, World
from support.waiting import until
from support.weight_versions import KINDS, assert_same, model, publish, read_copy

from prorl_zmq.errors import EngineFailed, InvalidWeights, RequestTimeout
from prorl_zmq.inference.checkpoint import INDEX, TensorKind
from prorl_zmq.inference.relay import chunk_server, chunk_source, offered_folder
from prorl_zmq.inference.relay.offered_copy import offered_copy
from prorl_zmq.inference.relay.publisher_relay import PublisherRelay
from prorl_zmq.inference.relay.weights_relay import WeightsRelay
from prorl_zmq.inference.weights import version_folder
from prorl_zmq.inference.weights.copy_folder import SYNC
from prorl_zmq.inference.weights.local_copy import LocalCopy
from prorl_zmq.inference.weights.published_weights import PublishedWeights
from prorl_zmq.inference.weights.version_chain import Content
from prorl_zmq.inference.weights.version_folder import remove_version, version_path
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.relay import COPY_FILE, DATA, GONE, INDEX_FILE, ChunkAsk, WeightSource

if TYPE_CHECKING:
    from pathlib import Path

    from support.relay_world import Host

PAUSE = Event()


def wait_fetching(host: Host) -> None:
    """Wait until a host that has fetched nothing begins to."""
    until((host.copy.folder / SYNC / "incoming/lock").exists, "the fetch")


def test_a_chain_of_hosts_gets_each_version(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "prorl.relay")
    first, second, third = (world.host() for _ in range(3))
    for _ in range(3):
        version = world.publish()
        with ThreadPoolExecutor() as pool:
            fed = [
                pool.submit(world.bring, first, version),
                pool.submit(world.bring, second, version, first.source),
                pool.submit(world.bring, third, version, second.source, first.source),
            ]
        assert [[*one.result()] for one in fed] == [["trainer"], ["h0"], ["h1"]]
        assert re.search(rf"weights {version} were fetched: \S+ MB from h0\n", caplog.text)
    assert first.relay.state.size_bytes > 0


def test_a_host_that_missed_versions_gets_the_deltas_in_between(world: World) -> None:
    host = world.host()
    world.bring(host, world.publish())
    for _ in range(3):
        version = world.publish()
    full = sum(len(data) for data in world.models[1].values())
    assert 0 < world.bring(host, version)["trainer"] < full


def test_a_host_that_sees_the_folder_fetches_nothing_and_serves_it(world: World) -> None:
    near, far = world.host(), world.host()
    version = world.publish()
    written = world.written[version]
    near.relay.bring(written.path, Content(version, written.weights), world.relays[version], time.monotonic() + 20)
    assert near.relay.state.fed_by == {}
    assert [*world.bring(far, version, near.source)] == ["h0"]
    other = world.publish()  # the folder of another version under the path
    content = Content(other, world.written[other].weights)
    near.relay.bring(written.path, content, world.relays[other], time.monotonic() + 20)
    assert [*near.relay.state.fed_by] == ["trainer"]


def test_a_folder_of_another_trainer_under_the_path(world: World) -> None:
    """A host whose own disk has something else there fetches, and needs nothing when it is told to load."""
    host, version = world.host(), world.publish()
    with PublishedWeights(world.folder / "theirs", KINDS, threads=1) as others:
        theirs = publish(others, model(5), version)
    content = Content(version, world.written[version].weights)
    for read_bytes in (True, False):
        path, read = host.relay.bring(theirs.path, content, world.relays[version], time.monotonic() + 20)
        assert bool(read) == read_bytes
        with host.copy.hold(path, content):
            assert_same(read_copy(host.copy.folder), world.models[version])


def test_hosts_of_one_copy_fetch_once(world: World) -> None:
    version = world.publish()
    host = world.host()
    twin = WeightsRelay(LocalCopy(host.copy.folder, None), None, "twin", None)
    content = Content(version, world.written[version].weights)
    with ThreadPoolExecutor() as pool:
        done = [
            pool.submit(one.bring, ELSEWHERE, content, world.relays[version], time.monotonic() + 20)
            for one in (host.relay, twin)
        ]
    assert [one.result()[0] for one in done] == [version_path(host.copy.folder / ".weight_sync/incoming", version)] * 2
    assert sorted([len(host.relay.state.fed_by), len(twin.state.fed_by)]) == [0, 1]


def test_a_host_that_waits_for_another_of_its_machine_feeds_no_third(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three hosts share a copy and one fetches; a child asks them in turn, and the trainer sends the version once."""
    monkeypatch.setattr(chunk_server, "UNKNOWN_S", 600.0)
    for number in (1, 2):
        (world.folder / f"h{number}").symlink_to(world.folder / "h0")
    waits, fetches, comes_later, child = (world.host() for _ in range(4))
    version = world.publish()
    relay = world.relays[version]
    content = Content(version, world.written[version].weights)
    is_fetching, may_end = Event(), Event()
    check = fetches.relay._check

    def paused(until: float, ended: Event | None) -> None:
        check(until, ended)
        if fetches.server._offered:
            is_fetching.set()
            may_end.wait(10)

    monkeypatch.setattr(fetches.relay, "_check", paused)
    deadline = time.monotonic() + 20
    with ThreadPoolExecutor() as pool:
        fetching = pool.submit(fetches.relay.bring, ELSEWHERE, content, relay, deadline)
        assert is_fetching.wait(10)
        waiting = pool.submit(waits.relay.bring, ELSEWHERE, content, relay, deadline)
        until(lambda: not waits.server.is_patient, "the waiting host")
        fed = pool.submit(world.bring, child, version, waits.source, fetches.source)
        until(lambda: fetches.server.sent_bytes, "the child")
        may_end.set()
        assert [*fed.result()] == ["h1"]
        fetching.result()
        waiting.result()
    assert waits.server.is_patient
    comes_later.relay.bring(ELSEWHERE, content, relay, deadline)
    for one in (waits, comes_later):
        assert [*world.bring(world.host(), version, one.source)] == [one.source.name]


def test_a_late_host_copies_another_when_the_trainer_is_gone(world: World) -> None:
    host, late = world.host(), world.host()
    for _ in range(3):
        version = world.publish()
        world.bring(host, version)
    world.trainer.close()
    assert [*world.bring(late, version, host.source)] == ["h0"]


def test_sources_that_are_gone_are_left_before_they_count_as_silent(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host, late = world.host(), world.host()
    version = world.publish()
    world.bring(host, version)
    world.trainer.close()
    monkeypatch.setattr(chunk_source, "SILENCE_S", 600.0)
    gone = WeightSource("dead", f"tcp://127.0.0.1:{free_port()}")
    with caplog.at_level(logging.INFO):
        assert [*world.bring(late, version, gone, host.source)] == ["h0"]
    assert f"dead at {gone.endpoint} is gone: for 1 s no process has listened there" in caplog.text


def test_a_late_host_rather_copies_another_than_the_trainers_chain(world: World) -> None:
    host, late = world.host(), world.host()
    for _ in range(3):
        version = world.publish()
        world.bring(host, version)
    fed = world.bring(late, version, host.source)
    assert fed["h0"] > 10 * fed.get("trainer", 0)


def test_a_source_that_gives_wrong_bytes_is_named_and_left(world: World, caplog: pytest.LogCaptureFixture) -> None:
    version = world.publish()
    index = (world.written[version].path / INDEX).read_bytes()
    right = world.written[version].path.joinpath("model-00000-of-00001.safetensors").read_bytes()

    def answer(ask: ChunkAsk, content: bytes) -> list[bytes]:
        if ask.file == INDEX_FILE:
            return [DATA, content, index]
        data = bytearray(right[ask.chunk * CHUNK : (ask.chunk + 1) * CHUNK])
        if ask.chunk == 3:
            data[0] ^= 1
        return [DATA, content, bytes(data)]

    liar = Liar(f"ipc://{world.folder}/liar", answer)
    try:
        with caplog.at_level(logging.ERROR):
            fed = world.bring(world.host(), version, liar.source)
        assert {"liar", "trainer"} == {*fed}
        assert "liar at ipc://" in caplog.text
        assert "gave wrong bytes of chunk 3" in caplog.text
    finally:
        liar.close()


@pytest.mark.parametrize("kind", ["index", "malformed", "short", "gone", "unasked", "silent"])
def test_other_lies(world: World, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    version = world.publish()

    def answer(ask: ChunkAsk, content: bytes) -> list[bytes] | None:
        match kind:
            case "index":
                return [DATA, content, json.dumps({"weight_map": {}, "files": {}}).encode()]
            case "malformed":
                return [DATA, b"\xc1", b""]
            case "short":
                return [DATA, content, b""]
            case "gone":
                return [GONE, content, b""]
            case "unasked":
                return [DATA, codec.encode(ChunkAsk("0" * 64, ask.file, 7)), b"x"]
            case _:
                return None

    liar = Liar(f"ipc://{world.folder}/liar", answer)
    try:
        with caplog.at_level(logging.INFO):
            assert [*world.bring(world.host(), version, liar.source)] == ["trainer"]
        assert "liar at ipc://" in caplog.text
        assert ("which was not asked for" in caplog.text) == (kind == "unasked")
    finally:
        liar.close()


def test_a_copy_with_other_bytes_is_refused(world: World, caplog: pytest.LogCaptureFixture) -> None:
    host, late = world.host(), world.host()
    version = world.publish()
    world.bring(host, version)
    weights = world.written[version].weights
    found = offered_copy(host.copy, weights)
    assert found is not None
    index = json.loads(found.index)
    data = bytearray(b"".join(found.read(0, chunk) or b"" for chunk in range(len(found.files[0][1].chunks))))
    data[-1] ^= 1
    (name, sums), *_ = found.files
    last = version_folder.checksum(np.frombuffer(bytes(data[len(data) - len(data) % CHUNK :]), np.uint8))
    index["files"][name]["chunks"] = [*sums.chunks[:-1], last]
    forged = json.dumps(index).encode()

    def answer(ask: ChunkAsk, content: bytes) -> list[bytes]:
        if ask.file == COPY_FILE:
            return [DATA, content, forged]
        if ask.folder == sha256(forged).hexdigest() and ask.file == 0:
            return [DATA, content, bytes(data[ask.chunk * CHUNK : (ask.chunk + 1) * CHUNK])]
        return [GONE, content, b""]

    world.trainer.close()
    host.server.withdraw(set())  # the copy is what is left
    liar = Liar(f"ipc://{world.folder}/liar", answer)
    try:
        with caplog.at_level(logging.ERROR):
            fed = world.bring(late, version, liar.source, host.source)
        assert {*fed} == {"liar", "h0"}
        assert "liar gave a copy that has other bytes of" in caplog.text
    finally:
        liar.close()


def test_a_version_that_is_pruned_while_it_is_fetched(world: World) -> None:
    host = world.host()
    version = world.publish()
    remove_version(world.written[version].path)
    with pytest.raises(InvalidWeights, match="no source has the right weights; asked: trainer"):
        world.bring(host, version)
    world.published.discard()
    assert [*world.bring(host, world.publish(model(5)))] == ["trainer"]


def test_a_trainer_that_is_started_again_in_the_middle(world: World) -> None:
    host, version = world.host(), world.publish()
    world.trainer.close()
    with ThreadPoolExecutor() as pool:
        bringing = pool.submit(world.bring, host, version)
        wait_fetching(host)
        world.trainer = PublisherRelay(world.root, world.relays[version].sources[0].endpoint, None, lambda _: None)
        world.trainer.relay(world.written[version].path)
        assert [*bringing.result()] == ["trainer"]


def test_a_source_is_waited_for_within_the_deadline_only(world: World) -> None:
    host = world.host()
    version = world.publish()
    world.trainer.close()
    began = time.monotonic()
    with pytest.raises(RequestTimeout):
        world.bring(host, version, limit_s=0.5)
    assert time.monotonic() - began < 5
    host.relay.close()
    with pytest.raises(EngineFailed, match="stopping"):
        world.bring(host, version)


def test_what_came_before_a_death_is_not_fetched_again(world: World) -> None:
    version = world.publish()
    host, again = world.host(), world.host()
    first = sum(world.bring(host, version).values())
    came = version_path(host.copy.folder / ".weight_sync/incoming", version)
    kept = version_path(again.copy.folder / ".weight_sync/incoming", version)
    came.rename(kept.parent.mkdir(parents=True) or kept)
    (kept / INDEX).unlink()
    with (kept / "model-00000-of-00001.safetensors").open("r+b") as file:
        file.seek(2 * CHUNK)
        file.write(b"torn")
    index = (world.written[version].path / INDEX).stat().st_size
    assert sum(world.bring(again, version).values()) == CHUNK + index < first


def test_a_fetch_that_is_ended_leaves_its_place_to_another(world: World) -> None:
    host = world.host()
    version = world.publish()
    newer = world.publish()

    def answer(ask: ChunkAsk, content: bytes) -> None:
        return None

    liar = Liar(f"ipc://{world.folder}/liar", answer)
    try:
        with ThreadPoolExecutor() as pool:
            ended = Event()
            older = pool.submit(world.bring, host, version, liar.source, ended=ended)
            wait_fetching(host)
            ended.set()
            assert [*world.bring(host, newer)] == ["trainer"]
            with pytest.raises(RequestTimeout, match="other weights"):
                older.result()
    finally:
        liar.close()


def test_a_copy_that_was_damaged_is_fetched_whole(world: World) -> None:
    host = world.host()
    world.bring(host, world.publish())
    (host.copy.folder / INDEX).write_bytes(b"{")
    version = world.publish()
    full = sum(len(data) for data in world.models[1].values())
    assert world.bring(host, version)["trainer"] > full


@pytest.mark.parametrize(
    "change",
    [
        {"files": {}},
        {"files": {"../x": {"size_bytes": 1, "chunks": ["0"]}}, "weight_map": {"w": "../x"}},
        {"files": {"model.safetensors": {"size_bytes": 10**15, "chunks": ["0"]}}},
        {"files": {"model.safetensors": {"size_bytes": -1, "chunks": []}}},
        {"files": {"x" * 256: {"size_bytes": 10, "chunks": ["0"]}}, "weight_map": {"w": "x" * 256}},
        {"files": {"\ud800": {"size_bytes": 10, "chunks": ["0"]}}, "weight_map": {"w": "\ud800"}},
        {"files": {INDEX: {"size_bytes": 0, "chunks": []}}, "weight_map": {"w": INDEX}},
    ],
)
def test_hostile_indexes(change: dict[str, object], tmp_path: Path) -> None:
    index = {
        "metadata": {"version": "000001", "weights": "a" * 64},
        "weight_map": {"w": "model.safetensors"},
        "files": {"model.safetensors": {"size_bytes": 10, "chunks": ["0"]}},
    }
    offered_folder.OfferedFolder(tmp_path, json.dumps(index).encode(), whole=False)
    with pytest.raises(InvalidWeights):
        offered_folder.OfferedFolder(tmp_path, json.dumps(index | change).encode(), whole=False)


def test_hostile_asks(world: World) -> None:
    """Paths cannot be named; wrong numbers are gone; what is no ask gets no answer."""
    version = world.publish()
    digest = world.relays[version].index
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(world.relays[version].sources[0].endpoint)
        for file, chunk in ((1, 0), (0, 10**6), (10**6, 0)):
            socket.send_multipart([b"", codec.encode(ChunkAsk(digest, file, chunk))])
            assert socket.poll(5000)
            assert socket.recv_multipart()[1] == GONE
        for bad in (
            b"",
            b"\xc1",
            codec.encode(ChunkAsk("../../etc/passwd", 0, 0)),
            codec.encode(ChunkAsk(digest, -3, 0)),
        ):
            socket.send_multipart([b"", bad])
        socket.send_multipart([b"x"] * 3)
        socket.send_multipart([b"", codec.encode(ChunkAsk(digest, INDEX_FILE, 0))])
        assert socket.poll(5000)
        assert socket.recv_multipart()[3] == (world.written[version].path / INDEX).read_bytes()
        assert not socket.poll(0)


def test_slow_readers_do_not_fill_the_memory(short_path: Path) -> None:
    """64 peers ask for all that they may and read nothing: a bounded number of chunks leaves the disk."""
    kinds = {"w": TensorKind("U8", (40 * 2**20,))}
    with PublishedWeights(short_path / "published", kinds) as published:
        published.add("w", np.zeros(40 * 2**20, np.uint8))
        written = published.write(1)
        trainer = PublisherRelay(short_path / "published", f"ipc://{short_path}/t.w", None, lambda _: None)
        relay = trainer.relay(written.path)
        with zmq.Context() as context:
            peers = []
            try:
                for _ in range(64):
                    peers.append(peer := context.socket(zmq.DEALER))
                    peer.linger, peer.rcvhwm = 0, 1
                    peer.setsockopt(zmq.RCVBUF, 4096)
                    peer.connect(relay.sources[0].endpoint)
                    for chunk in range(10):
                        peer.send_multipart([b"", codec.encode(ChunkAsk(relay.index, 0, chunk))])
                server = trainer._server
                while server.sent_bytes < 30 * version_folder.CHUNK_BYTES:
                    PAUSE.wait(0.01)
                assert len(server._out) <= chunk_server.OUT_LIMIT
            finally:
                for peer in peers:
                    peer.close()
                trainer.close()
