"""What a trainer writes: full versions, deltas, and what it does after failures and restarts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors.numpy
import xxhash
import zstandard
from support.weight_versions import KINDS, assert_same, model, publish, read_copy, step

from prorl_zmq.errors import InvalidWeights
from prorl_zmq.inference.checkpoint import INDEX
from prorl_zmq.inference.weights import published_weights, version_chain, version_folder
from prorl_zmq.inference.weights.published_weights import PublishedWeights
from prorl_zmq.inference.weights.version_chain import Content
from prorl_zmq.inference.weights.version_folder import CHUNK_BYTES, published_versions, read_version, version_path

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def published(tmp_path: Path) -> Iterator[PublishedWeights]:
    with PublishedWeights(tmp_path, KINDS, threads=2) as one:
        yield one


def test_the_first_version_is_a_plain_checkpoint(published: PublishedWeights, tmp_path: Path) -> None:
    weights = model()
    written = publish(published, weights, 7)
    assert (written.path, written.is_full, written.delta_bytes) == (tmp_path / "weight_v000007", True, 0)
    assert written.size_bytes == sum(len(one) for one in weights.values())
    assert_same(read_copy(written.path), weights)
    index = json.loads((written.path / INDEX).read_text())
    assert "delta_encoding" not in index["metadata"]
    assert index["metadata"]["total_size"] == written.size_bytes
    assert index["metadata"]["weights"] == written.weights
    assert sorted(path.name for path in written.path.iterdir()) == ["model-00000-of-00001.safetensors", INDEX]


def test_a_delta_is_in_the_public_form(published: PublishedWeights) -> None:
    first = model()
    second = step(first, 1)
    publish(published, first, 1)
    written = publish(published, second, 4)
    assert (written.is_full, written.tensors) == (False, 4)
    index = json.loads((written.path / INDEX).read_text())
    base = {"version": "000004", "base_version": "000001", "delta_encoding": "xor", "compression_format": "zstd"}
    assert index["metadata"].items() >= (base | {"checksum_format": "xxh3-128"}).items()
    file = written.path / "model-00000-of-00001.safetensors"
    assert index["weight_map"] == dict.fromkeys(first.keys() - {"norm"}, file.name)
    with safetensors.safe_open(file, "numpy") as opened:
        sums = opened.metadata()
        for name in opened.keys():  # noqa: SIM118 - it is no mapping
            frame = opened.get_tensor(name)
            assert (frame.dtype, frame.ndim) == (np.uint8, 1)
            difference = zstandard.ZstdDecompressor().decompress(bytes(frame))
            assert difference == (first[name] ^ second[name]).tobytes()
            assert sums[name] == xxhash.xxh3_128(second[name]).hexdigest()
    content = file.read_bytes()
    chunks = [xxhash.xxh3_128(content[at : at + CHUNK_BYTES]).hexdigest() for at in range(0, len(content), CHUNK_BYTES)]
    assert index["files"] == {file.name: {"size_bytes": len(content), "chunks": chunks}}


def test_what_identifies_the_content(published: PublishedWeights, tmp_path: Path) -> None:
    first, second = model(), step(model(), 1)
    names = [publish(published, one, version).weights for version, one in enumerate((first, second, second, first))]
    assert names[0] == names[3] != names[1] == names[2]
    assert read_version(version_path(tmp_path, 3)).base_weights == names[2]


def test_nothing_changed(published: PublishedWeights) -> None:
    publish(published, model(), 1)
    written = publish(published, model(), 2)
    assert (written.is_full, written.tensors, written.delta_bytes) == (False, 0, 0)
    assert read_version(written.path).tensors == {}


def test_parts_have_names_without_gaps(
    published: PublishedWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published_weights, "PART_BYTES", 10_000)
    monkeypatch.setattr(published_weights, "DELTA_PART_BYTES", 1)
    monkeypatch.setattr(version_folder, "CHUNK_BYTES", 100)
    first, second = model(), step(model(), 1)
    full = publish(published, first, 1)
    assert_same(read_copy(full.path), first)
    delta = publish(published, second, 2)
    for written, count in ((full, 3), (delta, 4)):
        files = sorted(path.name for path in written.path.glob("*.safetensors"))
        assert files == [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(count)]
        version = read_version(written.path)
        assert all(len(version.read_file(file)) == version.files[file].size_bytes for file in files)


def test_an_anchor_has_the_delta_too(
    published: PublishedWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_chain, "ANCHOR_SHARE", 0.0)
    first, second = model(), step(model(), 1)
    publish(published, first, 1)
    monkeypatch.setattr(published_weights, "ANCHOR_SHARE", 0.9)
    written = publish(published, second, 2)
    assert written.is_full
    assert written.delta_bytes
    assert_same(read_copy(written.path), second)
    delta = read_version(written.path / "delta")
    assert (delta.version, delta.base_version, delta.weights) == (2, 1, written.weights)
    assert {name: place.checksum for name, place in delta.tensors.items()} == {
        name: place.checksum for name, place in read_version(written.path).tensors.items() if name != "norm"
    }


def test_chains_end_by_bytes(published: PublishedWeights) -> None:
    weights = model()
    is_full = []
    for version in range(12):
        is_full.append(publish(published, weights, version).is_full)
        weights = step(weights, version)
    full = [version for version, one in enumerate(is_full) if one]
    assert full[0] == 0
    assert 1 < len(full) < 8


def test_a_delta_that_is_too_large_is_not_written(published: PublishedWeights) -> None:
    publish(published, model(), 1)
    written = publish(published, model(1), 2)  # other random bytes: a delta would be as large as the model
    assert (written.is_full, (written.path / "delta").exists()) == (True, False)
    assert_same(read_copy(written.path), model(1))
    after = step(model(1), 2)
    written = publish(published, after, 3)
    assert not written.is_full
    assert read_version(written.path).base_version == 2


@pytest.mark.parametrize("version", [5, 4])
def test_a_version_that_does_not_grow_is_full(published: PublishedWeights, version: int) -> None:
    publish(published, model(), 5)
    written = publish(published, step(model(), 1), version)
    assert (written.is_full, written.delta_bytes) == (True, 0)


def test_a_new_process_begins_with_a_full_version(tmp_path: Path) -> None:
    for _ in range(2):
        with PublishedWeights(tmp_path, KINDS, threads=1) as one:
            assert publish(one, model(), 1).is_full
            assert not publish(one, step(model(), 1), 2).is_full


def test_after_a_failure_the_next_version_is_full(
    published: PublishedWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = publish(published, model(), 1)
    with monkeypatch.context() as broken:
        broken.setattr(version_folder, "write_aside", _disk_full)
        with pytest.raises(OSError, match="full"):
            publish(published, step(model(), 1), 2)
    assert published_versions(tmp_path) == ({1}, set())
    assert [path.name for path in tmp_path.iterdir()] == [first.path.name]
    third = step(model(), 3)
    written = publish(published, third, 3)
    assert (written.is_full, written.delta_bytes) == (True, 0)
    assert_same(read_copy(written.path), third)


def _disk_full(*_: object) -> None:
    raise OSError("the disk is full")


def test_tensors_that_are_not_the_models(published: PublishedWeights) -> None:
    weights = model()
    published.add("norm", weights["norm"])
    for name, data in (("norm", weights["norm"]), ("other", weights["norm"]), ("embed", weights["norm"])):
        with pytest.raises(InvalidWeights, match=f"{name} of 32 bytes comes twice, or is not one of the model"):
            published.add(name, data)
    with pytest.raises(InvalidWeights, match=r"were not added: embed, layers\.0\.w, layers\.1\.w and 1 more"):
        published.write(1)
    written = publish(published, weights, 1)
    assert written.is_full
    published.add("norm", weights["norm"])
    with pytest.raises(InvalidWeights, match="were not added"):
        published.write(1)
    assert_same(read_copy(written.path), weights)  # the version that engines may serve is still there


def test_pruning_keeps_what_engines_need(
    published: PublishedWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weight_v000099").mkdir()
    weights, contents = model(), {}
    for version in range(1, 6):
        monkeypatch.setattr(version_chain, "ANCHOR_SHARE", 0.0 if version == 4 else 0.9)
        contents[version] = publish(published, weights, version).weights
        weights = step(weights, version, 0.01)
    assert published.prune(3, []) == set()
    assert published.prune(5, [Content(2, contents[2])]) == {1, 2}
    assert published.prune(5, [Content(5, contents[5])]) == {3}
    assert published_versions(tmp_path) == ({4, 5}, set())
    with PublishedWeights(tmp_path, KINDS, threads=1) as again:
        publish(again, weights, 2)
        assert again.prune(2, [Content(5, contents[5])]) == {4, 5}
