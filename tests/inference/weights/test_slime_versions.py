"""Versions that slime has published, in a host's copy."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors.numpy
import zstandard
from support.weight_versions import (
    assert_same,
    model,
    read_copy,
    slime_write,
    step,
    write_checkpoint,
)

from prorl_zmq.errors import InvalidWeights
from prorl_zmq.inference.checkpoint import INDEX
from prorl_zmq.inference.weights.local_copy import LocalCopy
from prorl_zmq.inference.weights.version_chain import Content
from prorl_zmq.inference.weights.version_folder import VersionFolder, remove_version, version_path

if TYPE_CHECKING:
    from pathlib import Path

    from support.weight_versions import Model

COUNT = 4
FILE = "model-00000-of-00001.safetensors"


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_deltas_of_slime(tmp_path: Path, encoding: str) -> None:
    """They begin at the engines' model, which is its version 0."""
    weights = model()
    copy = LocalCopy(tmp_path / "copy", write_checkpoint(tmp_path / "served", weights), threads=2)
    for version in range(1, 6):
        after = step(weights, version)
        slime_write(tmp_path / "published", version, weights, after, encoding)
        weights = after
        if version != 3:
            assert copy.fetch(version_path(tmp_path / "published", version), Content(version)).version == version
            assert_same(read_copy(tmp_path / "copy"), weights)
    copy.fetch(version_path(tmp_path / "published", 4), Content(4))
    full = write_checkpoint(version_path(tmp_path / "published", 6), weights)
    (full / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, "model.safetensors")}))
    slime_write(tmp_path / "published", 7, weights, model(3), encoding)
    copy.fetch(version_path(tmp_path / "published", 7), Content(7))
    assert_same(read_copy(tmp_path / "copy"), model(3))


def changed(before: Model, *names: str) -> Model:
    return {name: data ^ 9 if name in names else data for name, data in before.items()}


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_numbers_that_slime_uses_again(tmp_path: Path, encoding: str) -> None:
    """Another run writes its versions over those of an earlier one, whose checksums do not contradict them."""
    root, start = tmp_path / "published", model()

    def write(version: int, before: Model, after: Model) -> None:
        remove_version(version_path(root, version))
        slime_write(root, version, before, after, encoding)

    def fetched(version: int) -> Model:
        copy.fetch(version_path(root, version), Content(version))
        return read_copy(copy.folder)

    copy = LocalCopy(tmp_path / "copy", write_checkpoint(tmp_path / "served", start), threads=2)
    first = changed(start, "embed", "scale")
    second = changed(first, "layers.1.w")
    write(1, start, first)
    write(2, first, second)
    assert_same(fetched(2), second)
    other = changed(start, "layers.0.w")
    write(1, start, other)
    assert_same(fetched(1), other)  # the second version is still that of the first run
    write(2, other, changed(other, "layers.1.w"))
    assert_same(fetched(2), changed(other, "layers.1.w"))
    third = changed(start, "norm")
    write(1, start, third)
    write(2, third, changed(third, "scale"))
    assert_same(fetched(2), changed(third, "scale"))
    write(1, start, start)  # nothing has changed
    write(2, start, first)
    assert_same(fetched(1), start)
    assert_same(fetched(2), first)
    assert copy.fetch(version_path(root, 2), Content(2)).read_bytes == 0
    write(3, first, second)
    assert 0 < copy.fetch(version_path(root, 3), Content(3)).tensors == 1, "only the delta is applied"


def test_a_delta_of_slime_whose_base_is_gone(tmp_path: Path) -> None:
    root, start = tmp_path / "published", model()
    copy = LocalCopy(tmp_path / "copy", write_checkpoint(tmp_path / "served", start), threads=2)
    slime_write(root, 1, start, changed(start, "embed"))
    copy.fetch(version_path(root, 1), Content(1))
    remove_version(version_path(root, 1))
    slime_write(root, 2, changed(start, "embed"), start)
    with pytest.raises(InvalidWeights, match="weight_v000002 cannot be reached, since weight_v000001 is not a folder"):
        copy.fetch(version_path(root, 2), Content(2))
    assert copy.had is not None
    assert_same(read_copy(copy.folder), changed(start, "embed"))


def test_a_wrong_delta_of_slime_is_found_by_its_checksums(tmp_path: Path) -> None:
    served = write_checkpoint(tmp_path / "served", model())
    copy = LocalCopy(tmp_path / "copy", served, threads=2)
    slime_write(tmp_path / "published", 1, model(), step(model(), 1))
    slime_write(tmp_path / "published", 2, step(model(), 5), step(model(), 2))  # on another version 1
    copy.fetch(version_path(tmp_path / "published", 1), Content(1))
    with pytest.raises(InvalidWeights, match=r"with weight_v000002, the tensor .* does not get the checksum"):
        copy.fetch(version_path(tmp_path / "published", 2), Content(2))
    assert copy.had is None
    copy.fetch(version_path(tmp_path / "published", 1), Content(1))
    assert_same(read_copy(tmp_path / "copy"), step(model(), 1))


def test_a_frame_that_is_far_too_long_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = LocalCopy(tmp_path / "copy", write_checkpoint(tmp_path / "served", model()), threads=2)
    path = slime_write(tmp_path / "published", 1, model(), step(model(), 1))
    safetensors.numpy.save_file({"norm": np.zeros(2**21, np.uint8)}, path / FILE, {"norm": "0" * 32})
    index = json.loads((path / INDEX).read_text()) | {"weight_map": {"norm": FILE}}
    (path / INDEX).write_text(json.dumps(index))
    monkeypatch.setattr(VersionFolder, "read_file", lambda *_: pytest.fail("it was read"))
    with pytest.raises(InvalidWeights, match="weight_v000001 has 2097152 bytes for norm, a tensor of 32 bytes"):
        copy.fetch(path, Content(1))


@pytest.mark.parametrize("content", [bytes(10**8), b"\0"], ids=["long", "short"])
def test_a_frame_that_does_not_fit_its_tensor(tmp_path: Path, content: bytes) -> None:
    copy = LocalCopy(tmp_path / "copy", write_checkpoint(tmp_path / "served", model()), threads=2)
    path = slime_write(tmp_path / "published", 1, model(), model() | {"norm": np.zeros(32, np.uint8)})
    frame = np.frombuffer(zstandard.ZstdCompressor().compress(content), np.uint8)
    safetensors.numpy.save_file({"norm": frame}, path / FILE, {"norm": "0" * 32})
    with pytest.raises(InvalidWeights, match=r"tensor norm: its difference is (longer|shorter) than the tensor"):
        copy.fetch(version_path(tmp_path / "published", 1), Content(1))
