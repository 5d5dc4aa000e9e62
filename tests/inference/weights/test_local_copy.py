"""A host's copy: brought to versions by whichever way, what is refused, and what becomes of a copy that was damaged."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support.weight_versions import (
    KINDS,
    assert_same,
    damage,
    model,
    publish,
    read_copy,
    slime_apply,
    slime_write,
    step,
    write_checkpoint,
)

from prorl_zmq.errors import EngineFailed, InvalidWeights, RequestTimeout
from prorl_zmq.inference.checkpoint import DELTA, INDEX
from prorl_zmq.inference.weights import local_copy, tensor_delta
from prorl_zmq.inference.weights.local_copy import Fetched, LocalCopy
from prorl_zmq.inference.weights.published_weights import PublishedWeights
from prorl_zmq.inference.weights.stored_tensor import StoredTensor
from prorl_zmq.inference.weights.version_chain import Content
from prorl_zmq.inference.weights.version_folder import read_version, remove_version, version_path
from prorl_zmq.system import node_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.weight_versions import Model

COUNT = 4
FILE = "model-00000-of-00001.safetensors"


class World:
    """A trainer that has published versions 1 to 4, and an empty copy."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "published"
        self.folder = tmp_path / "copy"
        self.served = write_checkpoint(tmp_path / "served", model(99))
        self.copy = LocalCopy(self.folder, self.served, threads=2)
        self.models: dict[int, Model] = {}
        self.contents: dict[int, Content] = {}
        self.published = PublishedWeights(self.root, KINDS, threads=2)
        weights = model()
        for version in range(1, COUNT + 1):
            self.publish(weights, version)
            weights = step(weights, version, 0.01)

    def publish(self, weights: Model, version: int) -> None:
        self.models[version] = weights
        self.contents[version] = Content(version, publish(self.published, weights, version).weights)

    def fetch(self, version: int) -> int:
        """Bring the copy to a version; return the bytes read."""
        done = self.copy.fetch(version_path(self.root, version), self.contents[version])
        assert (done.version, done.weights) == self.contents[version]
        self.check(version)
        return done.read_bytes

    def check(self, version: int) -> None:
        assert self.copy.had == self.contents[version]
        with self.copy.reading(self.contents[version]) as folder:
            assert_same(read_copy(folder), self.models[version])

    def delta_file(self, version: int) -> Path:
        return version_path(self.root, version) / FILE


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    one = World(tmp_path)
    with one.published:
        yield one


FULL_BYTES = sum(len(one) for one in model().values())


def test_versions_in_order(world: World) -> None:
    assert world.fetch(1) == FULL_BYTES
    for version in range(2, COUNT + 1):
        assert 0 < world.fetch(version) < FULL_BYTES / 4
    assert world.fetch(COUNT) == 0


def test_a_fetch_that_is_ended_stops_between_two_tensors_and_is_continued(world: World) -> None:
    class EndedLater(threading.Event):
        checks = 0

        def is_set(self) -> bool:
            self.checks += 1
            return self.checks > 3

    for version in (1, 2):
        ended = EndedLater()
        with pytest.raises(RequestTimeout, match="or these were cancelled"):
            world.copy.fetch(version_path(world.root, version), world.contents[version], ended=ended)
        assert ended.checks < len(KINDS) + 3
        assert world.copy.had is None, "a part of it has come"
        world.fetch(version)


def test_a_late_host_takes_the_full_version_and_the_deltas(world: World) -> None:
    assert FULL_BYTES < world.fetch(COUNT) < 1.5 * FULL_BYTES


def test_a_host_that_missed_versions_takes_the_deltas(world: World) -> None:
    world.fetch(1)
    assert 0 < world.fetch(COUNT) < FULL_BYTES / 2


def test_one_version_back_and_on_again(world: World) -> None:
    world.fetch(4)
    assert 0 < world.fetch(3) < FULL_BYTES
    assert 0 < world.fetch(4) < FULL_BYTES / 4
    assert world.fetch(2) > FULL_BYTES / 2


def test_content_that_the_copy_has_is_not_looked_for(world: World) -> None:
    world.fetch(2)
    world.root.rename(world.root.with_name("away"))
    assert world.fetch(2) == 0
    for wanted in (Content(2), Content(2, "f" * 64), world.contents[3]):  # it may be other content
        with pytest.raises(InvalidWeights, match="is not a folder that this host can see"):
            world.copy.fetch(version_path(world.root, wanted.version), wanted)
    world.check(2)


def test_another_copy_of_the_host_sees_the_same(world: World) -> None:
    world.fetch(2)
    assert LocalCopy(world.folder, None).had == world.contents[2]
    assert json.loads((world.folder / ".weight_sync/state.json").read_text())["version"] == "000002"


def test_versions_in_several_files(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_zmq.inference.weights.published_weights.PART_BYTES", 10_000)
    monkeypatch.setattr("prorl_zmq.inference.weights.published_weights.DELTA_PART_BYTES", 1)
    monkeypatch.setattr(tensor_delta, "PIECE_BYTES", 64)
    world.fetch(2)
    world.publish(model(5), 5)  # full, in other files than the copy's
    world.publish(step(model(5), 5), 6)
    assert world.fetch(6) > FULL_BYTES
    assert not list(world.folder.glob("model-00001*"))
    shutil.rmtree(world.folder)
    world.fetch(6)
    assert len(list(world.folder.glob("*.safetensors"))) == 3


def test_a_full_version_is_read_only_where_it_differs(world: World) -> None:
    world.fetch(4)
    world.publish(world.models[4] | {"norm": model(7)["norm"]}, 2)
    remove_version(version_path(world.root, 3))
    assert world.fetch(2) == len(world.models[4]["norm"])


def test_a_trainer_that_went_back(world: World) -> None:
    """It publishes other weights under numbers that hosts know already."""
    world.fetch(4)
    with PublishedWeights(world.root, KINDS, threads=1) as again:
        world.published, other = again, step(world.models[2], 77)
        world.publish(other, 3)
        assert world.fetch(3) > FULL_BYTES / 2
        world.publish(step(other, 78), 4)
        assert world.fetch(4) < FULL_BYTES / 2


def test_plain_checkpoints_of_any_name(tmp_path: Path) -> None:
    """A folder that was written again under its name and version is copied again."""
    copy = LocalCopy(tmp_path / "copy", None, threads=2)
    for seed, read_bytes in ((1, FULL_BYTES), (1, 0), (2, FULL_BYTES)):
        if read_bytes:
            shutil.rmtree(tmp_path / "step", ignore_errors=True)
            write_checkpoint(tmp_path / "step", model(seed))
        assert copy.fetch(tmp_path / "step", Content(7)).read_bytes == read_bytes
        with copy.reading(Content(7)) as folder:
            assert_same(read_copy(folder), model(seed))


# Refused --------------------------------------------------------------------------------------------------------------


def cut(content: bytearray) -> None:
    del content[-7:]


def flip(content: bytearray) -> None:
    content[-7] ^= 4


def refused(world: World, wanted: Content | int, problem: str) -> None:
    content = world.contents[wanted] if isinstance(wanted, int) else wanted
    with pytest.raises(InvalidWeights, match=problem):
        world.copy.fetch(version_path(world.root, content.version), content)


def test_a_checkpoint_that_changes_while_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, copy = write_checkpoint(tmp_path / "step", model(1)), LocalCopy(tmp_path / "copy", None, threads=1)
    read = StoredTensor.copy_from

    def overwritten(tensor: StoredTensor, other: StoredTensor, form: str) -> str:
        done = read(tensor, other, form)
        if not (tmp_path / "aside").exists():
            (write_checkpoint(tmp_path / "aside", model(2)) / "model.safetensors").replace(source / "model.safetensors")
        return done

    monkeypatch.setattr(StoredTensor, "copy_from", overwritten)
    with pytest.raises(InvalidWeights, match="step changed while it was read"):
        copy.fetch(source, Content(1))
    assert copy.had is None
    copy.fetch(source, Content(1))
    assert_same(read_copy(copy.folder), model(2))


@pytest.mark.parametrize(("change", "problem"), [(cut, "whole safetensors file|bytes"), (flip, "of its checksums")])
def test_a_damaged_delta_changes_nothing(world: World, change: Callable[[bytearray], object], problem: str) -> None:
    world.fetch(2)
    damage(world.delta_file(3), change)
    refused(world, 3, problem)
    world.check(2)
    refused(world, 4, "weight_v000003")
    world.check(2)
    world.publish(step(world.models[4], 5), 5)
    remove_version(version_path(world.root, 4))
    refused(world, 5, "weight_v000005 cannot be reached, since weight_v000004 is not a folder")
    world.check(2)


@pytest.mark.parametrize("file", [FILE, INDEX])
@pytest.mark.parametrize("change", [cut, flip, None])
def test_a_full_version_needs_no_delta_beside_it(
    world: World, file: str, change: Callable[[bytearray], object] | None
) -> None:
    full = COUNT
    while not (version_path(world.root, full) / DELTA).is_dir():
        world.publish(step(world.models[full], full), full + 1)
        full += 1
    world.fetch(full - 1)
    damaged = version_path(world.root, full) / DELTA / file
    if change is None:
        damaged.unlink()
    else:
        damage(damaged, change)
    world.fetch(full)
    world.publish(step(world.models[full], full), full + 1)
    world.fetch(full + 1)


def test_a_version_that_is_not_complete(world: World) -> None:
    world.fetch(2)
    (version_path(world.root, 3) / INDEX).unlink()
    refused(world, 3, "weight_v000003 has no index: it is not complete")
    refused(world, 4, "weight_v000004 cannot be reached, since weight_v000003 has no index")
    world.delta_file(4).unlink()
    refused(world, 4, "weight_v000004 cannot be read: .* No such file")
    world.check(2)


def test_a_damaged_full_version_is_named(world: World) -> None:
    damage(world.delta_file(1), flip)
    refused(world, 2, "weight_v000001 has other bytes of .* than its checksum says")
    refused(world, 1, "weight_v000001 has other bytes of")
    assert world.copy.had is None
    world.publish(model(5), 5)
    world.fetch(5)


def test_a_number_that_was_used_again(world: World) -> None:
    world.fetch(2)
    refused(world, Content(3, "0" * 32), "weight_v000003 has other weights than the trainer published")
    world.check(2)


def test_a_delta_for_other_weights_of_this_number(world: World) -> None:
    world.fetch(2)
    state = world.folder / ".weight_sync/state.json"
    state.write_text(state.read_text().replace(world.contents[2].weights, "0" * 32))
    assert world.fetch(3) > FULL_BYTES / 4  # from the full version


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("delta_encoding", "dense", "weight_v000003 has the encoding 'dense'; we read xor, overwrite"),
        ("compression_format", "lz4", "weight_v000003 has the compression 'lz4'; we read zstd"),
        ("checksum_format", "blake3", "weight_v000003 has checksums of the form 'blake3'; we read xxh3-128, adler32"),
        ("checksum_format", ["a"], r"weight_v000003 has checksums of the form \['a'\]"),
        ("version", "000004", "weight_v000003 is version 4; it was given as version 3"),
        ("version", "0b1", "weight_v000003 has the version '0b1', which is no version"),
        ("base_version", None, "weight_v000003 is version 3 on None"),
        ("base_version", "000003", "weight_v000003 is version 3 on 3"),
    ],
)
def test_indexes_that_are_refused(world: World, key: str, value: object, problem: str) -> None:
    world.fetch(2)
    index = version_path(world.root, 3) / INDEX
    content = json.loads(index.read_text())
    content["metadata"][key] = value
    index.write_text(json.dumps(content))
    refused(world, 3, problem)
    world.check(2)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"[]", "has an index that cannot be read"),
        (b"\xff", "has an index that cannot be read"),
        (b'{"weight_map": {"a": "../x.safetensors"}}', "has an index that names files in other folders"),
        (b'{"weight_map": {"a": "x\\u0000y"}}', "has an index that names files in other folders"),
        (b"[" * 100_000, "has an index that cannot be read"),
    ],
)
def test_files_that_are_no_index(world: World, content: bytes, problem: str) -> None:
    (version_path(world.root, 3) / INDEX).write_bytes(content)
    refused(world, 3, f"weight_v000003 {problem}")


@pytest.mark.parametrize("has_sums", [True, False])
def test_a_file_of_a_delta_that_is_far_too_long(world: World, has_sums: bool) -> None:
    world.fetch(2)
    os.truncate(world.delta_file(3), 2**40)
    if not has_sums:
        index = version_path(world.root, 3) / INDEX
        index.write_text(json.dumps(json.loads(index.read_text()) | {"files": {}}))
    refused(world, 3, "weight_v000003")
    world.check(2)


def test_weights_of_another_model(world: World, tmp_path: Path) -> None:
    kinds = {**KINDS, "more": KINDS["norm"]}
    with PublishedWeights(tmp_path / "other", kinds, threads=1) as other:
        publish(other, model() | {"more": model()["norm"]}, 1)
    with pytest.raises(InvalidWeights, match="has tensors that the model lacks: more"):
        world.copy.fetch(version_path(tmp_path / "other", 1), Content(1))
    assert not list(world.folder.glob("*.safetensors"))


def test_a_delta_of_another_model(world: World) -> None:
    world.fetch(1)
    before = {name: model()[name] for name in ("norm", "scale")} | {"more": model()["norm"]}
    slime_write(world.root, 2000, before, step(before, 1))
    shutil.rmtree(version_path(world.root, 2))
    version_path(world.root, 2000).rename(version_path(world.root, 2))
    index = version_path(world.root, 2) / INDEX
    index.write_text(
        index.read_text().replace("002000", "000002").replace("2000", "000002").replace("001999", "000001")
    )
    with pytest.raises(InvalidWeights, match="has tensors that the model lacks: more; is it of this model"):
        world.copy.fetch(version_path(world.root, 2), Content(2))
    world.check(1)


def test_an_engine_reads_no_other_version(world: World) -> None:
    for had in ("no whole version", "version 1"):
        with pytest.raises(InvalidWeights, match=f"has {had}, not 2"), world.copy.reading(Content(2)):
            pass
        world.fetch(1)


def test_an_engine_reads_no_other_content_of_its_version(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its fetch and its load, another host brings the copy to what a second trainer published."""
    with PublishedWeights(tmp_path / "second", KINDS, threads=1) as second:
        other = publish(second, model(8), 1)
    neighbour, fetch, calls = LocalCopy(world.folder, world.served, threads=1), world.copy.fetch, 0

    def overtaken(path: Path, wanted: Content, until: float, ended: threading.Event | None) -> Fetched:
        nonlocal calls
        calls += 1
        done = fetch(path, wanted, until, ended)
        if calls == 1:
            neighbour.fetch(other.path, Content(1, other.weights))
        return done

    monkeypatch.setattr(world.copy, "fetch", overtaken)
    for wanted in (world.contents[1], Content(1)):
        calls = 0
        with world.copy.hold(version_path(world.root, 1), wanted):
            assert_same(read_copy(world.folder), world.models[1])
        assert calls == 2
    with pytest.raises(InvalidWeights, match="has other weights of this number, not 1"):
        world.copy.reading(Content(1, other.weights)).__enter__()


def test_time_that_is_over(world: World) -> None:
    world.fetch(1)
    with pytest.raises(RequestTimeout, match="not fetched in time"):
        world.copy.fetch(version_path(world.root, 4), world.contents[4], until=time.monotonic() - 1)
    world.check(1)


def test_a_copy_that_another_process_holds_for_too_long(world: World) -> None:
    world.fetch(1)
    with world.copy.reading(Content(1)), ThreadPoolExecutor(1) as pool:
        path, until = version_path(world.root, 2), time.monotonic() + 0.1
        with pytest.raises(RequestTimeout, match="another process held the copy"):
            pool.submit(world.copy.fetch, path, world.contents[2], until).result(30)
        assert time.monotonic() > until
        world.check(1)
    world.fetch(2)


def test_a_disk_without_room(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(local_copy.os, "posix_fallocate", full)
        with pytest.raises(EngineFailed, match=r"could not be copied to .*No space left.*; give another") as caught:
            world.fetch(1)
        assert caught.value.fields == {"final": True}, "a trainer does not wait for room"
    assert world.copy.had is None
    world.fetch(1)


# Damaged copies -------------------------------------------------------------------------------------------------------


def test_a_tensor_of_the_copy_that_was_changed(world: World) -> None:
    world.fetch(2)
    place = read_version(world.folder).tensors["embed"]

    def flip_one(content: bytearray) -> None:
        content[place.at + 5] ^= 4

    damage(world.folder / FILE, flip_one)
    assert world.fetch(3) > FULL_BYTES / 4
    damage(world.folder / FILE, flip_one)
    assert world.fetch(2) > FULL_BYTES / 4  # back


@pytest.mark.parametrize(
    "state", [b"", b"{", b"null", b'{"version": "x"}', b'{"version": "000002", "boot": "another"}']
)
def test_a_state_that_says_nothing(world: World, state: bytes) -> None:
    world.fetch(2)
    (world.folder / ".weight_sync/state.json").write_bytes(state)
    assert world.copy.had is None
    world.fetch(3)


def test_after_a_restart_of_the_machine_the_state_says_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.fetch(2)
    assert world.copy.had is not None
    (tmp_path / "boot").write_text("another")
    monkeypatch.setattr(node_name, "BOOT_ID", tmp_path / "boot")
    assert world.copy.had is None
    world.fetch(3)


def test_files_of_the_copy_that_are_gone(world: World) -> None:
    world.fetch(2)
    (world.folder / FILE).unlink()
    (world.folder / "left").mkdir()
    world.fetch(3)
    damage(world.folder / FILE, cut)
    world.fetch(4)
    damage(world.folder / INDEX, cut)
    world.fetch(3)
    assert sorted(path.name for path in world.folder.iterdir()) == [".weight_sync", FILE, INDEX]


def test_readers_and_writers_wait_for_each_other(world: World) -> None:
    world.fetch(1)
    fetching = threading.Thread(target=world.copy.fetch, args=(version_path(world.root, 2), world.contents[2]))
    with world.copy.reading(Content(1)) as folder, LocalCopy(world.folder, None).reading(Content(1)):
        fetching.start()
        fetching.join(0.05)
        assert fetching.is_alive()
        assert_same(read_copy(folder), world.models[1])
    fetching.join(30)
    world.check(2)


def test_slime_reads_ours(world: World, tmp_path: Path) -> None:
    (first,) = version_path(world.root, 1).glob("*.safetensors")
    local = tmp_path / "slime"
    local.mkdir()
    shutil.copy(first, local)
    for version in range(2, COUNT + 1):
        slime_apply(local, version_path(world.root, version))
        assert_same(read_copy(local), world.models[version])
