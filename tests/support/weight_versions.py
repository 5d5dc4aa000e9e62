"""Models of random bytes, versions of them, and slime's writer and reader of deltas in a few lines."""

from __future__ import annotations

import json
import mmap
from typing import TYPE_CHECKING

import numpy as np
import safetensors.numpy
import xxhash
import zstandard

from prorl_zmq.inference.checkpoint import INDEX, TensorKind, read_header
from prorl_zmq.inference.weights.version_folder import read_version, version_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from prorl_zmq.inference.weights.published_weights import PublishedWeights, Written

    Model = dict[str, np.ndarray]
    """The bytes of each tensor, uint8 [N]."""

KINDS = {
    "embed": TensorKind("BF16", (100, 64)),
    "layers.0.w": TensorKind("BF16", (64, 48)),
    "layers.1.w": TensorKind("F32", (32, 32)),
    "norm": TensorKind("BF16", (16,)),
    "scale": TensorKind("F32", ()),
}


def model(seed: int = 0) -> Model:
    random = np.random.default_rng(seed)
    return {
        name: random.integers(0, 256, (4 if kind.dtype == "F32" else 2) * int(np.prod(kind.shape)), np.uint8)
        for name, kind in KINDS.items()
    }


def step(before: Model, seed: int, share: float = 0.05) -> Model:
    """Change a share of the bytes of all tensors but the norm."""
    random = np.random.default_rng(seed)
    after = {name: data.copy() for name, data in before.items()}
    for name, data in after.items():
        if name != "norm":
            changed = random.random(len(data)) < share
            changed[0] = True
            data[changed] ^= random.integers(1, 256, int(changed.sum()), np.uint8)
    return after


def publish(published: PublishedWeights, weights: Model, version: int) -> Written:
    for name, data in weights.items():
        published.add(name, data)
    return published.write(version)


def write_checkpoint(path: Path, weights: Model) -> Path:
    """Write a plain checkpoint, as `save_pretrained` does."""
    path.mkdir(parents=True)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    content = b""
    for name, data in weights.items():
        offsets = (len(content), len(content) + len(data))
        header[name] = {"dtype": KINDS[name].dtype, "shape": KINDS[name].shape, "data_offsets": offsets}
        content += data.tobytes()
    encoded = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + content)
    return path


def read_copy(folder: Path) -> Model:
    """Read the tensors of a checkpoint with the safetensors library."""
    tensors: Model = {}
    for file in sorted(set(read_version(folder).weight_map.values())):
        for name, one in safetensors.deserialize((folder / file).read_bytes()):
            tensors[name] = np.frombuffer(bytes(one["data"]), np.uint8)
            assert (one["dtype"], tuple(one["shape"])) == KINDS[name]
    return tensors


def assert_same(ours: Model, theirs: Model) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not np.array_equal(ours[name], theirs[name])] == []


def fingerprint(weights: Model) -> str:
    """Return what identifies a model's bytes."""
    hasher = xxhash.xxh3_128()
    for name in sorted(weights):
        hasher.update(name.encode())
        hasher.update(weights[name].tobytes())
    return hasher.hexdigest()


# slime ----------------------------------------------------------------------------------------------------------------


def slime_write(root: Path, version: int, before: Model, after: Model, encoding: str = "xor") -> Path:
    """Write a delta as slime's trainer does (`update_weight_from_disk_delta.py`, of one rank)."""
    path = version_path(root, version)
    path.mkdir(parents=True)
    delta, sums = {}, {}
    for name, new in after.items():
        old = before[name]
        changed = new != old
        if not changed.any():
            continue
        if encoding == "xor":
            content = new ^ old
        else:
            at = np.flatnonzero(changed).astype("<u4")
            content = np.concatenate([np.array([at.size], "<u4").view(np.uint8), at.view(np.uint8), new[changed]])
        delta[name] = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(content), np.uint8)
        sums[name] = xxhash.xxh3_128(new).hexdigest()
    if delta:
        (path / "model-00000-of-00001.safetensors").write_bytes(safetensors.numpy.save(delta, metadata=sums))
    metadata = {"version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": encoding}
    metadata |= {"compression_format": "zstd", "checksum_format": "xxh3-128"}
    index = {"metadata": metadata, "weight_map": dict.fromkeys(delta, "model-00000-of-00001.safetensors")}
    (path / INDEX).write_text(json.dumps(index))
    return path


def slime_apply(local: Path, path: Path) -> None:
    """Apply a delta to a checkpoint in one file as slime's engine does (`local_checkpoint.py`)."""
    metadata = json.loads((path / INDEX).read_text())["metadata"]
    assert (metadata["compression_format"], metadata["delta_encoding"]) == ("zstd", "xor")
    (file,) = local.glob("*.safetensors")
    header = read_header(file)
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as content:
        for part in sorted(path.glob("*.safetensors")):
            sums = read_header(part).metadata
            for name, frame in safetensors.numpy.load(part.read_bytes()).items():
                begin, end = header.entries[name].data_offsets
                region = np.ndarray((end - begin,), np.uint8, content, header.data_at + begin)
                region ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(bytes(frame)), np.uint8)
                assert xxhash.xxh3_128(region).hexdigest() == sums[name]
                del region


def damage(path: Path, change: Callable[[bytearray], object]) -> None:
    """Change a file's bytes."""
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
