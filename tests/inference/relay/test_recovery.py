"""A host gets a version after trouble: old numbers, damaged or locked folders, full disks, lying copies."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from support.relay_world import CHUNK, Liar
from support.weight_versions import KINDS, model, publish

from prorl_zmq.errors import EngineFailed, InvalidWeights, RequestTimeout
from prorl_zmq.inference.checkpoint import INDEX, read_index
from prorl_zmq.inference.relay import chunk_server, chunk_source, offered_copy, offered_folder
from prorl_zmq.inference.relay.chunk_server import ChunkServer
from prorl_zmq.inference.relay.chunk_source import ChunkSource, check_deadline
from prorl_zmq.inference.relay.offered_folder import offered_version
from prorl_zmq.inference.relay.weights_relay import WeightsRelay
from prorl_zmq.inference.weights.local_copy import LocalCopy
from prorl_zmq.inference.weights.published_weights import PublishedWeights
from prorl_zmq.inference.weights.version_folder import version_path, write_aside
from prorl_zmq.security.handshake import Handshake
from prorl_zmq.wire import codec
from prorl_zmq.wire.messages.relay import COPY_FILE, DATA, GONE, WAIT, ChunkAsk, WeightSource

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from support.relay_world import Host, World

    from prorl_zmq.inference.relay.offered_folder import OfferedFolder
    from prorl_zmq.inference.weights.version_chain import Content
    from prorl_zmq.inference.weights.version_folder import Sums


def incoming(host: Host, version: int) -> Path:
    return version_path(host.copy.folder / ".weight_sync/incoming", version)


def test_a_trainer_that_resumes_one_version_back(world: World) -> None:
    host = world.host()
    for _ in range(3):
        world.bring(host, world.publish())
    world.published.close()
    world.published = PublishedWeights(world.root, KINDS, threads=1)
    world.written[2] = publish(world.published, world.models[2], 2)
    world.relays[2] = world.trainer.relay(world.written[2].path)
    assert [*world.bring(host, 2)] == ["trainer"]


def test_a_damaged_version_is_repaired(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that died before it used a version has a chunk of zeros, as after a power failure."""
    host, version = world.host(), world.publish()
    with monkeypatch.context() as patch:
        patch.setattr(host.copy, "fetch", None)
        with pytest.raises(TypeError):
            world.bring(host, version)
    (file,) = incoming(host, version).glob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size - file.stat().st_size % CHUNK - CHUNK)
        opened.write(bytes(CHUNK))
    index = (world.written[version].path / INDEX).stat().st_size
    assert world.bring(host, version) == {"trainer": CHUNK + index}


def test_a_copy_that_is_locked_for_a_moment(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine of the machine locks the copy when a late host asks for it; the ask stays open."""
    host, late = world.host(), world.host()
    for _ in range(3):
        version = world.publish()
        world.bring(host, version)
    world.trainer.close()
    calls, reading = count(), host.copy.reading
    with (host.copy.folder / ".weight_sync/lock").open("a") as lock:

        def locked_once(wanted: Content, until: float) -> AbstractContextManager[Path]:
            fcntl.flock(lock, fcntl.LOCK_EX if next(calls) == 0 else fcntl.LOCK_UN)
            return reading(wanted, until)

        monkeypatch.setattr(host.copy, "reading", locked_once)
        assert [*world.bring(late, version, host.source)] == ["h0"]
    assert next(calls) > 1


def test_new_weights_do_not_wait_for_the_index_of_a_copy(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late host asks for the copy, and the next version comes while each file is read."""
    host, version = world.host(), world.publish()
    world.bring(host, version)
    newer = world.publish()
    read = offered_copy.file_sums
    reads: list[str] = []

    def changed_meanwhile(path: Path, note: Callable[[int, bytes], None]) -> Sums:
        reads.append(path.name)
        found = read(path, note)
        if len(reads) == 1:
            world.bring(host, newer, limit_s=5)
        return found

    monkeypatch.setattr(offered_copy, "file_sums", changed_meanwhile)
    assert offered_copy.offered_copy(host.copy, world.written[version].weights) is None
    assert offered_copy.offered_copy(host.copy, world.written[newer].weights) is not None
    assert reads == ["model-00000-of-00001.safetensors"] * 2


def test_a_source_that_dies_in_the_middle_of_its_copy(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Another host has the same copy; it offers its chunks only after it was asked for its index."""
    dies, other, late = world.host(), world.host(), world.host()
    for _ in range(3):
        version = world.publish()
        world.bring(dies, version)
        world.bring(other, version)
    weights = world.written[version].weights
    found = offered_copy.offered_copy(dies.copy, weights)
    assert found is not None
    other.server.withdraw(set())  # the copy is what is left
    world.trainer.close()

    def answer(ask: ChunkAsk, content: bytes) -> list[bytes] | None:
        if ask.file == COPY_FILE:
            return [DATA, content, found.index]
        if ask.folder == found.digest and ask.chunk < 3:
            return [DATA, content, found.read(ask.file, ask.chunk) or b""]
        return None if ask.folder == found.digest else [GONE, content, b""]

    silent = Liar(f"ipc://{world.folder}/silent", answer)
    try:
        with caplog.at_level(logging.INFO):
            fed = world.bring(late, version, silent.source, other.source)
    finally:
        silent.close()
    assert fed["liar"] == len(found.index) + 3 * CHUNK
    assert fed["h1"] == len(found.index) + sum(sums.size_bytes for _, sums in found.files) - 3 * CHUNK
    assert [line.levelname for line in caplog.records].count("ERROR") == 0


def test_an_answer_about_a_copy_that_changed_meanwhile(world: World) -> None:
    """The copy gets the version that is asked for while its older content is looked at."""
    looks: list[str] = []

    def find_copy(weights: str) -> OfferedFolder | None:
        looks.append(weights)
        if len(looks) == 1:
            server.forget_copies()
            return None
        return offered_version(written.path)

    world.publish()
    written = world.written[1]
    server = ChunkServer(f"ipc://{world.folder}/s.w", None, find_copy=find_copy)
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(server.endpoint)
            dealer.send_multipart([b"", codec.encode(ChunkAsk(written.weights, COPY_FILE, 0))])
            while (answer := dealer.recv_multipart())[1] == WAIT:
                pass
        assert answer[3] == (written.path / INDEX).read_bytes()
    finally:
        server.close()


def test_an_older_version_is_removed_before_a_full_one_comes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has room for two versions: the copy, and the one that comes."""
    host = world.host()
    world.bring(host, world.publish())
    there: list[list[str]] = []
    allocate = os.posix_fallocate

    def allocated(file: int, at: int, length: int) -> None:
        there.append([path.name for path in incoming(host, 1).parent.glob("weight_*")])
        allocate(file, at, length)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", allocated)
        world.bring(host, world.publish(model(5)))
    assert there[0] == ["weight_v000002"]

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineFailed, match="No space left on device; give another `weights_dir`") as failed:
        world.bring(host, world.publish(model(6)))
    assert failed.value.fields["final"]


def test_half_a_copy_makes_room_for_the_trainers_version(world: World) -> None:
    host, version = world.host(), world.publish()
    incoming(host, version).mkdir(parents=True)
    (incoming(host, version) / "model-00007-of-00009.safetensors").write_bytes(b"half")
    world.bring(host, version)
    files = sorted(file.name for file in incoming(host, version).iterdir())
    assert files == ["model-00000-of-00001.safetensors", INDEX]


def test_a_full_disk_is_not_the_fault_of_the_source(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host, late = world.host(), world.host()
    for _ in range(3):
        version = world.publish()
        world.bring(host, version)
    calls = count()

    def full(*_: int) -> None:
        next(calls)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with caplog.at_level(logging.WARNING), pytest.raises(EngineFailed, match="No space left on device") as failed:
        world.bring(late, version, host.source)
    assert failed.value.fields["final"]
    assert next(calls) == 1
    assert caplog.text == ""


def test_a_flood_does_not_outlast_the_deadline(short_path: Path) -> None:
    """A source sends 1 MiB messages without end."""
    ended = Event()

    def flood(router: zmq.Socket[bytes]) -> None:
        identity, *_ = router.recv_multipart()
        router.sndtimeo = 100
        until = time.monotonic() + 10
        while not ended.is_set() and time.monotonic() < until:
            with suppress(zmq.Again):
                router.send_multipart([identity, b"", WAIT, b"", bytes(2**20)], copy=False)

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, ThreadPoolExecutor(1) as pool:
        router.linger = 0
        router.bind(f"ipc://{short_path}/flood")
        flooding = pool.submit(flood, router)
        began = time.monotonic()
        sources = (WeightSource("flood", f"ipc://{short_path}/flood"),)
        try:
            with ChunkSource(context, None, sources, lambda: check_deadline(began + 0.5)) as source:
                with pytest.raises(RequestTimeout):
                    source.fetch([("0" * 64, 0, 0)], lambda *_: False)
                assert source._connection is not None
                assert source._connection.socket.rcvhwm < 100
            assert time.monotonic() - began < 5
        finally:
            ended.set()
            flooding.result()


def test_an_index_is_read_again_only_if_its_file_changed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    path = world.written[world.publish()].path
    folder = offered_version(path)
    reads = count()

    def counted(path: Path) -> bytes:
        next(reads)
        return read_index(path)

    monkeypatch.setattr(offered_folder, "read_index", counted)
    for chunk in range(5):
        assert folder.read(0, chunk)
    assert next(reads) == 1
    write_aside(path / INDEX, folder.index)
    assert folder.read(0, 0)
    assert next(reads) == 2 + 1
    write_aside(path / INDEX, folder.index + b" ")
    with pytest.raises(InvalidWeights, match="was written again"):
        folder.read(0, 0)


@pytest.mark.parametrize("is_served", [True, False])
def test_a_copy_that_cannot_be_written(
    world: World, is_served: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A host offers a file that is too large for the disk: the trainer is asked, if it is there."""
    host, late = world.host(), world.host()
    for _ in range(3):
        version = world.publish()
        world.bring(host, version)
    written = world.written[version]
    found = offered_copy.offered_copy(host.copy, written.weights)
    assert found is not None
    index = json.loads(found.index)
    large = 2**20
    index["files"][found.files[0][0]] = {"size_bytes": large, "chunks": ["0"] * -(-large // CHUNK)}
    allocate = os.posix_fallocate

    def limited(file: int, at: int, length: int) -> None:
        if length == large:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        allocate(file, at, length)

    def answer(ask: ChunkAsk, content: bytes) -> list[bytes]:
        return [DATA, content, json.dumps(index).encode()] if ask.file == COPY_FILE else [GONE, content, b""]

    monkeypatch.setattr(os, "posix_fallocate", limited)
    if not is_served:
        world.trainer.close()
    liar = Liar(f"ipc://{world.folder}/liar", answer)
    try:
        if is_served:
            assert "trainer" in world.bring(late, version, liar.source)
        else:
            with pytest.raises(EngineFailed, match="File too large"):
                world.bring(late, version, liar.source)
        assert "the copy of liar cannot be written here: [Errno 27] File too large" in caplog.text
        assert "ERROR" not in caplog.text
    finally:
        liar.close()


def test_folders_of_other_disks_are_other_places(world: World) -> None:
    """Containers of one machine may have other disks under the same path; a link is the same folder."""
    first, second = world.host(), world.host()
    assert first.relay.state.place != second.relay.state.place
    link = world.folder / "link"
    link.symlink_to(first.copy.folder)
    twin = WeightsRelay(LocalCopy(link, None), None, "twin", None)
    assert twin.state.place == first.relay.state.place
    link.unlink()
    link.symlink_to(second.copy.folder)
    other = WeightsRelay(LocalCopy(link, None), None, "other", None)
    assert other.state.place == second.relay.state.place


def test_sources_that_close_at_once_are_asked_at_intervals() -> None:
    """A port that another service has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        until = time.monotonic() + 1.5
        sources = (WeightSource("closes", f"tcp://127.0.0.1:{server.getsockname()[1]}"),)

        def accept() -> int:
            accepted = 0
            while time.monotonic() < until:
                with suppress(TimeoutError):
                    server.accept()[0].close()
                    accepted += 1
            return accepted

        with ThreadPoolExecutor(1) as pool, zmq.Context() as context:
            accepting = pool.submit(accept)
            with (
                ChunkSource(context, None, sources, lambda: check_deadline(until)) as source,
                pytest.raises(RequestTimeout),
            ):
                source.fetch([("0" * 64, 0, 0)], lambda *_: False)
            connections = accepting.result()
    assert 2 <= connections < 30


def test_asks_for_what_is_not_there_fill_neither_memory_nor_log(world: World, caplog: pytest.LogCaptureFixture) -> None:
    host, version = world.host(), world.publish()
    world.bring(host, version)
    index = world.relays[version].index
    (file,) = incoming(host, version).glob("*.safetensors")
    file.unlink()
    asks = [ChunkAsk(f"{number:064x}", COPY_FILE, 0) for number in range(2 * chunk_server.COPIES_LIMIT)]
    asks += [ChunkAsk(index, 0, chunk) for chunk in (0, 1, 2, 10**6, 10**6 + 1)]
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(host.source.endpoint)
        for ask in asks:
            dealer.send_multipart([b"", codec.encode(ask)])
            while (answer := dealer.recv_multipart())[1] == WAIT:
                pass
            assert answer[1] == GONE
    assert len(host.server._copies) <= chunk_server.COPIES_LIMIT
    assert [line.levelname for line in caplog.records].count("WARNING") == 1


def test_a_disk_that_does_not_answer_does_not_hold_up_the_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    host, version = world.host(), world.publish()
    world.bring(host, version)
    is_reading, answers = Event(), Event()

    def read(*_: object) -> bytes:
        is_reading.set()
        assert answers.wait(60)
        return b""

    monkeypatch.setattr(chunk_server, "CLOSE_S", 0.1)
    monkeypatch.setattr(offered_folder.OfferedFolder, "read", read)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer, ThreadPoolExecutor(1) as pool:
        dealer.linger = 0
        dealer.connect(host.source.endpoint)
        dealer.send_multipart([b"", codec.encode(ChunkAsk(world.relays[version].index, 0))])
        assert is_reading.wait(10)
        closing = pool.submit(host.server.close)
        try:
            closing.result(timeout=10)
        finally:
            answers.set()
        host.server._thread.join(10)
        assert not host.server._thread.is_alive()


def test_a_server_that_is_closed_writes_to_no_file(world: World) -> None:
    """The number of its file is another file's, and a thread that fetched ends late."""
    host = world.host()
    number = host.server._wake
    host.server.close()
    opened = [os.eventfd(0, os.EFD_NONBLOCK)]
    try:
        while opened[-1] < number:
            opened.append(os.eventfd(0, os.EFD_NONBLOCK))
        host.server.notify()
        for one in opened:
            with pytest.raises(BlockingIOError):
                os.eventfd_read(one)
    finally:
        for one in opened:
            os.close(one)


def test_a_source_that_takes_no_asks_is_left(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """libzmq gave its connection up."""
    version = world.publish()
    lost = WeightSource("lost", f"ipc://{world.folder}/lost")

    class Unconnected(Handshake):
        def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, **options: Any) -> None:
            super().__init__(context, kind, endpoint, None, **options)
            if endpoint == lost.endpoint:
                self.socket.disconnect(endpoint)

    monkeypatch.setattr(chunk_source, "SILENCE_S", 600.0)
    monkeypatch.setattr(chunk_source, "GONE_S", 600.0)
    monkeypatch.setattr(chunk_source, "Handshake", lambda *connected, **options: Unconnected(*connected[:3], **options))
    with caplog.at_level(logging.INFO):
        assert [*world.bring(world.host(), version, lost, limit_s=10)] == ["trainer"]
    assert "takes no more asks" in caplog.text
